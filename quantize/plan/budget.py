"""Choose types for a given size: one candidate for every tensor, so that together they fit and are
predicted to do the least damage.

Tensors whose type the user gives, and those that are never quantized, count with their own size.
Candidates of all other tensors are the allowed types that their rows can have and that do not need
importances which are missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import UnsupportedTypeError, UsageError
from ...formats.ftypes import FILE_TYPES
from ...formats.source import TensorInfo
from ...formats.types import GGMLType, ggml_type
from .knapsack import Candidate, allocate
from .plan import PlannedTensor
from .recipe import Recipe
from .sensitivity import Sensitivities
from .type_errors import TensorStats, fits

log = logging.getLogger(__name__)

# The preset of the plan in which tensors that its mix decides are free: rules of the user come
# first.
DRAFT = "Q8_0"
# Rows of each tensor from which errors are estimated: a tenth of the work of quantizing an 8B
# model.
SAMPLED_ROWS = 32
NEAR = 0.995  # a result below this fraction of the budget is worth a warning

# Types with blocks of 256 elements that are on or near the Pareto front of size and error, and
# types of 32 for other rows. Excluded by default: ternary and one-bit types of models that are
# trained with them; MXFP4 and NVFP4, whose errors are larger than those of other types of their
# size.
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
class Fitted:
    """A recipe that names the type of every tensor, the bytes of tensor data that it makes, and the
    predicted damage.

    damage: that of every tensor whose type was chosen. is_measured: by sensitivities that were
    measured on the model, so that it is in nats.
    """

    recipe: Recipe
    n_bytes: int
    n_elements: int
    damage: dict[str, float]
    sensitivities: str
    is_measured: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of all tensors together."""
        return 8 * self.n_bytes / max(1, self.n_elements)

    @property
    def predicted_kld(self) -> float:
        """The sum over the tensors whose types were chosen: with measured sensitivities the
        predicted mean KL divergence in nats per token, otherwise without a scale.
        """
        return sum(self.damage.values())


def is_free(plan: PlannedTensor) -> bool:
    """Return whether the budget chooses the type of a tensor in a plan of `DRAFT`: the mix decided
    it, and its rows can have one.
    """
    return plan.why == f"mix of {DRAFT}" and not plan.fallback


def allowed_types(names: Sequence[str], encodable: Sequence[str]) -> list[GGMLType]:
    """Return the types of these names, each once; by default `DEFAULT_TYPES` and `SHORT_ROW_TYPES`.

    Raise UnsupportedTypeError for a type without a search, UsageError for one that is not a plain
    quantized type.
    """
    chosen = dict.fromkeys(ggml_type(name) for name in names or (*DEFAULT_TYPES, *SHORT_ROW_TYPES))
    for type in chosen:
        if not type.is_quantized or type.is_interleaved:
            raise UsageError(f"{type} is not a plain quantized type; repack the result instead")
        if type.name not in encodable:
            raise UnsupportedTypeError(f"there is no quantizer for {type.name}")
    return list(chosen)


def candidates(
    tensor: TensorInfo, weighted: bool, types: Sequence[GGMLType], chosen_by_user: bool
) -> list[GGMLType]:
    """Return the types to try for a tensor. By default types of 32 elements are tried only where
    those of 256 do not fit.

    weighted: there are importances for it. Raise UsageError if no type is left.
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


def refuse_less(draft: Sequence[PlannedTensor], least: int, budget: int) -> None:
    """Raise UsageError if the tensors of the smallest result, `least` bytes, exceed `budget`."""
    if least <= budget:
        return
    elements = sum(plan.target.n_elements for plan in draft)
    raise UsageError(
        f"the smallest possible result has {least} bytes of tensors"
        f" ({8 * least / elements:.4f} bits per weight), but the target is {budget} bytes"
        f" ({8 * budget / elements:.4f} bits per weight)"
    )


def fitted_targets(fitted: Fitted, draft: Sequence[PlannedTensor]) -> list[TensorInfo]:
    """Return the tensors of the result, given the draft that it was made from."""
    types = fitted.recipe.tensor_types
    return [
        plan.target.with_type(ggml_type(types.get(plan.target.name, plan.target.type.name)))
        for plan in draft
    ]


def chosen_types(
    draft: Sequence[PlannedTensor],
    stats: Sequence[TensorStats],
    sensitivities: Sensitivities,
    budget: int,
) -> list[GGMLType]:
    """Return the type of each tensor of `stats`; see `fit_types`."""
    _, picked = _picked(draft, stats, sensitivities, budget)
    return [list(found.errors.values())[index].type for found, index in zip(stats, picked)]


def _picked(
    draft: Sequence[PlannedTensor],
    stats: Sequence[TensorStats],
    sensitivities: Sensitivities,
    budget: int,
) -> tuple[list[list[Candidate]], list[int]]:
    """Return the candidates of each tensor, and the index of the one that is chosen."""
    fixed = sum(plan.target.n_bytes for plan in draft if not is_free(plan))
    choices = [
        [
            Candidate(
                found.tensor.with_type(sums.type).n_bytes,
                sensitivities.damage(found.tensor.name, sums.weighted_rmse**2),
            )
            for sums in found.errors.values()
        ]
        for found in stats
    ]
    least = fixed + sum(min(choice.n_bytes for choice in own) for own in choices)
    refuse_less(draft, least, budget)
    return choices, allocate(choices, budget - fixed)


def fit_types(
    recipe: Recipe,
    draft: Sequence[PlannedTensor],
    stats: Sequence[TensorStats],
    sensitivities: Sensitivities,
    budget: int,
) -> Fitted:
    """Choose the types of the free tensors of `draft`, a plan of `recipe` with the preset `DRAFT`,
    that do the least damage.

    stats: the errors of the candidates of each free tensor, in order. budget: bytes of the data of
    all tensors. Raise UsageError if it cannot be reached, naming the smallest result. The preset of
    the new recipe, which sets `general.file_type` and nothing else, is that of the type with most
    bytes.
    """
    fixed = sum(plan.target.n_bytes for plan in draft if not is_free(plan))
    elements = sum(plan.target.n_elements for plan in draft)
    choices, picked = _picked(draft, stats, sensitivities, budget)
    types = {
        found.tensor.name: list(found.errors.values())[index].type
        for found, index in zip(stats, picked)
    }
    total = fixed + sum(own[index].n_bytes for own, index in zip(choices, picked))
    if total < NEAR * budget:
        log.warning(
            "the result has %.4f bits per weight instead of %.4f: the allowed types come no closer",
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
    return Fitted(fitted, total, elements, damage, sensitivities.note, sensitivities.is_measured)


def _preset_of(bytes_by_type: Counter[str]) -> str:
    """Return the preset for a file whose bytes are mostly of one type: the preset of this name, or
    else the first with this base type.
    """
    most = max(bytes_by_type, key=lambda name: (bytes_by_type[name], name), default=DRAFT)
    if most in FILE_TYPES and FILE_TYPES[most].base.name == most:
        return most
    return next((name for name, kind in FILE_TYPES.items() if kind.base.name == most), DRAFT)
