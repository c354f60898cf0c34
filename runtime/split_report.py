"""What a split plan means for each rank: units, bytes, cache, what moves, and predicted speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..formats.source import Source, TensorInfo
from ..formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName
from .layers.block import Mixer
from .layers.delta_net import DeltaNet
from .layers.mla import MLA
from .network.network import Network
from .parallel.expert_mode import ExpertChoice
from .parallel.share import NoMeeting, Share
from .parallel.simulate import H200, Costs, Prediction, Work, simulate
from .split_model import exchanges_of, make_plan, network_of, sums_of
from .state.cache import CacheSettings
from .weights.shard import local_tensor
from .weights.split_plan import SplitPlan
from .weights.switches import Switches

_ONE = SplitPlan((1.0,), {}, ())  # all on one GPU


@dataclass(frozen=True)
class RoleSplit:
    """The tensors of one role, of all layers.

    kind: as that of `TensorSplit`; several are joined by "/". whole: elements of the dimension that
    is split; 0 if none is. unit: of which all cuts are multiples. sizes: the least and the largest
    number of elements in a layer, for each rank. n_bytes: of all layers, for each rank.
    """

    role: str
    kind: str
    whole: int
    unit: int
    sizes: tuple[tuple[int, int], ...]
    n_bytes: tuple[int, ...]


@dataclass(frozen=True)
class SplitReport:
    """A plan for a model, and what it means.

    weights: bytes of each rank, the sum over `roles`. copied: those of them that every rank has.
    whole: bytes of the model. context: tokens of the sequence whose cache takes `cache` bytes on
    each rank, and `whole_cache` on one GPU. prediction: for `len(weights)` GPUs, whether there are
    any or not. alone: for one.
    """

    model: str
    architecture: str
    plan: SplitPlan
    roles: tuple[RoleSplit, ...]
    weights: tuple[int, ...]
    copied: int
    whole: int
    context: int
    cache: tuple[int, ...]
    whole_cache: int
    costs: Costs
    prediction: Prediction
    alone: Prediction

    @property
    def fits(self) -> bool:
        """Return whether weights and cache fit the GPUs that the prediction is for."""
        both = zip(self.weights, self.cache, strict=True)
        return max(map(sum, both)) <= self.costs.memory

    @property
    def fits_alone(self) -> bool:
        """Return whether weights and cache fit one of them."""
        return self.whole + self.whole_cache <= self.costs.memory

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can have it."""
        found: dict[str, Any] = asdict(self)
        found |= {"fits": self.fits, "fits_alone": self.fits_alone}
        plan = found.pop("plan")
        found["shares"], found["layers"] = plan["shares"], plan["layers"]
        found["tensors"] = plan["tensors"]
        for which in ("prediction", "alone"):
            one: Prediction = getattr(self, which)
            found[which] |= {"step_rate": one.step_rate, "prompt_rate": one.prompt_rate}
        return found


def split_report(
    source: Source,
    shares: Sequence[float],
    *,
    experts: ExpertChoice = "auto",
    reference: bool = False,
    switches: Switches = Switches(),
    settings: CacheSettings = CacheSettings(),
    context: int = 8192,
    n_past: int = 0,
    n_prompt: int = 2048,
    reduce_bytes: float = 2.0,
    n_hosts: int = 1,
    costs: Costs = H200,
) -> SplitReport:
    """Plan a split and say what it means. n_past: tokens before those whose speed is predicted.
    Other arguments: see `plan_split` and `simulate`.
    """
    plan = make_plan(source, shares, switches, experts=experts, reference=reference)
    settings = replace(settings, swa_full=True)  # as kernels need
    whole = network_of(source, switches)
    tensors = _used(source, plan)
    ranks = [network_of(source, switches, Share(plan, r, NoMeeting())) for r in range(plan.n_ranks)]
    options: dict[str, Any] = {
        "n_prompt": n_prompt,
        "reduce_bytes": reduce_bytes,
        "costs": costs,
    }
    roles = _roles(tensors, plan)
    work, whole_work = (
        _work(whole, networks, n_past, settings, n_prompt) for networks in (ranks, [whole])
    )
    local = [network.state_bytes(context, settings, n_prompt) for network in ranks]
    return SplitReport(
        str(source.path),
        str(source.metadata["general.architecture"].data),
        plan,
        roles,
        tuple(sum(role.n_bytes[rank] for role in roles) for rank in range(plan.n_ranks)),
        sum(t.n_bytes for t in tensors if plan.of(t.name).kind == "copy"),
        sum(t.n_bytes for t in tensors),
        context,
        tuple(local),
        whole.state_bytes(context, settings, n_prompt),
        costs,
        simulate(tensors, plan, work, n_hosts=n_hosts, **options),
        simulate(tensors, _ONE, whole_work, **options),
    )


