"""Decide the type of every tensor before anything is read or written.

This follows llama-quantize of ik_llama.cpp or of llama.cpp: the mixes of presets, `--pure` and the
types given by users, fallbacks for rows that a type cannot hold, and what is refused without an
importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import ImatrixError, UnsupportedTypeError, UsageError
from ...formats.ftypes import FileType
from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT, PER_LAYER_EMBEDDING, TOKEN_EMBEDDING, TensorName
from ...formats.types import ggml_type
from ...formats.values import Value
from .fallbacks import BY_ROW, type_that_fits
from .mainline import MAINLINE, ONLY_MAINLINE, RULE_SETS
from .mix import Mix
from .mix_rules import RuleSet
from .overrides import Chosen, Overrides, flag_name
from .presets import IK
from .review import review_rules
from .roles import NEVER_INTERLEAVED, ModelFacts, is_candidate


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor with its types in the source and in the output.

    note: why it does not get the requested type. fallback: the tensor cannot have the requested
    type. why: what decided the type: a preset's mix, a rule or a flag. nan_to_zero: if the tensor
    changes its type, NaN and infinities in the source become 0 instead of an error. symmetric: Q4_0
    with codes from -7 to 7, without importances.
    """

    source: TensorInfo
    target: TensorInfo
    note: str = ""
    fallback: bool = False
    nan_to_zero: bool = False
    why: str = ""
    symmetric: bool = False

    @property
    def kept(self) -> bool:
        """Whether the tensor keeps its type, so that its bytes are copied."""
        return self.source.type is self.target.type


def rules_of(preset: FileType, name: str = "ik") -> RuleSet:
    """Return the rule set `name`, `ik` or `mainline`. Presets that only llama.cpp has always get
    `mainline`.

    Raise UsageError for an unknown name, and for a preset that llama.cpp does not have.
    """
    if name not in RULE_SETS:
        raise UsageError(f"unknown rules '{name}', expected {' or '.join(RULE_SETS)}")
    rules = MAINLINE if preset.name in ONLY_MAINLINE else RULE_SETS[name]
    if rules.presets is not None and preset.name not in rules.presets:
        raise UsageError(f"the rules of llama.cpp ({rules.name}) have no preset {preset.name}")
    return rules


def plan_preset(
    tensors: Sequence[TensorInfo],
    preset: FileType,
    metadata: Mapping[str, Value],
    *,
    overrides: Overrides | None = None,
    pure: bool = False,
    imatrix: bool = False,
    leave_output_tensor: bool = False,
    allow_requantize: bool = False,
    rules: RuleSet | None = None,
) -> list[PlannedTensor]:
    """Plan tensors in this order as llama-quantize does, for a model with this metadata (GGUF
    keys).

    Every candidate gets the type of the first pattern that matches, else of the first custom rule,
    else of the preset's mix. `pure` skips the last two, float presets all three. Rows that the type
    cannot hold get its fallback. Types given to embeddings, output and routers are applied after
    that, and types given to single tensors by name (`overrides.exact`) override everything.

    rules: `rules_of(preset)` by default. imatrix: there is an importance matrix with entries, for
    whichever tensors. Raise UsageError if a quantized tensor would change without
    `allow_requantize`, ShapeError for rows without a fallback. Overrides without effect and rules
    that compete are logged.
    """
    overrides = overrides or Overrides()
    overrides.check_names(tensors)
    rules = rules or rules_of(preset)
    facts = ModelFacts.of(metadata, tensors, rules.value_parts)
    mixed = ggml_type(preset.base.base or preset.base.name).is_quantized
    mix = Mix(rules, preset, facts, imatrix, overrides.types)

    def wanted(tensor: TensorInfo) -> Chosen:
        if not mixed:
            return preset.base, f"{preset.name} is one type for all"
        if given := overrides.pattern_type(tensor.name):
            return given
        if pure:
            return preset.base, "--pure"
        chosen, flag = mix.type_of(tensor)
        return overrides.custom_type(tensor.name) or (
            chosen,
            flag_name(flag) if flag else f"mix of {preset.name}",
        )

    # The original takes BF16_R16 literally for the embeddings by layer, but not quantized types.
    by_row = (TOKEN_EMBEDDING,) if preset.base.name == "BF16_R16" else NEVER_INTERLEAVED
    planned = plan_types(
        tensors,
        wanted,
        overrides,
        facts.architecture,
        leave_output_tensor,
        allow_requantize,
        by_row,
        rules,
    )
    overrides.used |= mix.used
    overrides.warn_of_unused_roles()
    texts = {str(rule): rule for rule in reversed([*overrides.patterns, *overrides.custom])}
    decided = {plan.source.name: texts[plan.why] for plan in planned if plan.why in texts}
    review_rules(
        [*overrides.patterns, *overrides.custom],
        [plan.target for plan in planned],
        decided,
        overrides.strict,
    )
    return planned


