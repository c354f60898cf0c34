"""What decides the type of every tensor: a preset and all that a user says beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..formats.ftypes import FileType, file_type
from ..formats.gguf.values import Value
from ..formats.source import TensorInfo
from .overrides import Overrides
from .plan import PlannedTensor, plan_preset


@dataclass(frozen=True)
class Recipe:
    """type: preset name or number (IQ4_K, Q4_K_M, 15), whose mix gives every tensor its type, as llama-quantize of ik_llama.cpp does.

    pure: the preset's base type everywhere instead. custom_q: `REGEX=TYPE,REGEX=TYPE` (one text or several), which win over the mix.
    role_types: types by the keys of `overrides.ROLE_FLAGS`, where the mix lets them count. token_embedding_type, output_tensor_type: win
    over all of these. tensor_types: types of single tensors by their full names, which win over everything and are taken as they are; a
    name that no tensor has is a UsageError, a type that its shape cannot have a ShapeError. leave_output_tensor: `output.weight` is kept. allow_requantize: quantized tensors may change their type.
    ignore_imatrix_rules: do without an importance matrix where a type or preset demands one.
    """

    type: str
    pure: bool = False
    custom_q: str | Sequence[str] = ()
    role_types: Mapping[str, str] = field(default_factory=dict)
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None
    tensor_types: Mapping[str, str] = field(default_factory=dict)
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    ignore_imatrix_rules: bool = False

    @property
    def preset(self) -> FileType:
        """UnknownTypeError for a name or number that is none."""
        return file_type(self.type)

    def plan(self, tensors: Sequence[TensorInfo], metadata: Mapping[str, Value], *, imatrix: bool = False,
             allow_requantize: bool = False) -> list[PlannedTensor]:
        """What these tensors, in this order, become; see `plan.plan_preset`. What counts for no tensor is logged as a warning.

        imatrix: there is an importance matrix with entries. allow_requantize: whatever the recipe says.
        """
        overrides = Overrides.of(self.custom_q, self.role_types, self.token_embedding_type, self.output_tensor_type,
                                 self.tensor_types)
        return plan_preset(tensors, self.preset, metadata, overrides=overrides, pure=self.pure, imatrix=imatrix,
                           leave_output_tensor=self.leave_output_tensor, allow_requantize=self.allow_requantize or allow_requantize)
