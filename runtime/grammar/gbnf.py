"""GBNF, the grammars of llama.cpp, as Lark grammars of the package llguidance.

    root  ::= greeting " " name+ ("!" | "?")?
    name  ::= [A-Z] [a-z]{1,12}   # a class, and how often it is repeated

llguidance splits a text into the longest lexemes, but in GBNF every character can continue in
several ways. So each lexeme here is one character, and nothing is decided before its time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...errors import UsageError, printable

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEATED = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = {"x": 2, "u": 4, "U": 8}
_MOST_REPEATED = 10000
_NEVER = "{0,0}"  # a repetition that leaves its item out
_MOST_COPIES = 100_000  # of an item, by repetitions of repetitions: a mask takes time for each
_DEEPEST = 100  # groups within groups
_WRITTEN = 8  # of these as groups; llguidance reads few, so that inner ones become rules


def gbnf_to_lark(text: str) -> str:
    """Return the Lark grammar for a GBNF grammar. UsageError, with the line, for one that is
    malformed.
    """
    return _Parser(text).translated()


@dataclass
class _Parser:
    text: str
    at: int = 0
    rules: dict[str, str] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)  # rule to where it is used first
    terminals: dict[str, str] = field(default_factory=dict)  # regex to name
    groups: list[str] = field(default_factory=list)  # that are rules
    depth: int = 0
    copies: int = 1  # the most of an item of the group that was read last

    def translated(self) -> str:
        self._space(True)
        while self.at < len(self.text):
            self._rule()
            self._space(True)
        for name, at in self.used.items():
            if name not in self.rules:
                raise self._error(f"there is no rule '{printable(name, 60)}'", at)
        if "root" not in self.rules:
            raise UsageError("the grammar has no rule 'root'")
        numbers = {name: f"r{i}" for i, name in enumerate(self.rules)}
        lines = [f"start: {numbers['root']}"]
        bodies = [(numbers[name], body) for name, body in self.rules.items()]
        bodies += [(f"g{i}", body) for i, body in enumerate(self.groups)]
        for name, body in bodies:
            body = re.sub("<([^>]*)>", lambda found: numbers[found[1]], body)
            lines.append(f"{name}: {body}")
        lines += [f"{name}: /{regex}/" for regex, name in self.terminals.items()]
        return "\n".join(lines) + "\n"

    def _rule(self) -> None:
        start, name = self.at, self._name()
        self._space(False)
        if not self.text.startswith("::=", self.at):
            raise self._error("expected ::=")
        if name in self.rules:
            raise self._error(f"the rule '{printable(name, 60)}' is defined twice", start)
        self.at += 3
        self._space(True)
        self.rules[name] = self._alternatives(nested=False)
        if self.at < len(self.text) and self.text[self.at] not in "\r\n":
            raise self._error(f"unexpected '{printable(self.text[self.at])}'")

    def _alternatives(self, nested: bool) -> str:
        found, copies = [self._sequence(nested)], self.copies
        while self._peek() == "|":
            self.at += 1
            self._space(True)
            found.append(self._sequence(nested))
            copies = max(copies, self.copies)
        self.copies = copies
        return " | ".join(found)

    def _group(self) -> str:
        start = self.at
        self.at += 1
        self._space(True)
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._error("groups are nested too deeply", start)
        body = self._alternatives(nested=True)
        self.depth -= 1
        if self._peek() != ")":
            raise self._error("this ( has no )", start)
        self.at += 1
        if self.depth < _WRITTEN:
            return f"({body})"
        self.groups.append(body)
        return f"g{len(self.groups) - 1}"

    def _sequence(self, nested: bool) -> str:
        items: list[str] = []
        copies = 1
        while self.at < len(self.text):
            c = self._peek()
            self.copies = 1
            if c == '"':
                item = self._literal()
            elif c == "[":
                item = self._class()
            elif c == ".":
                self.at += 1
                item = self._terminal(r"(?s:.)")
            elif c == "(":
                item = self._group()
            elif c == "<" or c == "!":
                raise self._error("tokens in grammars are not supported")
            elif c and _NAME.match(c):
                start, name = self.at, self._name()
                self.used.setdefault(name, start)
                item = f"<{name}>"
            else:
                break
            self._space(nested)
            repetition = self._repetition()
            self._space(nested)
            if repetition != _NEVER:
                items.append(item + repetition)
            copies = max(copies, self.copies)
        self.copies = copies
        return " ".join(item for item in items if item) or '""'

    def _repetition(self) -> str:
        c = self._peek()
        if c and c in "*+?":
            self.at += 1
            return c
        if c != "{":
            return ""
        found = _REPEATED.match(self.text, self.at)
        if found is None:
            raise self._error("expected {n}, {n,} or {n,m}")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > _MOST_REPEATED or (most is not None and most < least):
            raise self._error(f"cannot repeat {found[0]}")
        self.copies *= max(least, most or 0, 1)
        if self.copies > _MOST_COPIES:
            raise self._error(f"repetitions of repetitions make more than {_MOST_COPIES:,} copies")
        self.at = found.end()
        if most == 0:
            return _NEVER
        return f"{{{least},{'' if most is None else most}}}"

    def _literal(self) -> str:
        start = self.at
        self.at += 1
        parts = []
        while self._peek() != '"':
            parts.append(self._terminal(_code(self._character(start))))
        self.at += 1
        if not parts:
            return '""'
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    def _class(self) -> str:
        start = self.at
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        ranges = []
        while self._peek() != "]":
            low = high = self._character(start)
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._character(start)
            if high < low:
                raise self._error(f"the range ends before it begins: {low!r} to {high!r}")
            ranges.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
        self.at += 1
        if not ranges:
            if not negated:
                raise self._error("this class has no characters", start)
            return self._terminal("(?s:.)")
        return self._terminal(f"[{'^' * negated}{''.join(ranges)}]")

    def _character(self, start: int) -> str:
        """Return the next character of a literal or class that began at `start`."""
        if self.at >= len(self.text):
            raise self._error("this has no end", start)
        c = self.text[self.at]
        self.at += 1
        if c != "\\":
            return c
        c = self.text[self.at : self.at + 1]
        self.at += 1
        if c in _HEX:
            digits = self.text[self.at : self.at + _HEX[c]]
            self.at += _HEX[c]
            code = int(digits, 16) if re.fullmatch("[0-9a-fA-F]+", digits) else -1
            if len(digits) != _HEX[c] or not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"'\\{c}{printable(digits)}' is not a character")
            return chr(code)
        if c in _ESCAPES:
            return _ESCAPES[c]
        if c and c in '"\\[]-^':
            return c
        raise self._error(f"'\\{printable(c)}' is not an escape")

    def _terminal(self, regex: str) -> str:
        if not regex.startswith(("[", "(")):
            regex = f"[{regex}]"
        return self.terminals.setdefault(regex, f"C{len(self.terminals)}")

    def _name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self._error("expected the name of a rule")
        self.at = found.end()
        return found[0]

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _space(self, lines: bool) -> None:
        """Skip spaces and comments, and ends of lines where a rule can continue."""
        while c := self._peek():
            if c == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif c in " \t" or (lines and c in "\r\n"):
                self.at += 1
            else:
                return

    def _error(self, problem: str, at: int | None = None) -> UsageError:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return UsageError(f"grammar, line {line}: {problem}")


def _code(c: str) -> str:
    return f"\\x{{{ord(c):X}}}"
