"""The command line: a table of commands, each imported only when asked for.

A command is a module with `configure(parser)` and `run(args, api)`. The Python API is handed down, so that no folder has to
import the roof it stands under.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

# name: (module, one line of help)
COMMANDS = {
    "convert": (".convert.command", "Hugging Face checkpoint to GGUF"),
    "imatrix": (".imatrix.command", "collect an importance matrix"),
    "quantize": (".quantize.command", "quantize a GGUF file or a checkpoint"),
    "gguf-split": (".convert.split_command", "split a GGUF file into shards, or merge them"),
    "perplexity": (".runtime.evaluate.command", "perplexity and KL divergence"),
    "types": (".formats.types_command", "the table of ggml types, and what can be done with each"),
    "demo": (".demo.command", "the whole chain on the embedded model, with a report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the input, 2 for wrong usage, 130 after Ctrl-C."""
    from .errors import IqforgeError, printable

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="iqforge", description="GGUF quantization and conversion with a reference runtime.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    asked = next((word for word in argv if not word.startswith("-")), None)
    module = None
    for name, (path, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, allow_abbrev=False)
        if name == asked:
            module = importlib.import_module(path, __package__)
            module.configure(subparser)
    args = parser.parse_args(argv)
    if args.version:
        from . import __version__

        print(f"iqforge {__version__}")
        return 0
    if module is None:
        parser.print_help()
        return 2
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    try:
        from . import api

        status = module.run(args, api)
        sys.stdout.flush()
        return status or 0
    except IqforgeError as error:
        message = "\n".join(printable(line, 2000) for line in str(error).splitlines())
        print(f"iqforge {args.command}: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\niqforge {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`iqforge ... | head`); keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
