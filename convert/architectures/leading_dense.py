"""Rows of a family's table for models whose first layers are dense and whose others have routed
experts, next to shared ones that work on every token.
"""

from __future__ import annotations

from collections.abc import Container

from ...errors import ConfigError
from ..checkpoint.config import Config
from .blocks import LAYER, in_layers
from .experts import RoutedExperts
from .weight import Weight


def dense_then_experts(
    model: RoutedExperts, n_dense: int, n_shared: int, *, choice_bias: bool
) -> list[Weight]:
    """Return the rows of the dense layers' feed-forward; and for the layers after these, of the
    router [n_experts, n_embd] and of the shared experts, which are stored as one that is
    `n_shared` times as wide (0: none). choice_bias: the router has a bias that only chooses.

    Routed experts need no rows: `RoutedExperts` stacks them.
    """
    d, dense, sparse = model.n_embd, range(n_dense), range(n_dense, model.n_layers)
    router = f"{LAYER}.mlp.gate"
    rows = [
        *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, model.n_ff, dense),
        Weight(router, "blk.{}.ffn_gate_inp", in_layers(sparse, (model.n_experts, d))),
    ]
    if choice_bias:
        rows.append(
            Weight(
                f"{router}.e_score_correction_bias",
                "blk.{}.exp_probs_b.bias",
                in_layers(sparse, (model.n_experts,)),
                exact=True,
            )
        )
    if width := n_shared * model.n_ff_expert:
        rows += gated_rows(f"{LAYER}.mlp.shared_experts", "blk.{{}}.ffn_{}_shexp", d, width, sparse)
    return rows


def gated_rows(stored: str, gguf: str, d: int, ff: int, layers: Container[int]) -> list[Weight]:
    """Return the rows of gate and up [ff, d] and of down [d, ff], in `layers` only. gguf: the names
    of the file, of which `str.format` replaces the part.
    """
    return [
        Weight(f"{stored}.{part}_proj", gguf.format(part), in_layers(layers, shape))
        for part, shape in (("gate", (ff, d)), ("up", (ff, d)), ("down", (d, ff)))
    ]


def count_dense_layers(config: Config, n: int, *, default: int) -> int:
    """Return how many leading layers of n are dense; `default` if no key says so. Raise ConfigError
    where keys differ, or if others are dense, too.
    """
    found: dict[str, int] = {}
    for key in ("first_k_dense_replace", "first_last_k_dense_replace"):
        if key in config:
            found[key] = config.integer(key, minimum=0, maximum=n)
    for key, is_dense in (("mlp_layer_types", "dense"), ("is_moe_layer", False)):
        if key not in config:
            continue
        kinds = config.values[key]
        dense = [kind == is_dense for kind in kinds] if isinstance(kinds, list) else []
        found[key] = sum(dense)
        if dense != [layer < found[key] for layer in range(n)]:
            raise ConfigError(
                f"key '{key}' must say of each of {n} layers whether it is dense, and dense"
                " ones come first",
                file=config.file,
            )
    if len({*found.values()}) > 1:
        said = " and ".join(f"{number} by '{key}'" for key, number in found.items())
        raise ConfigError(f"the number of dense layers is {said}", file=config.file)
    return next(iter(found.values()), default)
