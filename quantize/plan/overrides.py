"""Types that a user gives to tensors by role, by regular expression or by name."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import ShapeError, UnknownTypeError, UsageError
from ...formats.source import TensorInfo
from ...formats.types import GGMLType, ggml_type

log = logging.getLogger(__name__)

Chosen = tuple[GGMLType, str]  # a type and what decided it

# Flags of llama-quantize of ik_llama.cpp, `--attn-q-type` for attn_q, and their help texts.
ROLE_FLAGS = {
    "attn_q": "type of tensors with attn_q in their names, attn_qkv among them",
    "attn_k": "type of tensors with attn_k in their names",
    "attn_v": "type of attn_v.weight",
    "attn_qkv": "accepted, but has no effect: --attn-q-type also sets attn_qkv",
    "attn_output": "type of attn_output.weight",
    "ffn_gate": "type of tensors with ffn_gate in their names",
    "ffn_down": "type of tensors with ffn_down in their names",
    "ffn_up": "type of tensors with ffn_up in their names",
    "ffn_gate_inp": "type of expert routers, which are not quantized by default",
    "per_layer_token_embedding": "type of per_layer_token_embd.weight",
}
# The type ends a rule, so that commas and equals signs may be part of its expression.
_ITEM = re.compile(r"(\S+?)\s*=\s*([A-Za-z0-9_]+)(?=[\s,]|$)\s*,?")


def flag_name(role: str) -> str:
    """Return the command-line flag of a role."""
    return f"--{role.replace('_', '-')}-type"


def regular_expressions(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile `patterns` for names of tensors. Raise UsageError naming one that is not a regular
    expression.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(f"'{pattern}' is not a regular expression: {error}") from None
    return compiled


@dataclass(frozen=True)
class Rule:
    """Tensors whose name contains a match of `pattern` get `type`. origin: the flag or the line of
    a file that the rule comes from.
    """

    pattern: re.Pattern[str]
    type: GGMLType
    origin: str = "--custom-q"

    @property
    def text(self) -> str:
        """The rule as REGEX=TYPE."""
        return f"{self.pattern.pattern}={self.type.type_name}"

    def __str__(self) -> str:
        return f"{self.origin} {self.text}"


def parse_rules(text: str, origin: str = "--custom-q") -> list[Rule]:
    """Parse `REGEX=TYPE,REGEX=TYPE`. Raise UsageError, or UnknownTypeError for a type, naming the
    rule that is wrong.
    """
    rules, rest = [], text.strip().lstrip(",").strip()
    while rest:
        found = _ITEM.match(rest)
        if found is None:
            raise UsageError(f"{origin}: '{rest}' is not REGEX=TYPE")
        pattern, name = found[1].strip(), found[2]
        try:
            rules.append(Rule(regular_expressions([pattern])[0], ggml_type(name), origin))
        except (UnknownTypeError, UsageError) as error:
            raise type(error)(f"{origin}: in '{pattern}={name}': {error.message}") from None
        rest = rest[found.end() :].strip().lstrip(",").strip()
    return rules


@dataclass
class Overrides:
    """Types by role and rules; of several rules that match, the first counts.

    types: by role: those of ROLE_FLAGS, token_embedding and output_tensor. patterns: rules that
    come before the preset, also with `--pure`, and hide their tensors from mix rules that count.
    custom: rules that come after the mix, and have no effect with `--pure`. exact: types of single
    tensors by their full names, above everything. strict: rules without effect are an error. `used`
    collects the roles that had an effect.
    """

    types: dict[str, GGMLType] = field(default_factory=dict)
    custom: list[Rule] = field(default_factory=list)
    patterns: list[Rule] = field(default_factory=list)
    exact: dict[str, GGMLType] = field(default_factory=dict)
    strict: bool = False
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        custom: str | Iterable[str | Rule] = (),
        roles: Mapping[str, str] | None = None,
        token_embedding: str | None = None,
        output_tensor: str | None = None,
        exact: Mapping[str, str] | None = None,
        patterns: str | Iterable[str | Rule] = (),
        strict: bool = False,
    ) -> Overrides:
        """Build overrides from texts.

        custom, patterns: one text `REGEX=TYPE,REGEX=TYPE`, several, or rules. roles: type names by
        the keys of ROLE_FLAGS. exact: type names by names of tensors. Raise UsageError for an
        unknown role or a malformed rule, UnknownTypeError for an unknown type.
        """
        roles = roles or {}
        if unknown := roles.keys() - ROLE_FLAGS.keys():
            raise UsageError(
                f"unknown roles {', '.join(sorted(unknown))}; known are {', '.join(ROLE_FLAGS)}"
            )
        given = {**roles, "token_embedding": token_embedding, "output_tensor": output_tensor}
        return cls(
            {
                role: _named(name, flag_name(role))
                for role, name in given.items()
                if name is not None
            },
            _rules(custom, "--custom-q"),
            [_lower(rule) for rule in _rules(patterns, "--tensor-type")],
            {name: ggml_type(kind) for name, kind in (exact or {}).items()},
            strict,
        )

    def pattern_type(self, name: str) -> Chosen | None:
        """Return the type of the first of `patterns` that the name of a tensor contains."""
        return _first(self.patterns, name)

    def custom_type(self, name: str) -> Chosen | None:
        """Return the type of the first of `custom` that the name of a tensor contains."""
        return _first(self.custom, name)

    def role_type(self, role: str) -> Chosen | None:
        """Return the type given to a role."""
        if role not in self.types:
            return None
        self.used.add(role)
        return self.types[role], flag_name(role)

    def exact_type(self, tensor: TensorInfo) -> Chosen | None:
        """Return the type given to this tensor by name. Raise ShapeError if the tensor cannot have
        it.
        """
        if (given := self.exact.get(tensor.name)) is None:
            return None
        try:
            given.tensor_bytes(tensor.shape)
        except ShapeError as error:
            raise ShapeError(f"cannot be {given}: {error.message}", tensor=tensor.name) from None
        return given, "given by name"

    def check_names(self, tensors: Sequence[TensorInfo]) -> None:
        """Raise UsageError for a type that is given to a tensor that does not exist."""
        names = [tensor.name for tensor in tensors]
        if missing := sorted(self.exact.keys() - set(names)):
            close = difflib.get_close_matches(missing[0], names, n=1)
            raise UsageError(
                "a type is given to this tensor, but the model does not have it"
                + (f"; did you mean {close[0]}?" if close else ""),
                tensor=missing[0],
            )

    def warn_of_unused_roles(self) -> None:
        """Log the roles that had no effect, which is hardly intended."""
        for role in sorted(self.types.keys() - self.used):
            log.warning("%s applies to no tensor", flag_name(role))


def _named(name: str, flag: str) -> GGMLType:
    try:
        return ggml_type(name)
    except UnknownTypeError as error:
        raise UnknownTypeError(f"{flag}: {error.message}") from None


def _rules(texts: str | Iterable[str | Rule], origin: str) -> list[Rule]:
    texts = [texts] if isinstance(texts, str) else texts
    return [
        rule
        for text in texts
        for rule in ([text] if isinstance(text, Rule) else parse_rules(text, origin))
    ]


def _lower(rule: Rule) -> Rule:
    """Return the rule with its expression in lower case, as llama.cpp does."""
    return Rule(regular_expressions([rule.pattern.pattern.lower()])[0], rule.type, rule.origin)


def _first(rules: Sequence[Rule], name: str) -> Chosen | None:
    return next(((rule.type, str(rule)) for rule in rules if rule.pattern.search(name)), None)
