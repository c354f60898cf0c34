"""The dialogue on a terminal: lines in, commands, answers out."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import (
    DeviceError,
    IqforgeError,
    UsageError,
    printable,
)
from ...formats.commands.progress import line_break, print_result
from ...formats.options import did_you_mean
from ...formats.output import PartFile, refuse_same_file
from ..text_options import text_of_file
from .ctrl_c import CtrlC, typed_so_far
from .files import read_messages
from .session import Answer, ChatSession
from .template import Message

COMMANDS = {
    "/help": "list these commands",
    "/clear": "start over (the system message stays)",
    "/regen": "answer the last message again, with another seed",
    "/system TEXT": "set the system message and start over",
    "/read FILE": "send the text of a file",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "continue a conversation that was saved",
    "/exit": "leave (also Ctrl-D)",
}
_WITH_VALUE = {name.split()[0] for name in COMMANDS if " " in name}
_PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'


class Console:
    """Reads messages from standard input, and prints what the model answers.

    messages: a conversation to start with. n: the most tokens of an answer. multiline: a message
    ends with a line that ends with a backslash, instead of continuing there. inputs: files that
    /save may not replace, besides the model's.

    `failed`: the last message got an error instead of an answer.
    """

    def __init__(
        self,
        session: ChatSession,
        messages: Sequence[Message] = (),
        *,
        n: int | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        multiline: bool = False,
        timings: bool = False,
        inputs: Sequence[str] = (),
    ):
        self.session, self.messages = session, list(messages)
        self.n, self.multiline, self.timings = n, multiline, timings
        self.inputs = [*session.model.source.files, *inputs]
        self.context = {"tools": tools, "documents": documents}
        self.failed = False
        self._variant = 0  # of the answer to the same message
        self._is_terminal = sys.stdin.isatty()
        self._in_message = False  # a line of it has been typed
        self._ctrl_c = CtrlC()
        if isinstance(sys.stdin, io.TextIOWrapper):  # what is typed may not be UTF-8
            sys.stdin.reconfigure(errors="replace")

    def run(self, first: str | None = None, *, once: bool = False) -> None:
        """Converse until the input ends; with `once` until the first answer. first: the message to
        begin with.
        """
        with self._ctrl_c:
            self._run(first, once)

    def _run(self, first: str | None, once: bool) -> None:
        if first is not None:
            self.say(first)
        elif self.messages and self.messages[-1].get("role") in ("user", "tool"):
            self.answer()
        if once and (first is not None or self._answered):
            return
        for text in self._inputs():
            if text.startswith("/") and not text.startswith("//"):
                try:
                    if not self.command(text):
                        return
                except IqforgeError as error:
                    self._note(f"error: {error}")
            elif text.strip():
                self.say(text[1:] if text.startswith("//") else text)
            if once and self._answered:
                return

    @property
    def _answered(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"

    def say(self, text: str) -> None:
        """Send a message of the user."""
        self._variant = 0
        self.messages.append({"role": "user", "content": text})
        if not self.answer():
            self.messages.pop()

    def answer(self) -> bool:
        """Print the model's answer to the messages, and append it to them. False if there is none,
        as they do not fit the context or the template refuses them.
        """
        record, self.failed = Answer(), True
        self._ctrl_c.clear()
        seed = (self.session.settings.seed + self._variant) % 2**64
        try:
            for piece in self.session.answer(
                self.messages,
                self.n,
                record=record,
                seed=seed,
                interrupted=self._ctrl_c.pressed,
                **self.context,
            ):
                print_result(piece)
        except IqforgeError as error:
            if isinstance(error, DeviceError) and self.session.model.group is not None:
                raise  # the other ranks may wait for this one
            self._note(f"error: {error}")
            return False
        print_result("\n")
        why = {
            "interrupted": "interrupted",
            "context": f"the context of {self.session.context} tokens is full, and the answer is"
            " cut: /clear starts over, -c N allocates a larger one",
        }
        if record.reason in why:
            self._note(why[record.reason])
        if self.timings:
            self._note(_timings(record))
        self.messages.append(record.message)
        self.failed = False
        return True

    def command(self, text: str) -> bool:
        """Run a command; False for the one that ends the dialogue. Raise UsageError for an unknown
        command or wrong arguments.
        """
        name, _, value = text.partition(" ")
        value = value.strip()
        known = [command.split()[0] for command in COMMANDS]
        if name not in (*known, "/quit", "/regenerate"):
            hint = did_you_mean(name, [one.lstrip("/") for one in known])
            hint = hint.replace("'", "'/", 1) or "; /help lists them"
            raise UsageError(f"'{printable(name, 40)}' is not a command{hint}")
        if (name in _WITH_VALUE) != bool(value):
            wanted = next(one for one in COMMANDS if one.split()[0] == name)
            raise UsageError(f"expected {wanted}")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            for command, help in COMMANDS.items():
                print(f"  {command:<14}{help}")
            print(f"  {_QUOTES:<14}begins and ends a message of several lines")
            print("  \\             at the end of a line continues the message; // sends a /")
        elif name == "/clear":
            self._start_over(self.messages[:1])
        elif name == "/system":
            self._start_over([{"role": "system", "content": value}])
        elif name in ("/regen", "/regenerate"):
            self._regenerate()
        elif name == "/read":
            self.say(text_of_file(value))
        elif name == "/save":
            self._save(Path(value))
        elif name == "/load":
            self.messages = read_messages(value)
            self._note(f"{len(self.messages)} messages")
        return True

    def _start_over(self, messages: list[Message]) -> None:
        self.messages = [one for one in messages if one.get("role") == "system"]
        self._variant = 0

    def _regenerate(self) -> None:
        if not self._answered:
            raise UsageError("there is no answer yet")
        last = self.messages.pop()
        self._variant += 1
        if self.session.settings.temperature == 0:
            self._note("the temperature is 0: the answer is the same")
        if not self.answer():
            self.messages.append(last)

    def _save(self, path: Path) -> None:
        refuse_same_file(path, self.inputs)
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        with PartFile(path) as part:
            part.write(text.encode("utf-8", "replace"))
        self._note(f"{len(self.messages)} messages written to {printable(path, 400)}")

    def _inputs(self) -> Iterator[str]:
        """Yield what is typed, until the input ends. Ctrl-C drops what is half typed; on an empty
        line, right after the note about it, it ends.
        """
        noted = False
        while True:
            try:
                text = self._read()
            except KeyboardInterrupt:
                typed = typed_so_far()  # None: anything may be
                if not self._is_terminal or (noted and typed == "" and not self._in_message):
                    raise
                noted = True
                print(flush=True)
                again = "" if typed is None else "Ctrl-C again, "
                self._note(f"{again}Ctrl-D or /exit ends the conversation")
                continue
            except EOFError:
                if self._is_terminal:
                    print(flush=True)
                return
            noted = False
            yield text

    def _read(self) -> str:
        """Return one message. EOFError at the end of the input."""
        lines: list[str] = []
        quoted = False
        while True:
            self._in_message = bool(lines or quoted)
            try:
                line = self._line(_MORE if self._in_message else _PROMPT)
            except EOFError:
                if lines:
                    return "\n".join(lines)
                raise
            if not lines and not quoted and line.startswith("/"):
                return line
            if not lines and not quoted and line.startswith(_QUOTES):
                quoted, line = True, line[len(_QUOTES) :]
                if not line:
                    continue
            if quoted:
                if line.endswith(_QUOTES):
                    return "\n".join([*lines, line.removesuffix(_QUOTES)]).rstrip("\n")
                lines.append(line)
                continue
            ends_with_mark = line.endswith("\\")
            lines.append(line[:-1] if ends_with_mark else line)
            if ends_with_mark == self.multiline:
                return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        with self._ctrl_c.usual():
            line = input(prompt) + "\n" if self._is_terminal else sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _note(self, text: str) -> None:
        print(f"{line_break()}[{text}]", file=sys.stderr, flush=True)


def _timings(answer: Answer) -> str:
    generation = answer.generation
    new = generation.prompt_tokens - answer.reused
    return (
        f"prompt: {new} new tokens, {answer.reused} in the cache,"
        f" {generation.prompt_seconds:.2f} s; generated: {len(generation.tokens)} tokens,"
        f" {generation.per_second:.2f} tokens/s"
    )
