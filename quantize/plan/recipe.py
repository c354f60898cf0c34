"""Recipes: a preset and the overrides of a user decide the type of every tensor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UsageError
from ...formats.ftypes import FILE_TYPES, FileType, file_type
from ...formats.options import Options, option
from ...formats.source import TensorInfo
from ...formats.values import Value
from .mix_rules import RuleSet
from .overrides import ROLE_FLAGS, Overrides, Rule, flag_name
from .plan import PlannedTensor, check_importance, plan_preset, rules_of
from .roles import is_candidate

log = logging.getLogger(__name__)

COPY = "COPY"  # instead of a preset: all tensors stay as they are
AUTO = "AUTO"  # instead of a preset, on command lines: see `budget`


def _rules_option(flag: str, metavar: str, help: str) -> Any:
    return option((), flag, kind=object, many=True, one_text=True, metavar=metavar, help=help)


@dataclass(frozen=True)
class Recipe(Options):
    """A rule for the type of every tensor.

    type: preset name or number (IQ4_K, Q4_K_M, 15), whose mix gives every tensor its type, or COPY.
    rules: the tool whose mixes are used: `ik` for ik_llama.cpp's llama-quantize, `mainline` for
    llama.cpp's. Presets that only llama.cpp has always follow its rules.

    Overrides, the highest precedence first:
    - tensor_types: types of single tensors by their full names. An unknown name is a UsageError, a
      type that the tensor's shape cannot have a ShapeError.
    - token_embedding_type, output_tensor_type.
    - tensor_patterns: `REGEX=TYPE,REGEX=TYPE` (texts or rules), as --tensor-type, also with `pure`.
    - custom_q: the same as --custom-q, without effect with `pure`.
    - role_types: types by the keys of `overrides.ROLE_FLAGS`, where the mix considers them.
    - pure: all other tensors get the preset's base type instead of its mix.

    leave_output_tensor: keep `output.weight`. allow_requantize: quantized tensors may change their
    type. ignore_imatrix_rules: quantize without an importance matrix even if a type or preset
    demands one. strict: rules that apply to no tensor are an error. symmetric_q40: Q4_0 with codes
    from -7 to 7 and without importances, which restores models that were trained with such codes.
    """

    type: str
    pure: bool = option(
        False,
        "--pure",
        help="use one type for all tensors, without the preset's mix and --custom-q",
    )
    custom_q: str | Sequence[str | Rule] = _rules_option(
        "--custom-q",
        "REGEX=TYPE,..",
        "types for tensors whose names match REGEX, in place of the preset's; the first match"
        " counts; may be repeated",
    )
    role_types: Mapping[str, str] = option(
        {},
        metavar="T",
        keyed={role: (flag_name(role), what) for role, what in ROLE_FLAGS.items()},
    )
    token_embedding_type: str | None = option(
        None, "--token-embedding-type", metavar="T", help="type of token_embd.weight"
    )
    output_tensor_type: str | None = option(
        None, "--output-tensor-type", metavar="T", help="type of output.weight"
    )
    tensor_types: Mapping[str, str] = option({})
    leave_output_tensor: bool = option(
        False, "--leave-output-tensor", help="do not quantize output.weight"
    )
    allow_requantize: bool = option(
        False, "--allow-requantize", help="accept tensors that are already quantized"
    )
    ignore_imatrix_rules: bool = option(
        False,
        "--ignore-imatrix-rules",
        help="quantize without an importance matrix where a type requires one",
    )
    tensor_patterns: str | Sequence[str | Rule] = _rules_option(
        "--tensor-type",
        "REGEX=TYPE",
        "as --custom-q, but it takes precedence, is matched in lower case, and also works with"
        " --pure; may be repeated",
    )
    rules: str = option(
        "ik",
        "--rules",
        choices=("ik", "mainline"),
        help="the mixes of presets: ik_llama.cpp's (default) or llama.cpp's; presets that only"
        " llama.cpp has follow its own",
    )
    strict: bool = option(
        False, "--strict", help="a rule that matches no tensor is an error, not a warning"
    )
    symmetric_q40: bool = option(
        False,
        "--symmetric-q40",
        help="write Q4_0 with codes from -7 to 7 and without the importance matrix, which is exact"
        " for models trained for these codes",
    )

    @property
    def copies(self) -> bool:
        """Return whether all tensors are copied as they are."""
        return self.type.upper() == COPY

    @property
    def preset(self) -> FileType:
        """The preset. Raise UnknownTypeError for COPY and for an unknown name or number."""
        return file_type(self.type)

    @property
    def rule_set(self) -> RuleSet:
        """The rule set with the preset's mix. Raise UsageError for an unknown name, or a preset
        that it lacks.
        """
        return rules_of(self.preset, self.rules)

    def plan(
        self,
        tensors: Sequence[TensorInfo],
        metadata: Mapping[str, Value],
        *,
        imatrix: bool = False,
        allow_requantize: bool = False,
    ) -> list[PlannedTensor]:
        """Plan these tensors in this order; see `plan.plan_preset`. Overrides without effect are
        logged as warnings.

        imatrix: there is an importance matrix with entries. allow_requantize: allow it even if the
        recipe does not. If `strict`, raise UsageError for overrides that COPY leaves without
        effect.
        """
        if self.copies:
            if useless := self._beside_copy():
                if self.strict:
                    raise UsageError(
                        f"{COPY} keeps all types: {', '.join(useless)} apply to no tensor"
                    )
                log.warning("%s keeps all types: %s apply to no tensor", COPY, ", ".join(useless))
            return [PlannedTensor(tensor, tensor, why=COPY) for tensor in tensors]
        overrides = Overrides.of(
            self.custom_q,
            self.role_types,
            self.token_embedding_type,
            self.output_tensor_type,
            self.tensor_types,
            self.tensor_patterns,
            self.strict,
        )
        planned = plan_preset(
            tensors,
            self.preset,
            metadata,
            overrides=overrides,
            pure=self.pure,
            imatrix=imatrix,
            rules=self.rule_set,
            leave_output_tensor=self.leave_output_tensor,
            allow_requantize=self.allow_requantize or allow_requantize,
        )
        if not self.symmetric_q40:
            return planned
        planned = [
            replace(plan, symmetric=(plan.target.type.base or plan.target.type.name) == "Q4_0")
            for plan in planned
        ]
        if not any(plan.symmetric and not plan.kept for plan in planned):
            log.warning("--symmetric-q40 applies to no tensor")
        return planned

    def _beside_copy(self) -> list[str]:
        """Return the flags about types, none of which has an effect."""
        flags = {
            "pure": "--pure",
            "custom_q": "--custom-q",
            "tensor_patterns": "--tensor-type",
            "symmetric_q40": "--symmetric-q40",
            "token_embedding_type": flag_name("token_embedding"),
            "output_tensor_type": flag_name("output_tensor"),
        }
        return [flag for name, flag in flags.items() if getattr(self, name)] + [
            flag_name(role) for role in self.role_types
        ]

    def check_source(self, tensors: Sequence[TensorInfo]) -> None:
        """Refuse a model with these stored tensors if the recipe was made for another one."""

    def check_importance(
        self, planned: Sequence[PlannedTensor], has_entry: Callable[[TensorInfo], bool] | None
    ) -> None:
        """Refuse a plan that lacks importances; see `plan.check_importance`."""
        if not self.copies and not self.ignore_imatrix_rules:
            check_importance(planned, self.preset, has_entry, self.rule_set)

    def file_type(
        self, planned: Sequence[PlannedTensor], metadata: Mapping[str, Value]
    ) -> int | None:
        """Return the number for `general.file_type`: that of the preset, or of a copy that of the
        source, or else of the type that most of its matrices have.
        """
        if not self.copies:
            return self.preset.number
        if (stated := metadata.get("general.file_type")) is not None and isinstance(
            stated.data, int
        ):
            return stated.data
        kinds = Counter(plan.source.type.name for plan in planned if is_candidate(plan.source))
        found = FILE_TYPES.get(kinds.most_common(1)[0][0]) if kinds else None
        return found.number if found else None
