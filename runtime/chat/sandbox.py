"""Where chat templates run: jinja2's sandbox, with bounds on what a template can cost.

Templates come with models from anywhere. The sandbox keeps them away from Python; here loops and
calls are counted and the sizes of texts and numbers checked, so that none runs or grows for ever.
What transformers' `apply_chat_template` offers is defined: the functions `raise_exception` and
`strftime_now`, a `tojson` that escapes no HTML, loop controls and the tag `generation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 5_000_000  # turns of loops, and calls, of one text
MOST_LENGTH = 64 << 20  # of a text or a list
_MOST_BITS = 4096  # of a power


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. `start` begins counting for a text."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters.update(tojson=_to_json, iqforge_counted=_counted, iqforge_joined=_joined)
        for name in ("center", "indent"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.globals.update(
            raise_exception=_raise, strftime_now=_now, namespace=_Namespace, dict=_make_dict
        )
        del self.globals["lipsum"]
        self._left = MOST_STEPS

    def start(self) -> None:
        """Begin to count the steps of a template."""
        self._left = MOST_STEPS

    def count(self, steps: int = 1) -> None:
        """Raise SecurityError if the text takes too many steps."""
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"it takes more than {MOST_STEPS:,} steps")

    def call(__self, __context: Context, __obj: Any, *args: Any, **names: Any) -> Any:
        values = (*args, *names.values())
        if __obj is not __self.globals["range"]:  # which has a bound
            _check_numbers(values)
        __self.count(1 + sum(len(v) for v in values if isinstance(v, (list, tuple, range, dict))))
        return super().call(__context, __obj, *args, **names)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() * max(right, 0), _MOST_BITS)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    _check(len(value) * times)
        elif isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            _check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join what a template or a macro prints."""
        return _bounded_join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = _Bounds().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template


class _Bounds(NodeTransformer):
    """Puts filters that count around what is looped over and what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "iqforge_counted", node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "iqforge_joined", node.lineno)


def _filtered(node: nodes.Node, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


@jinja2.pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterable[Any]:
    """Return the values of a loop, which counts its turns."""
    sandbox = context.environment
    assert isinstance(sandbox, Sandbox)
    return _counting(sandbox, iter(values))


def _counting(sandbox: Sandbox, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        sandbox.count()
        yield value


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    return _bounded_join(map(str, values))


def _bounded_join(texts: Iterable[str]) -> str:
    found, length = [], 0
    for text in texts:
        length += len(text)
        _check(length)
        found.append(text)
    return "".join(found)


def _check(length: int, most: int = MOST_LENGTH) -> None:
    if length > most:
        raise SecurityError("it makes texts or numbers that are too large")


def _check_numbers(values: Iterable[Any]) -> None:
    """Raise SecurityError for numbers that can only be lengths of huge texts."""
    for value in values:
        if isinstance(value, int):
            _check(value)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(text: Any, *args: Any, **names: Any) -> Any:
        _check_numbers((*args, *names.values()))
        return function(text, *args, **names)

    return checked


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; its text is kept."""

    tags = {"generation"}  # noqa: RUF012  the name that jinja2 reads

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose names do not reach into Python."""

    def __init__(*args: Any, **names: Any):
        self, *given = args
        for name in dict(*given, **names):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *given, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"'{name}' is not a name for a namespace")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's filter escapes characters of HTML; templates expect plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **names: Any) -> dict:
    return dict(*args, **names)
