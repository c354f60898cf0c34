"""Types for a given size: of all that a tensor may have, those that together fit and are predicted
to do least damage.

What the user gave types to, and what is never quantized, counts with the size it has. Everything
else is free: a tensor's candidates are the allowed types that its rows can have, and that need no
importances which are not there.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import UnsupportedTypeError, UsageError
from ...formats.ftypes import FILE_TYPES
from ...formats.source import TensorInfo
from ...formats.types import GGMLType, ggml_type
from .damage import Sensitivities
from .knapsack import Choice, allocate
from .plan import PlannedTensor
from .recipe import Recipe
from .type_errors import TensorStats, fits

log = logging.getLogger(__name__)

DRAFT = (  # a preset that tells apart what is free: its mix, as rules of the user's go before it
    "Q8_0"
)
# of each tensor, from which errors are estimated: a tenth of the work of quantizing a model of 8B
SAMPLED_ROWS = 32
NEAR = 0.995  # of the budget; less is worth a warning

# Types of 256 elements that are on or near the front of size and error somewhere, and those of 32
# for other rows. Left out by default: ternary and one-bit types for models that are trained so,
# MXFP4 and NVFP4, whose errors are larger than others' of their size.
DEFAULT_TYPES = [
    "IQ1_S",
    "IQ1_M",
    "IQ1_KT",
    "IQ2_XXS",
    "IQ2_KT",
    "IQ2_KS",
    "IQ2_XS",
    "IQ2_K",
    "IQ2_S",
    "IQ2_KL",
    "IQ3_XXS",
    "IQ3_KT",
    "IQ3_KS",
    "IQ3_S",
    "IQ3_K",
    "IQ4_KSS",
    "IQ4_KT",
    "IQ4_KS",
    "IQ4_K",
    "IQ5_KS",
    "IQ5_K",
    "Q6_K",
    "IQ6_K",
    "Q8_0",
]
SHORT_ROW_TYPES = ["Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1", "Q6_0", "Q8_0"]


@dataclass(frozen=True)
class Target:
    """How large the result may be: bits per weight of all tensor data, or bytes of the file.
    `types`: names, default as said above.

    damage: file of measured sensitivities (`damage.save_probes`), else roles count.
    """

    bpw: float | None = None
    size: int | None = None
    types: tuple[str, ...] = ()
    damage: str | None = None

    def __post_init__(self) -> None:
        if (self.bpw is None) == (self.size is None):
            raise UsageError("a target is either bits per weight or a size")
        if not (asked := self.size if self.bpw is None else self.bpw) > 0 or asked == math.inf:
            raise UsageError(f"a target of {asked} was asked for, expected more than 0")


@dataclass(frozen=True)
class Fitted:
    """A recipe that names the type of every tensor, bytes of tensor data it makes, and the mean KL
    divergence predicted for it.

    `damage`: predicted divergence by tensor; those of fixed types, which it has no say in, are left
    out.
    """

    recipe: Recipe
    n_bytes: int
    n_elements: int
    damage: dict[str, float]
    sensitivities: str

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / max(1, self.n_elements)

    @property
    def predicted_kld(self) -> float:
        """In nats per token: the sum over the tensors whose types were chosen."""
        return sum(self.damage.values())


def parse_size(text: str | int) -> int:
    """Bytes in `12G` (10^9 each), `11.5GiB` (2^30), `700M`, `700MiB` or a plain number. UsageError
    for anything else.
    """
    if isinstance(text, int):
        return text
    units = {
        "": 1,
        "K": 10**3,
        "M": 10**6,
        "G": 10**9,
        "T": 10**12,
        "KI": 2**10,
        "MI": 2**20,
        "GI": 2**30,
        "TI": 2**40,
    }
    match = re.fullmatch(r"(\d{1,15})(?:\.(\d{1,9}))?([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[3] not in units:
        raise UsageError(
            f"size '{text}': expected a number and a unit, as in 12G (10^9 bytes), 11.5GiB (2^30),"
            " 700M, 700MiB"
        )
    whole, fraction, unit = int(match[1]), match[2] or "", units[match[3]]
    return whole * unit + int(fraction or 0) * unit // 10 ** len(fraction)


def is_free(plan: PlannedTensor) -> bool:
    """Whether the type of a tensor in a plan of `DRAFT` is for the budget to choose: the mix
    decided it, and its rows can have one.
    """
    return plan.why == f"mix of {DRAFT}" and not plan.fallback


def allowed_types(names: Sequence[str], encodable: Sequence[str]) -> list[GGMLType]:
    """Types by name, each once; by default `DEFAULT_TYPES` and `SHORT_ROW_TYPES`.
    UnsupportedTypeError for one without a search, UsageError for one that is not a plain quantized
    type.
    """
    chosen = dict.fromkeys(ggml_type(name) for name in names or (*DEFAULT_TYPES, *SHORT_ROW_TYPES))
    for type in chosen:
        if not type.is_quantized or type.is_interleaved:
            raise UsageError(
                f"{type} is not a plain quantized type; repacking is a step of its own"
            )
        if type.name not in encodable:
            raise UnsupportedTypeError(f"there is no quantizer for {type.name}")
    return list(chosen)


def candidates(
    tensor: TensorInfo, weighted: bool, types: Sequence[GGMLType], chosen_by_user: bool
) -> list[GGMLType]:
    """The types that are tried for a tensor. weighted: there are importances for it. UsageError
    where none is left.

    By default types of 32 elements are only tried where those of 256 do not fit.
    """
    fitting = [
        type for type in types if fits(type, tensor) and (weighted or not type.needs_importance)
    ]
    if not chosen_by_user and tensor.n_cols % 256 == 0:
        fitting = [type for type in fitting if type.name in DEFAULT_TYPES]
    if not fitting:
        why = "" if weighted else " without importances"
        raise UsageError(
            f"none of the types fits its rows of {tensor.n_cols}{why}", tensor=tensor.name
        )
    return fitting


def fitted_targets(fitted: Fitted, draft: Sequence[PlannedTensor]) -> list[TensorInfo]:
    """The tensors of the result, from the draft that it was made of."""
    types = fitted.recipe.tensor_types
    return [
        plan.target.with_type(ggml_type(types.get(plan.target.name, plan.target.type.name)))
        for plan in draft
    ]


def fit_types(
    recipe: Recipe,
    draft: Sequence[PlannedTensor],
    stats: Sequence[TensorStats],
    sensitivities: Sensitivities,
    budget: int,
) -> Fitted:
    """The recipe that chooses for the free tensors of `draft`, a plan of `recipe` with the preset
    `DRAFT`, what does least damage.

    stats: of each free tensor, in their order, the errors of its candidates. budget: bytes of the
    data of all tensors. UsageError if it cannot be reached, saying what can. The recipe's preset,
    which `general.file_type` is after, is the one that starts from the type of most bytes; it
    decides nothing else.
    """
    fixed = sum(plan.target.n_bytes for plan in draft if not is_free(plan))
    elements = sum(plan.target.n_elements for plan in draft)
    choices = [
        [
            Choice(
                found.tensor.with_type(sums.type).n_bytes,
                sensitivities.damage(found.tensor.name, sums.weighted_rmse**2),
            )
            for sums in found.errors.values()
        ]
        for found in stats
    ]
    least = fixed + sum(min(choice.n_bytes for choice in own) for own in choices)
    if least > budget:
        raise UsageError(
            f"the smallest possible result has {least} bytes of tensors, {8 * least / elements:.4f}"
            f" bits per weight; {budget} bytes, {8 * budget / elements:.4f} bits per weight, were"
            " asked for"
        )
    picked = allocate(choices, budget - fixed)
    types = {
        found.tensor.name: list(found.errors.values())[index].type
        for found, index in zip(stats, picked)
    }
    total = fixed + sum(own[index].n_bytes for own, index in zip(choices, picked))
    if total < NEAR * budget:
        log.warning(
            "the result has %.4f bits per weight, %.4f were asked for: the allowed types give"
            " nothing nearer",
            8 * total / elements,
            8 * budget / elements,
        )
    given = {
        plan.source.name: plan.target.type.name
        for plan in draft
        if not is_free(plan) and not plan.kept
    }
    bytes_by_type: Counter[str] = Counter()
    for found, index, own in zip(stats, picked, choices):
        bytes_by_type[types[found.tensor.name].name] += own[index].n_bytes
    fitted = replace(
        recipe,
        type=_preset_of(bytes_by_type),
        tensor_types={**given, **{name: type.name for name, type in types.items()}},
        custom_q=(),
        tensor_patterns=(),
        role_types={},
        token_embedding_type=None,
        output_tensor_type=None,
    )
    damage = {
        found.tensor.name: own[index].damage for found, index, own in zip(stats, picked, choices)
    }
    return Fitted(fitted, total, elements, damage, sensitivities.note)


def _preset_of(bytes_by_type: Counter[str]) -> str:
    """The preset after which a file is called whose bytes are mostly of one type: of this name, or
    else the first that starts from it.
    """
    most = max(bytes_by_type, key=lambda name: (bytes_by_type[name], name), default=DRAFT)
    if most in FILE_TYPES and FILE_TYPES[most].base.name == most:
        return most
    return next((name for name, kind in FILE_TYPES.items() if kind.base.name == most), DRAFT)
