"""`iqforge warmup`: compile searches ahead of time."""

from __future__ import annotations

import argparse

from ...errors import UsageError
from ...formats.commands.progress import duration
from ..cuda.devices import has_nvidia_gpu
from ..options import WarmUpOptions
from ..report.bars import CompileBar


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge warmup` to its parser."""
    parser.usage = "iqforge warmup [flags] [TYPE ..]"
    parser.description = (
        "Compile the searches and decoders of types on the CPU, in parallel processes. Otherwise"
        " the first run that needs a type compiles its search, which takes a few seconds. The code"
        " stays in a cache on disk. Code for GPUs is not compiled here. The first run on a GPU"
        " compiles the searches that it needs. `iqforge kernels --build` compiles the searches of"
        " trellis types and the kernels that run models ahead of time."
    )
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="types to compile for (default: all)"
    )
    WarmUpOptions.add_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Compile what is missing, print what was done and return 0. Raise UsageError for negative
    --jobs.
    """
    if args.processes < 0:
        raise UsageError(f"--jobs is {args.processes}: it must not be negative")
    bar = CompileBar()
    done = api.warm_up(args.types, options=WarmUpOptions.from_flags(args), progress=bar)
    count = len(set(args.types)) or len(api.encodable_types())
    types = f"{count} type{'' if count == 1 else 's'}"
    if done:
        searches, decoders = (
            len({task.type for task in done if task.kind == kind}) for kind in ("search", "decode")
        )
        print(
            f"{types} ready: compiled {searches} searches and {decoders} decoders in"
            f" {duration(bar.compile_seconds)}"
        )
    else:
        print(f"{types} ready: nothing had to be compiled")
    if has_nvidia_gpu():
        print(
            "nothing was compiled for the GPU: `iqforge kernels --build` compiles the kernels that"
            " run models and the searches of trellis types; other searches are compiled when a run"
            " needs them"
        )
    return 0
