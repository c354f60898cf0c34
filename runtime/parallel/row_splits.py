"""How layers that work on every row alone are split: dense feed-forward layers by hidden columns,
experts by hidden columns or as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...formats.tensor_names import TensorName
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.moe import MoE
from ..weights.split_plan import LayerShare, Range
from .apportion import Balanced, ranges
from .expert_mode import ExpertChoice, choose_mode
from .mixer_splits import Parts
from .tensor_splits import TensorSplits, fitting, least_common, scaled, stem

if TYPE_CHECKING:
    from ..weights.linear import Linear
    from ..weights.stacked_linear import ExpertLinear

_MORE_COLUMNS = 1.02  # that a rank may have, so that all are multiples of a larger step


def plan_ffn(
    module: GatedFFN | PlainFFN,
    splits: TensorSplits,
    parts: Parts,
    allowed: Sequence[bool] | None = None,
) -> Parts:
    """Split a dense feed-forward layer by hidden columns. allowed: it is a shared expert, and only
    these ranks may have a part of it.
    """
    hidden = module.down.cols
    inputs = _inputs(module)
    unit = _unit(splits, hidden, [p.name for p in inputs], [module.down.name])
    if allowed is None:
        counts = splits.apportion.units(hidden // unit, "ffn", float(hidden))
    else:
        shares = [s if on else 0.0 for s, on in zip(splits.apportion.shares, allowed, strict=True)]
        counts = _among(splits, shares, hidden // unit, hidden)
    held = ranges(counts, unit)
    _split_inputs(inputs, held, hidden, splits)
    splits.columns(stem(module.down.name), [[r] for r in held])
    key = "ffn" if allowed is None else "shared_ffn"
    return tuple(replace(part, **{key: r}) for part, r in zip(parts, held, strict=True))


def plan_experts(
    module: MoE, splits: TensorSplits, parts: Parts, choice: ExpertChoice = "auto"
) -> Parts:
    """Split experts, and the shared one; the router is whole on every rank."""
    spec, down = module.spec, module.experts.down
    splits.copy(module.router.linear.name)
    for other in ("exp_probs_b.bias", "exp_probs_b", "ffn_gate_tid2eid.weight"):
        splits.copy(module.router.linear.name.replace("ffn_gate_inp.weight", other))
    inputs = [m for m in (module.experts.gate, module.experts.up, module.experts.gate_up) if m]
    hidden, shares = down.cols, splits.apportion.shares
    names = [name for m in inputs for name in m.tensors]
    unit = _unit(splits, hidden, names, down.tensors)
    mode = choose_mode(choice, shares, hidden // unit, spec.n_experts, spec.n_used)
    if mode == "columns":
        held = ranges(splits.apportion.units(hidden // unit, "experts", float(hidden)), unit)
        found = [
            replace(part, experts=(0, spec.n_experts) if r != (0, 0) else r, expert_ffn=r)
            for part, r in zip(parts, held, strict=True)
        ]
    else:
        held = ranges(splits.apportion.units(spec.n_experts, "experts", float(hidden)), 1)
        found = [
            replace(part, experts=r, expert_ffn=(0, hidden) if r != (0, 0) else r)
            for part, r in zip(parts, held, strict=True)
        ]
    found = [replace(part, expert_mode=mode) for part in found]
    if module.latent is not None:
        splits.copy(module.latent.down.name)
        splits.copy(module.latent.up.name)
    _split_experts(module, inputs, found, hidden, splits)
    result: Parts = tuple(found)
    if module.shared is not None:
        result = plan_ffn(module.shared, splits, result, [r != (0, 0) for r in held])
        if module.shared_gate is not None:
            splits.copy(module.shared_gate.name)
    return result


def _inputs(module: GatedFFN | PlainFFN) -> list[Linear]:
    if isinstance(module, PlainFFN):
        return [module.up]
    return [m for m in (module.gate, module.up, module.gate_up) if m is not None]


def _unit(splits: TensorSplits, hidden: int, inputs: Sequence[str], outputs: Sequence[str]) -> int:
    """Return the unit of hidden columns: whole blocks of `outputs` and whole groups of the rows of
    `inputs`, and the largest of the steps with which the busiest rank has hardly more columns than
    with others.
    """
    unit = least_common(splits.row_unit(*inputs), splits.column_unit(*outputs))
    steps = [least_common(unit, step) for step in splits.column_steps]
    whole = [step for step in steps if hidden % step == 0]
    if not whole:
        return fitting(unit, hidden)
    n_ranks = sum(share > 0 for share in splits.apportion.shares)
    busiest = [math.ceil(hidden / step / n_ranks) * step for step in whole]
    return next(
        step
        for step, most in zip(whole, busiest, strict=True)
        if most <= _MORE_COLUMNS * min(busiest)
    )


def _among(splits: TensorSplits, shares: Sequence[float], n: int, hidden: int) -> tuple[int, ...]:
    total = sum(shares)
    if math.isclose(total, 1.0):
        return splits.apportion.units(n, "shared", float(hidden))
    return Balanced([share / total for share in shares]).units(n, "")


def _split_inputs(
    inputs: Sequence[Linear], held: Sequence[Range], hidden: int, splits: TensorSplits
) -> None:
    for product in inputs:
        name = product.name
        splits.rows(stem(name), _twice(splits, name, held, hidden))


def _twice(
    splits: TensorSplits, name: str, held: Sequence[Range], hidden: int
) -> list[list[Range]]:
    """Return the rows for hidden columns: also those of the second half where the rows of up are
    after those of the gate.
    """
    halves = splits.tensors[name].shape[-2] // hidden
    return [[scaled(r, 1, half * hidden) for half in range(halves)] for r in held]


def _split_experts(
    module: MoE,
    inputs: Sequence[ExpertLinear],
    parts: Sequence[LayerShare],
    hidden: int,
    splits: TensorSplits,
) -> None:
    down, mode = module.experts.down, parts[0].expert_mode
    experts = [[part.experts] for part in parts]
    columns = [part.expert_ffn for part in parts]
    n = module.spec.n_experts
    for product in (*inputs, down):
        names = product.tensors
        alone = len(names) >= n and TensorName.parse(names[0]).expert is not None
        for index, name in enumerate(names):
            if mode == "whole" and alone:
                splits.single(name, experts, index % n)
            elif mode == "whole":
                splits.experts(stem(name), experts, sum_after=product is down)
            elif product is not down:
                splits.rows(stem(name), _twice(splits, name, columns, hidden))
            else:
                splits.columns(stem(name), [[r] for r in columns])
