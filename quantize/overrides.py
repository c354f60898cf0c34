"""Types a user gives to tensors, by role or by name, beside what the preset would choose."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ShapeError, UnknownTypeError, UsageError
from ..formats.source import TensorInfo
from ..formats.types import GGMLType, ggml_type

log = logging.getLogger(__name__)

Chosen = tuple[GGMLType, str]  # a type, and what decided it

# Flags of llama-quantize of ik_llama.cpp, `--attn-q-type` for attn_q: what they count for.
ROLE_FLAGS = {
    "attn_q": "tensors with attn_q in their names, attn_qkv among them", "attn_k": "tensors with attn_k in their names",
    "attn_v": "attn_v.weight", "attn_qkv": "accepted, but changes nothing: attn_qkv takes --attn-q-type",
    "attn_output": "attn_output.weight", "ffn_gate": "tensors with ffn_gate in their names", "ffn_down": "with ffn_down in their names",
    "ffn_up": "with ffn_up in their names", "ffn_gate_inp": "expert routers, which are kept otherwise",
    "per_layer_token_embedding": "per_layer_token_embd.weight",
}


def flag_name(role: str) -> str:
    """How a role is called on the command line."""
    return f"--{role.replace('_', '-')}-type"


def regular_expressions(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Compiled `patterns` for names of tensors. UsageError naming one that is not a regular expression."""
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(f"'{pattern}' is not a regular expression: {error}") from None
    return compiled


@dataclass
class Overrides:
    """`types` by role (those of ROLE_FLAGS, token_embedding and output_tensor), `custom` rules of which the first that matches counts.

    exact: types of single tensors by their full names, which win over everything. `used` collects what counted for a tensor: roles, and
    the texts of expressions.
    """

    types: dict[str, GGMLType] = field(default_factory=dict)
    custom: list[tuple[re.Pattern[str], GGMLType]] = field(default_factory=list)
    exact: dict[str, GGMLType] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, custom: str | Iterable[str] = (), roles: Mapping[str, str] | None = None, token_embedding: str | None = None,
           output_tensor: str | None = None, exact: Mapping[str, str] | None = None) -> Overrides:
        """custom: `REGEX=TYPE,REGEX=TYPE`, any number of such texts. roles: type names by the keys of ROLE_FLAGS. exact: type names by
        names of tensors.

        UsageError for what is none of these, UnknownTypeError for names that are no types."""
        roles = dict(roles or {})
        if unknown := roles.keys() - ROLE_FLAGS.keys():
            raise UsageError(f"unknown roles {', '.join(sorted(unknown))}; known are {', '.join(ROLE_FLAGS)}")
        roles |= {"token_embedding": token_embedding, "output_tensor": output_tensor}
        rules = [rule for text in ([custom] if isinstance(custom, str) else custom) for rule in _custom(text)]
        return cls({role: ggml_type(name) for role, name in roles.items() if name is not None}, rules,
                   {name: ggml_type(kind) for name, kind in (exact or {}).items()})

    def custom_type(self, name: str) -> Chosen | None:
        """The type of the first rule found anywhere in the name of a tensor."""
        for pattern, type in self.custom:
            if pattern.search(name):
                self.used.add(pattern.pattern)
                return type, f"--custom-q {pattern.pattern}={type.type_name}"
        return None

    def role_type(self, role: str) -> Chosen | None:
        """The type given to a role."""
        if role not in self.types:
            return None
        self.used.add(role)
        return self.types[role], flag_name(role)

    def exact_type(self, tensor: TensorInfo) -> Chosen | None:
        """The type given to this very tensor. ShapeError if the tensor cannot have it."""
        if (given := self.exact.get(tensor.name)) is None:
            return None
        try:
            given.tensor_bytes(tensor.shape)
        except ShapeError as error:
            raise ShapeError(f"cannot be {given}: {error.message}", tensor=tensor.name) from None
        return given, "given by name"

    def check_names(self, tensors: Sequence[TensorInfo]) -> None:
        """UsageError for a type given to a tensor that is not there."""
        names = [tensor.name for tensor in tensors]
        if missing := sorted(self.exact.keys() - set(names)):
            close = difflib.get_close_matches(missing[0], names, n=1)
            raise UsageError("a type is given to it, but there is no such tensor" + (f"; did you mean {close[0]}?" if close else ""),
                             tensor=missing[0])

    def warn_of_unused(self) -> None:
        """Log what counted for no tensor, which is most likely not what its author wanted."""
        for role in self.types.keys() - self.used:
            log.warning("%s counts for no tensor", flag_name(role))
        for pattern, type in self.custom:
            if pattern.pattern not in self.used:
                log.warning("--custom-q %s=%s counts for no tensor", pattern.pattern, type.type_name)


def _custom(text: str) -> list[tuple[re.Pattern[str], GGMLType]]:
    rules = []
    for item in filter(None, text.split(",")):
        pattern, equals, name = item.partition("=")
        if not pattern or not equals:
            raise UsageError(f"'{item}' is not REGEX=TYPE")
        try:
            kind = ggml_type(name)
        except UnknownTypeError as error:
            raise UnknownTypeError(f"in '{item}': {error.message}") from None
        rules.append((regular_expressions([pattern])[0], kind))
    return rules
