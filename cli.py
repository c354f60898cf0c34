"""The command line: find the command in the table, run it, and print its errors.

A command is a module with `configure(parser)` and `run(args, api)`. It is given the Python API, so
that no folder imports a module above it.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType

from .commandline.table import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the input, 2 for wrong usage,
    130 after Ctrl-C.
    """
    from .commandline.colour import painted_error
    from .errors import IqforgeError, printable
    from .formats.commands.progress import line_break
    from .runtime import let_threads_sleep

    let_threads_sleep()  # before any command imports torch
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    called = f"iqforge {words[0]}" if words and words[0] in COMMANDS else "iqforge"

    def failed(message: str) -> None:
        begin = line_break() + painted_error(f"{called}: error:", sys.stderr)
        print(begin, message, file=sys.stderr)

    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except IqforgeError as error:
        failed("\n".join(printable(line, 2000) for line in str(error).splitlines()))
        return 1
    except KeyboardInterrupt:
        print(f"\n{called}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Errors of inputs and outputs have their own classes; what is left is our own printing.
        _drop_stdout()
        if not isinstance(error, BrokenPipeError):  # `iqforge ... | head` is not an error
            named = f": {printable(error.filename)}" if error.filename else ""
            failed(f"{error.strerror or error}{named}")
        return 1


def _run(words: list[str]) -> int:
    from .commandline.help import print_overview

    if not words:
        print_overview(COMMANDS, sys.stdout)
        return 2
    name, rest = words[0], words[1:]
    if name == "help" and rest[:1] not in ([], ["-h"], ["--help"]):
        _no_more(name, rest[1:])
        return _help(rest[0])
    if name in ("-h", "--help", "help"):
        print_overview(COMMANDS, sys.stdout)
        return 0
    if name in ("--version", "version"):
        if rest in (["-h"], ["--help"]):
            return _help(name)
        _no_more(name, rest)
        from .version import __version__

        print(f"iqforge {__version__}")
        return 0
    if name == "completion":
        return _completion(rest)
    parser, module = _parser(name)
    args = parser.read(rest)
    quiet: AbstractContextManager = nullcontext()
    command = COMMANDS[name]
    if hasattr(args, "split_mode") and _has_nothing_to_do(name, args.split_mode):
        return 0
    if (command.ranks or command.chunks) and args.split_mode is not None:
        shares_chunks = args.split_mode == "data"
        if shares_chunks and not command.chunks:
            from .errors import UsageError

            raise UsageError(f"-sm data shares the chunks of a text, and {name} has none")
        from .runtime.options import split_options
        from .runtime.start_ranks import failures_told, run_as_ranks, silent_unless_first

        if command.ranks or shares_chunks:
            talks = name == "chat" or getattr(args, "conversation", False)
            files = _read_files(args)
            status = run_as_ranks(
                words,
                split_options(args),
                files=files,
                check=partial(_check_early, module, args),
                interactive=talks,
            )
            if status is not None:
                return status
            quiet = ExitStack()
            quiet.enter_context(silent_unless_first())
            quiet.enter_context(failures_told())
    with _log_to_stderr(), quiet:
        from . import api

        return module.run(args, api) or 0


# Flags of commands with ranks whose files are read, by the names that argparse gives them.
_READ = (
    *("model", "file", "binary_file", "system_prompt_file", "messages", "tools", "documents"),
    "kl_divergence_against",
)


def _read_files(args: argparse.Namespace) -> list[str]:
    """Return the files and folders that a command reads, without adapters and models of a hub."""
    names = [*_READ, "kl_divergence_base"] if getattr(args, "kl_divergence", False) else _READ
    found: list[str] = []
    for name in names:
        value = getattr(args, name, None)
        paths = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        # The text that comes with the package.
        found += [path for path in paths if (name, path) != ("file", "default")]
    return [path for path in found if not path.startswith("hf://")]


def _check_early(module: ModuleType, args: argparse.Namespace) -> None:
    """Raise errors of flags and files that are cheap to find, before a command starts ranks: these
    take seconds to find them. A command has a function `check(args)` for its own, and
    `check_ranks(args)` for what its ranks do not do.
    """
    from .api.source import check_model_path

    if hasattr(module, "check"):
        module.check(args)
    if hasattr(module, "check_ranks"):
        module.check_ranks(args)
    for name in ("model", "kl_divergence_against"):
        value = getattr(args, name, None)
        for path in value if isinstance(value, list) else [value] if value else []:
            check_model_path(path)


def _has_nothing_to_do(name: str, mode: str | None) -> bool:
    """Return whether this process is another than the first of several that torchrun has started,
    for a command that runs in one; and say so.
    """
    from .runtime.parallel.modes import has_ranks
    from .runtime.parallel.ranks import Ranks

    ranks, command = Ranks.here(), COMMANDS[name]
    shared = command.chunks if mode == "data" else command.ranks and has_ranks(mode)
    if shared or ranks is None or ranks.rank == 0:
        return False
    print(
        f"note: process {ranks.rank} of {ranks.size} does nothing: {name}"
        f"{'' if mode is None else f' -sm {mode}'} runs in one process, and the environment's RANK"
        " and WORLD_SIZE say that others were started",
        file=sys.stderr,
    )
    return True


def _no_more(name: str, rest: list[str]) -> None:
    """SystemExit if anything follows a word that takes nothing more."""
    from .commandline.parser import Parser

    if rest:
        Parser(f"iqforge {name}").error(f"unexpected argument '{rest[0]}'")


def _parser(name: str):
    """Return the parser and the module of a command; SystemExit for an unknown one."""
    from .commandline.help import suggested_command
    from .commandline.parser import Parser, did_you_mean

    if name.startswith("-"):
        hint = did_you_mean(name, ["--help", "--version"])
        Parser("iqforge").error(f"unknown flag '{name}'{hint}")
    if name not in COMMANDS:
        hint = suggested_command(name, COMMANDS)
        Parser("iqforge").error(f"unknown command '{name}'{hint}")
    parser = Parser(f"iqforge {name}", COMMANDS[name].example)
    module = _configure(name, parser)
    return parser, module


def _configure(name: str, parser: argparse.ArgumentParser) -> ModuleType:
    module = importlib.import_module(COMMANDS[name].module, __package__)
    module.configure(parser)
    return module


def _help(name: str) -> int:
    from .commandline.completion import HELP

    if name in ("completion", "help", "version"):
        print(HELP if name == "completion" else f"usage: iqforge {name}\n", end="")
        return 0
    _parser(name)[0].print_help()
    return 0


def _completion(words: list[str]) -> int:
    from .commandline.completion import HELP, completion_script

    if len(words) != 1 or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    print(completion_script(words[0], COMMANDS, _configure), end="")
    return 0


def _prepare_streams() -> None:
    """Replace streams that the caller closed by empty ones; escape characters that a stream cannot
    show.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere())
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Point stdout at nothing, or Python complains at exit that it cannot flush it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = _nowhere()


def _nowhere():
    return open(os.devnull, "w")


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show our own messages while a command runs, not those of libraries. IQFORGE_DEBUG=1 shows
    more of them.
    """
    from .formats.commands.progress import line_break

    class Messages(logging.StreamHandler):
        """Messages begin a line, also where results on the same terminal have not ended theirs."""

        def format(self, record: logging.LogRecord) -> str:
            return line_break() + super().format(record)

    logger, handler = logging.getLogger(__package__), Messages()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if os.environ.get("IQFORGE_DEBUG") else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)  # loggers below remember what they may say until it is called
        logger.propagate = propagate
