"""The command line: a table of commands, each imported only when asked for.

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
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command is, what it does, under which heading it is listed, and a line to copy."""

    module: str
    group: str
    help: str
    example: str


COMMANDS = {
    "convert": Command(
        ".convert.commands.convert",
        "make",
        "convert a Hugging Face checkpoint to GGUF",
        "iqforge convert ./Qwen3-8B --outfile qwen3-8b-bf16.gguf",
    ),
    "convert-lora": Command(
        ".convert.commands.convert_lora",
        "make",
        "convert a LoRA adapter to GGUF",
        "iqforge convert-lora ./my-adapter --base ./Qwen3-8B",
    ),
    "imatrix": Command(
        ".imatrix.commands.imatrix",
        "make",
        "collect an importance matrix, or add up several",
        "iqforge imatrix -m model-bf16.gguf -f calibration.txt -o model.imatrix.gguf",
    ),
    "imatrix-convert": Command(
        ".imatrix.commands.imatrix_convert",
        "make",
        "convert an importance matrix between .dat and .gguf",
        "iqforge imatrix-convert imatrix.dat imatrix.gguf",
    ),
    "quantize": Command(
        ".quantize.commands.quantize",
        "make",
        "quantize a GGUF file or a checkpoint",
        "iqforge quantize --imatrix m.imatrix model-bf16.gguf model-iq4_k.gguf IQ4_K",
    ),
    "repack": Command(
        ".quantize.commands.repack",
        "make",
        "interleave the rows of a GGUF file's tensors, or undo it",
        "iqforge repack model-iq4_k.gguf model-iq4_k_r4.gguf",
    ),
    "gguf-split": Command(
        ".formats.commands.gguf_split",
        "make",
        "split a GGUF file into shards, or merge them",
        "iqforge gguf-split --split-max-size 40G model.gguf model",
    ),
    "merge-gate-up": Command(
        ".formats.commands.merge_gate_up",
        "make",
        "merge gate and up of a GGUF file's experts, or split them",
        "iqforge merge-gate-up model.gguf model-merged.gguf",
    ),
    "perplexity": Command(
        ".runtime.commands.perplexity",
        "measure",
        "measure perplexity, or KL divergence from another model",
        "iqforge perplexity -m model-iq4_k.gguf -f wiki.test.raw",
    ),
    "validate": Command(
        ".quantize.commands.validate",
        "measure",
        "read a GGUF file back and measure its errors against its source",
        "iqforge validate model-iq4_k.gguf --against model-bf16.gguf",
    ),
    "quantize-stats": Command(
        ".quantize.commands.quantize_stats",
        "measure",
        "measure what each type would lose on each tensor",
        "iqforge quantize-stats model-bf16.gguf --type IQ3_K IQ4_K --html stats.html",
    ),
    "sensitivity": Command(
        ".imatrix.commands.sensitivity",
        "measure",
        "measure how much a model suffers from errors in each tensor",
        "iqforge sensitivity -m model-bf16.gguf -f wiki.test.raw -o sensitivity.json",
    ),
    "imatrix-compare": Command(
        ".imatrix.commands.imatrix_compare",
        "measure",
        "measure how much two importance matrices differ",
        "iqforge imatrix-compare one.dat other.gguf",
    ),
    "imatrix-coverage": Command(
        ".imatrix.commands.imatrix_coverage",
        "measure",
        "count the tokens that each expert saw",
        "iqforge imatrix-coverage imatrix.gguf",
    ),
    "generate": Command(
        ".runtime.commands.generate",
        "run",
        "continue a prompt",
        'iqforge generate -m model-iq4_k.gguf -p "The capital of France is" -n 64',
    ),
    "tokenize": Command(
        ".runtime.commands.tokenize",
        "run",
        "print the tokens of a text",
        'iqforge tokenize -m model-iq4_k.gguf -p "The capital of France"',
    ),
    "bench": Command(
        ".runtime.commands.bench",
        "run",
        "measure the speed of prompts and of generation",
        "iqforge bench -m model-iq4_k.gguf -p 512 -n 128",
    ),
    "sweep-bench": Command(
        ".runtime.commands.sweep_bench",
        "run",
        "measure speed as the context fills",
        "iqforge sweep-bench -m model-iq4_k.gguf -c 8192",
    ),
    "profile": Command(
        ".runtime.commands.profile",
        "run",
        "show where the time goes, by kernel and by layer",
        "iqforge profile -m model-iq4_k.gguf -o profile.svg",
    ),
    "demo": Command(
        ".demo.command",
        "run",
        "run everything on a small model that is included",
        "iqforge demo",
    ),
    "inspect": Command(
        ".formats.commands.inspect",
        "inspect",
        "show keys, tensors, types and sizes of a GGUF file",
        "iqforge inspect model-iq4_k.gguf",
    ),
    "gguf-hash": Command(
        ".formats.commands.gguf_hash",
        "inspect",
        "hash the tensors of a GGUF file, or check their hashes",
        "iqforge gguf-hash --sha256 model-iq4_k.gguf",
    ),
    "types": Command(
        ".formats.commands.types",
        "inspect",
        "list the types that tensors can have",
        "iqforge types",
    ),
    "kernels": Command(
        ".cuda_kernels.command",
        "advanced",
        "list the CUDA kernels, or compile them ahead of time",
        "iqforge kernels --build --arch sm_90",
    ),
    "warmup": Command(
        ".quantize.commands.warmup",
        "advanced",
        "compile the searches of types ahead of time",
        "iqforge warmup IQ4_K Q6_K",
    ),
    "quantize-bench": Command(
        ".quantize.commands.quantize_bench",
        "advanced",
        "measure the speed and error of quantizing to each type",
        "iqforge quantize-bench --type IQ4_K",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the input, 2 for wrong usage,
    130 after Ctrl-C.
    """
    from .commandline.colour import painted_error
    from .errors import IqforgeError, printable
    from .runtime import let_threads_sleep

    let_threads_sleep()  # before any command imports torch
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    called = f"iqforge {words[0]}" if words and words[0] in COMMANDS else "iqforge"

    def failed(message: str) -> None:
        print(painted_error(f"{called}: error:", sys.stderr), message, file=sys.stderr)

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
    with _log_to_stderr():
        from . import api

        return module.run(args, api) or 0


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
    logger, handler = logging.getLogger(__package__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if os.environ.get("IQFORGE_DEBUG") else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
