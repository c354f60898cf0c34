"""The command line: a table of commands, each imported only when asked for.

A command is a module with `configure(parser)` and `run(args, api)`. The Python API is handed down,
so that no folder has to import the roof it stands under.
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

# name: (module, one line of help)
COMMANDS = {
    "convert": (".convert.commands.convert", "Hugging Face checkpoint to GGUF"),
    "convert-lora": (".convert.commands.convert_lora", "LoRA adapter to GGUF"),
    "imatrix": (
        ".imatrix.commands.imatrix",
        "collect an importance matrix, add up several, look at one",
    ),
    "imatrix-convert": (
        ".imatrix.commands.imatrix_convert",
        "an importance matrix file in the other layout",
    ),
    "imatrix-compare": (
        ".imatrix.commands.imatrix_compare",
        "how far two importance matrices are apart",
    ),
    "imatrix-coverage": (".imatrix.commands.imatrix_coverage", "how many tokens each expert saw"),
    "quantize": (".quantize.commands.quantize", "quantize a GGUF file or a checkpoint"),
    "sensitivity": (
        ".imatrix.commands.sensitivity",
        "how much a model suffers from errors in each tensor",
    ),
    "quantize-stats": (
        ".quantize.commands.quantize_stats",
        "what each type would lose on each tensor: table, JSON, heat map",
    ),
    "validate": (
        ".quantize.commands.validate",
        "read a GGUF file back: values, and errors against what it was made of",
    ),
    "repack": (
        ".quantize.commands.repack",
        "tensors of a GGUF file into row-interleaved form, or back",
    ),
    "quantize-bench": (
        ".quantize.commands.quantize_bench",
        "how fast and how well each type is quantized, beside a reference library",
    ),
    "inspect": (".formats.commands.inspect", "keys, tensors, types and sizes of a GGUF model"),
    "gguf-hash": (
        ".formats.commands.gguf_hash",
        "hashes of a GGUF model's tensors, and checking them",
    ),
    "merge-gate-up": (
        ".formats.commands.merge_gate_up",
        "gate and up of a GGUF file's experts into one tensor, or back",
    ),
    "gguf-split": (".formats.commands.gguf_split", "split a GGUF file into shards, or merge them"),
    "bench": (
        ".runtime.commands.bench",
        "speed of prompts and of generation, also on random weights of a real shape",
    ),
    "sweep-bench": (
        ".runtime.commands.sweep_bench",
        "speed of prompts and of generation as the context fills",
    ),
    "profile": (".runtime.commands.profile", "time per kernel and layer as table and SVG timeline"),
    "generate": (".runtime.commands.generate", "text that follows a prompt"),
    "perplexity": (".runtime.commands.perplexity", "perplexity and KL divergence"),
    "kernels": (".cuda_kernels.command", "the CUDA kernels: list them, compile them ahead of time"),
    "types": (".formats.commands.types", "the table of ggml types, and what can be done with each"),
    "demo": (".demo.command", "the whole chain on the embedded model, with a report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the input, 2 for wrong usage,
    130 after Ctrl-C.
    """
    from .errors import IqforgeError, printable

    _prepare_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in argv if not word.startswith("-")), "")
    called = f"iqforge {asked}" if asked in COMMANDS else "iqforge"
    try:
        status = _run(argv, asked)
        sys.stdout.flush()
        return status
    except IqforgeError as error:
        message = "\n".join(printable(line, 2000) for line in str(error).splitlines())
        print(f"{called}: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{called}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Errors of inputs and outputs have names of their own; what is left is our own printing.
        _drop_stdout()
        if not isinstance(
            error, BrokenPipeError
        ):  # that one is `iqforge ... | head`, and no mistake of anybody
            named = f": {printable(error.filename)}" if error.filename else ""
            print(f"{called}: error: {error.strerror or error}{named}", file=sys.stderr)
        return 1


def _run(argv: list[str], asked: str) -> int:
    parser, subparsers, module = _parser(asked)
    args, extra = parser.parse_known_args(argv)
    if args.version:
        from .version import __version__

        print(f"iqforge {__version__}")
        return 0
    if module is None:
        parser.print_help()
        return 2
    if extra:
        if not hasattr(args, "words") or any(word.startswith("-") for word in extra):
            subparsers[asked].error(f"unrecognized arguments: {' '.join(extra)}")
        args.words += extra  # words that stand behind a flag
    with _log_to_stderr():
        from . import api

        return module.run(args, api) or 0


def _parser(
    asked: str,
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser], ModuleType | None]:
    parser = argparse.ArgumentParser(
        prog="iqforge", description="GGUF quantization and conversion with a reference runtime."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    module, subparsers = None, {}
    for name, (path, help_line) in COMMANDS.items():
        subparsers[name] = commands.add_parser(name, help=help_line, allow_abbrev=False)
        if name == asked:
            module = importlib.import_module(path, __package__)
            module.configure(subparsers[name])
    return parser, subparsers, module


def _prepare_streams() -> None:
    """Streams that were closed by the caller become empty ones; characters that a stream cannot
    show are escaped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Point stdout at nothing, so that Python does not complain at exit that it cannot be flushed."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show our own messages while a command runs; what libraries log is of no use to a user.
    IQFORGE_DEBUG=1 shows more of them.
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
