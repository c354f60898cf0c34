"""Read recipe files: the fields of a `Recipe` as YAML, or rules alone as the plain text that people
share.

Plain text: rules `REGEX=TYPE`, one or several per line, with optional commas between and after
them. `#` starts a comment, a backslash at the end of a line continues it. If the text is that of a
shell script, only the rules inside `NAME="` and `"` are read.

YAML (files named .yaml or .yml): the keys of `KEYS`. Only plain mappings, lists and scalars are
read; nothing is constructed.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import yaml

from ...errors import IqforgeError, MalformedFileError, NotFoundError, UsageError
from ...formats.options import checks_keywords
from .overrides import ROLE_FLAGS, Rule, parse_rules

log = logging.getLogger(__name__)

_COMMENT = re.compile(r"(^|\s)#.*$")
_OPENING = re.compile(r"""\s*(?:export\s+|local\s+)?\w+=(["'])\\?\s*(.*)$""")
_LARGEST = 16 << 20  # bytes; real recipes have a few thousand


@checks_keywords
def read_recipe(path: str | os.PathLike) -> dict[str, Any]:
    """Return the fields of `Recipe` that a file sets. Rules remember their lines.

    Raise NotFoundError, MalformedFileError for a file of another kind, and UsageError with the line
    for unknown keys, malformed rules and unknown types.
    """
    text = _text_of(path)
    name = os.path.basename(os.fspath(path))
    try:
        if os.fspath(path).lower().endswith((".yaml", ".yml")):
            return _from_yaml(text, name)
        return {"custom_q": text_rules(text, name)}
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise MalformedFileError(f"{line}{error.problem or error.context}", file=path) from None
    except RecursionError:
        raise MalformedFileError(
            "lists and mappings are nested too deeply, or contain themselves", file=path
        ) from None
    except yaml.YAMLError as error:
        raise MalformedFileError(f"is not valid YAML: {error}", file=path) from None


def combine(from_file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Combine the fields of `Recipe` from a file and from flags. Flags win, and their rules come
    before those of the file.
    """
    fields = dict(from_file)
    for name, value in given.items():
        before = fields.get(name)
        if name in ("custom_q", "tensor_patterns") and before:
            fields[name] = [*([value] if isinstance(value, str) else value), *before]
        elif isinstance(value, dict) and before:
            fields[name] = {**before, **value}
        elif value or before is None:
            fields[name] = value
    return fields


def text_rules(text: str, name: str, first_line: int = 1) -> list[Rule]:
    """Parse rules of plain text. name: the file, for places in messages. Raise UsageError with the
    line of a malformed rule.
    """
    lines = list(enumerate(text.splitlines(), first_line))
    rules, begun, start = [], "", 0
    for number, line in _quoted(lines, name):
        line = _COMMENT.sub("", line).strip()
        start = number if not begun else start
        begun += line.removesuffix("\\").rstrip() if line.endswith("\\") else line
        if line.endswith("\\") and not _whole(begun):
            continue
        rules += parse_rules(begun, _place(name, start))
        begun = ""
    return rules + (parse_rules(begun, _place(name, start)) if begun else [])


def _whole(text: str) -> bool:
    try:
        return bool(parse_rules(text))
    except IqforgeError:
        return False


def _quoted(lines: list[tuple[int, str]], name: str) -> list[tuple[int, str]]:
    """Return the lines between `NAME="` and the closing quote, or all lines without a quote."""
    openings = (
        (place, opening)
        for place, (_, line) in enumerate(lines)
        if not line.lstrip().startswith("#") and (opening := _OPENING.match(line))
    )
    if (found := next(openings, None)) is None:
        return lines
    (place, opening), number = found, lines[found[0]][0]
    quote, inside = opening[1], []
    for number_inside, line in [(number, opening[2]), *lines[place + 1 :]]:
        comment = line.lstrip().startswith("#")
        if not comment and quote in line:
            inside.append((number_inside, line.partition(quote)[0]))
            log.info(
                "%s: rules are read from lines %d to %d, which are quoted",
                name,
                number,
                number_inside,
            )
            return inside
        inside.append((number_inside, line))
    raise UsageError(f"{_place(name, number)}: the quote that starts here is not closed")


def _place(name: str, line: int) -> str:
    return f"{name}:{line}"


def _text_of(path: str | os.PathLike) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise NotFoundError("recipe file not found", file=path) from None
    except OSError as error:
        raise IqforgeError(f"cannot be read: {error.strerror}", file=path) from None
    if len(data) > _LARGEST:
        raise MalformedFileError(
            f"is larger than {_LARGEST >> 20} MiB, too large for a recipe", file=path
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedFileError("is not UTF-8 text", file=path, offset=error.start) from None


# ---- YAML


def _from_yaml(text: str, name: str) -> dict[str, Any]:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return {}
    fields = {}
    for key, (node, place) in _mapping(root, name, "a recipe").items():
        known = key.replace("-", "_")
        if known not in KEYS:
            raise UsageError(f"{place}: unknown key '{key}'{_nearest(known, KEYS)}")
        field, read = KEYS[known]
        if field in fields:
            if key == "type":
                raise UsageError(f"{place}: 'type' is another word for 'preset', which is given")
            raise UsageError(f"{place}: duplicate key '{key}'")
        fields[field] = read(node, name, key)
    return fields


def _nearest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"


def _at(node: yaml.Node, name: str) -> str:
    return _place(name, node.start_mark.line + 1)


def _mapping(node: yaml.Node, name: str, what: str) -> dict[str, tuple[yaml.Node, str]]:
    """Return values and places by key. Duplicate keys are an error."""
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{_at(node, name)}: {what} must be a mapping of keys to values")
    found: dict[str, tuple[yaml.Node, str]] = {}
    for key, value in node.value:
        text = _scalar(key, name, "a key")
        if text in found:
            raise UsageError(f"{_at(key, name)}: duplicate key '{text}', first at {found[text][1]}")
        found[text] = value, _at(key, name)
    return found


def _scalar(node: yaml.Node, name: str, key: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{_at(node, name)}: {key} must be a single word, not a list or mapping")
    return node.value.strip()


def _flag(node: yaml.Node, name: str, key: str) -> bool:
    value = _scalar(node, name, key).lower()
    if value not in ("true", "false"):
        raise UsageError(f"{_at(node, name)}: {key} must be true or false, not '{value}'")
    return value == "true"


def _types(node: yaml.Node, name: str, key: str) -> dict[str, str]:
    return {
        tensor: _scalar(value, name, tensor)
        for tensor, (value, _) in _mapping(node, name, key).items()
    }


def _roles(node: yaml.Node, name: str, key: str) -> dict[str, str]:
    roles = {}
    for role, (value, place) in _mapping(node, name, key).items():
        known = role.replace("-", "_").removesuffix("_type")
        if known not in ROLE_FLAGS:
            raise UsageError(f"{place}: unknown role '{role}'{_nearest(known, ROLE_FLAGS)}")
        roles[known] = _scalar(value, name, role)
    return roles


def _rule_list(node: yaml.Node, name: str, key: str) -> list[Rule]:
    """Read rules from `REGEX: TYPE`, a list of `REGEX=TYPE` or `REGEX: TYPE`, or plain text."""
    if isinstance(node, yaml.ScalarNode):
        block = node.style in ("|", ">")
        return text_rules(node.value, name, node.start_mark.line + (2 if block else 1))
    if isinstance(node, yaml.MappingNode):
        return [
            rule
            for pattern, (value, place) in _mapping(node, name, key).items()
            for rule in parse_rules(f"{pattern}={_scalar(value, name, pattern)}", place)
        ]
    return [
        rule
        for item in node.value
        for rule in (
            parse_rules(item.value, _at(item, name))
            if isinstance(item, yaml.ScalarNode)
            else _rule_list(item, name, key)
        )
    ]


# Keys of a YAML recipe: the field of Recipe that each sets, and the function that reads its value.
KEYS: dict[str, tuple[str, Callable[[yaml.Node, str, str], Any]]] = {
    "preset": ("type", _scalar),
    "type": ("type", _scalar),
    "rules": ("rules", _scalar),
    "custom_q": ("custom_q", _rule_list),
    "tensor_type": ("tensor_patterns", _rule_list),
    "tensors": ("tensor_types", _types),
    "roles": ("role_types", _roles),
    "token_embedding_type": ("token_embedding_type", _scalar),
    "output_tensor_type": ("output_tensor_type", _scalar),
    **{
        name: (name, _flag)
        for name in (
            "pure",
            "leave_output_tensor",
            "allow_requantize",
            "ignore_imatrix_rules",
            "strict",
            "symmetric_q40",
        )
    },
}