def plan_types(
    tensors: Sequence[TensorInfo],
    wanted: Callable[[TensorInfo], Chosen],
    overrides: Overrides,
    architecture: str,
    leave_output_tensor: bool,
    allow_requantize: bool,
    by_row: tuple[str, ...] = NEVER_INTERLEAVED,
    rules: RuleSet = IK,
) -> list[PlannedTensor]:
    """Plan tensors whose candidates get the type that `wanted` returns, and its fallbacks.

    by_row: names of tensors that are looked up by row. For the other parameters see `plan_preset`.
    Raise UsageError for a quantized tensor that may not be requantized.
    """
    planned: dict[str, PlannedTensor] = {}
    for tensor in rules.in_order(tensors):
        candidate = is_candidate(tensor, architecture, "ffn_gate_inp" in overrides.types, rules)
        # Mixes count tensors.
        mixed = (
            wanted(tensor)
            if candidate and not (leave_output_tensor and tensor.name == OUTPUT)
            else None
        )
        if given := overrides.exact_type(tensor):
            (chosen, why), note = given, ""
        elif mixed is None:
            planned[tensor.name] = PlannedTensor(
                tensor, tensor, why="--leave-output-tensor" if candidate else "never quantized"
            )
            continue
        else:
            asked, why = _explicit(tensor.name, overrides, rules) or mixed
            chosen, note = type_that_fits(tensor, asked, by_row, rules)
        if chosen is not tensor.type and tensor.type.is_quantized and not allow_requantize:
            raise UsageError(
                f"is {tensor.type}: requantizing to {chosen} needs --allow-requantize",
                tensor=tensor.name,
            )
        fallback = bool(note) and not note.startswith(BY_ROW)
        planned[tensor.name] = PlannedTensor(
            tensor, tensor.with_type(chosen), note, fallback, why=why
        )
    return [planned[tensor.name] for tensor in tensors]


def _explicit(name: str, overrides: Overrides, rules: RuleSet) -> Chosen | None:
    """Return the type that a flag gives to this tensor, whatever mixes and rules say."""
    if TensorName.parse(name).is_router:
        return overrides.role_type("ffn_gate_inp")
    if name == PER_LAYER_EMBEDDING and rules is MAINLINE and not overrides.pattern_type(name):
        return overrides.role_type("per_layer_token_embedding") or overrides.role_type(
            "token_embedding"
        )
    roles = {
        TOKEN_EMBEDDING: "token_embedding",
        PER_LAYER_EMBEDDING: "per_layer_token_embedding",
        OUTPUT: "output_tensor",
    }
    return overrides.role_type(roles[name]) if name in roles else None


def check_importance(
    planned: Sequence[PlannedTensor],
    preset: FileType,
    has_entry: Callable[[TensorInfo], bool] | None,
    rules: RuleSet | None = None,
) -> None:
    """Refuse what llama-quantize refuses: presets and types of so few bits that they are useless
    without importances.

    has_entry: returns whether the importance matrix has an entry for a tensor; None if there is no
    matrix. Raise UsageError for a preset without a matrix, ImatrixError for a tensor without an
    entry. Token embedding and output need none.
    """
    rules = rules or rules_of(preset)
    if has_entry is None and preset.name in rules.need_preset:
        raise UsageError(
            f"{preset.name} is useless without an importance matrix: pass --imatrix, or use"
            " iqforge quantize --ignore-imatrix-rules"
        )
    for plan in planned:
        target = plan.target.type
        needs = (
            target.needs_importance
            or target.name in rules.need_type
            or (preset.name == "Q2_K_S" and target.name == "Q2_K")
        )
        if (
            plan.kept
            or not needs
            or plan.source.name in rules.no_need
            or (has_entry is not None and has_entry(plan.source))
        ):
            continue
        raise ImatrixError(
            f"{target} needs importances, and there are none for this tensor; iqforge quantize"
            " --ignore-imatrix-rules quantizes without them",
            tensor=plan.source.name,
        )


def check_supported(
    planned: Sequence[PlannedTensor], decodable: Sequence[str], encodable: Sequence[str]
) -> None:
    """Raise UnsupportedTypeError naming the first tensor whose types have no decoder or search."""
    for tensor in planned:
        if tensor.kept:
            continue
        if tensor.source.type.name not in decodable:
            raise UnsupportedTypeError(
                f"{tensor.source.type} cannot be decoded row by row", tensor=tensor.source.name
            )
        if tensor.target.type.name not in encodable:
            raise UnsupportedTypeError(
                f"there is no quantizer for {tensor.target.type}", tensor=tensor.target.name
            )
