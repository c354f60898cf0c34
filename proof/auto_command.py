"""`iqforge auto`: from a checkpoint to a file of a given size, with the proof that it is good."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import UsageError, printable
from ..runtime.commands.flags import add_load_flags, chosen_device, note_unused, on_one_device
from ..runtime.options import LoadOptions
from .auto_options import TARGETS, AutoOptions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge auto` to its parser."""
    parser.description = (
        "Convert a checkpoint, collect an importance matrix, choose the type of every tensor for a"
        " size, quantize, read the file back, compare it with the unquantized model, and write a"
        " model card. Says first how long that takes and how much disk space. A run that was"
        " interrupted resumes: what is finished is not repeated, and the bytes are the same."
    )
    parser.add_argument(
        "model", metavar="CHECKPOINT", nargs="?", help="folder of a checkpoint, or a GGUF file"
    )
    parser.add_argument(
        "--remote",
        metavar="REPO[@REVISION]",
        nargs="?",
        const="",
        help="read the checkpoint from this repository of the Hugging Face Hub (HF_TOKEN); without"
        " a value CHECKPOINT is the repository",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder for everything (default: the model's name with -gguf)",
    )
    AutoOptions.add_flags(parser.add_mutually_exclusive_group(required=True), only=TARGETS)
    AutoOptions.add_flags(parser, without=TARGETS)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Run or resume the chain, and return 0."""
    from .auto_model import opened_chain

    source = _source(args)
    options = AutoOptions.from_flags(args)
    on_one_device(args, "the stages run in one process")
    load = LoadOptions.from_flags(args)
    device = chosen_device(load)
    note_unused(args, load, device)
    load = replace(load, device=str(device))
    chain = opened_chain(run, source, args.output, options, load, {}, on_line=_print, bars=True)
    folder, file = chain.files.folder, chain.files.out
    _print(
        f"{printable(chain.origin.address, 400)}: {chain.origin.n_parameters / 1e6:,.1f} million"
        " parameters"
    )
    _print(f"result: {printable(file, 400)}\n\n{chain.plan()}")
    if args.dry_run:
        return 0
    chain.run()
    seconds = sum(stage.seconds for stage in chain.stages.done)
    _print(f"\ndone in {seconds:.1f} s: {printable(folder, 400)}")
    if not options.clean:
        work = printable(chain.files.work, 400)
        _print(f"{work} lets another target start from the importance matrix")
    return 0


def _print(line: str) -> None:
    print(line, flush=True)


def _source(args: argparse.Namespace) -> str:
    if args.remote is None and args.model is not None:
        return args.model
    if (name := args.remote or args.model) and not (args.remote and args.model):
        return f"hf://{name.removeprefix('hf://')}"
    raise UsageError("give the checkpoint: either CHECKPOINT or --remote REPO")