def faster_alone(
    source: Source, plan: SplitPlan, room: float, switches: Switches = Switches()
) -> str | None:
    """Say that one GPU is predicted to generate faster than those of the plan; None if it is not,
    or has less than `room` bytes for the weights.
    """
    tensors = _used(source, plan)
    if sum(tensor.n_bytes for tensor in tensors) > room:
        return None
    whole, settings = network_of(source, switches), CacheSettings()
    alone = simulate(tensors, _ONE, _work(whole, [whole], 0, settings))
    split = simulate(tensors, plan, _work(whole, [whole] * plan.n_ranks, 0, settings))
    if alone.step >= split.step:
        return None
    return (
        f"one GPU is predicted to generate faster than {plan.n_ranks}"
        f" ({alone.step_rate:.0f} and {split.step_rate:.0f} t/s on H200s), and prompts slower"
        f" ({alone.prompt_rate:,.0f} and {split.prompt_rate:,.0f})"
    )


def _used(source: Source, plan: SplitPlan) -> list[TensorInfo]:
    """Return the tensors that the model uses."""
    return [t for t in source.tensors if t.name in plan.tensors or t.name == TOKEN_EMBEDDING]


def _work(
    whole: Network,
    networks: Sequence[Network],
    n_past: int,
    settings: CacheSettings,
    n_prompt: int = 2048,
) -> Work:
    """Return what a model has besides tensors. networks: of every rank."""
    used, experts = zip(*(_experts(block.row_layers) for block in whole.blocks), strict=True)
    return Work(
        whole.width,
        whole.n_vocab,
        used,
        experts,
        tuple(sums_of(block) for block in whole.blocks),
        tuple(exchanges_of(block) for block in whole.blocks),
        tuple(_mixer(block.mixer) for block in whole.blocks),
        n_past,
        tuple(
            sum(block.mixer.read_bytes(n_past, 1, settings) for block in network.blocks)
            for network in networks
        ),
        tuple(
            sum(_attended(block.mixer, n_past, n_prompt) for block in network.blocks)
            for network in networks
        ),
    )


def _attended(mixer: Mixer, n_past: int, n_prompt: int) -> float:
    """Return the operations that a prompt takes because of the tokens before."""
    return mixer.flop(n_past, n_prompt) - mixer.flop(0, n_prompt)


def _mixer(mixer: Any) -> str:
    return (
        "latent"
        if isinstance(mixer, MLA)
        else "delta"
        if isinstance(mixer, DeltaNet)
        else "attention"
    )


def _experts(layers: Sequence[Any]) -> tuple[int, int]:
    """Return how many experts a token uses in a block, and how many there are."""
    for layer in layers:
        if layer.expert_share < 1:
            return layer.experts_used, round(layer.experts_used / layer.expert_share)
    return 0, 0


def _roles(tensors: Sequence[TensorInfo], plan: SplitPlan) -> tuple[RoleSplit, ...]:
    """Return the split of every role, in the order of the file; the output is last."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(_role(tensor), []).append(tensor)
    if (split := plan.tensors.get(OUTPUT)) is not None and split.tied:
        [table] = [tensor for tensor in tensors if tensor.name == split.tied]
        groups["output"] = [TensorInfo(OUTPUT, table.shape, table.type)]
    found = []
    for role, members in groups.items():
        cuts, kinds, whole = [], {}, 0
        sizes: list[list[int]] = [[] for _ in range(plan.n_ranks)]
        n_bytes = [0] * plan.n_ranks
        for tensor in members:
            one = plan.of(tensor.name)
            kinds[one.kind] = True
            n = tensor.shape[one.axis] if one.ranges else 0
            whole = max(whole, n)
            cuts += [end for ranges in one.ranges for both in ranges for end in both]
            for rank in range(plan.n_ranks):
                local = local_tensor(tensor, one, rank)
                n_bytes[rank] += 0 if local is None else local.n_bytes
                sizes[rank].append(one.size(rank, n) if one.ranges else 0)
        spans = tuple((min(each), max(each)) for each in sizes)
        found.append(
            RoleSplit(role, "/".join(kinds), whole, math.gcd(*cuts), spans, tuple(n_bytes))
        )
    return tuple(found)


def _role(tensor: TensorInfo) -> str:
    """Return the name of a tensor without its layer; vectors that are copied are one role."""
    name = TensorName.parse(tensor.name)
    return name.stem if name.suffix == "weight" else name.local
