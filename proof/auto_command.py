"""`iqforge auto`: from a checkpoint to a file of a given size, with the proof that it is good."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from ..errors import UsageError, printable
from ..imatrix.default_texts import DEFAULT
from ..quantize.options import TargetOptions
from ..runtime.commands.flags import add_load_flags, chosen_device, on_one_device
from ..runtime.options import LoadOptions


def configure(parser: argparse.ArgumentParser) -> None:
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
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target-size", metavar="SIZE", help="a file of at most 12G, 11.5GiB, ..")
    target.add_argument("--target-bpw", type=float, metavar="X", help="X bits per weight")
    target.add_argument(
        "--fit-gpu",
        metavar="SIZE",
        help="a file that fits a GPU with this much memory, 24GiB, with a context of --context",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of the cache that --fit-gpu leaves memory for (default: 8192)",
    )
    parser.add_argument(
        "-f",
        "--file",
        metavar="TEXT",
        action="append",
        help="calibration text (repeatable; default: the one that comes with iqforge)",
    )
    parser.add_argument(
        "--test",
        metavar="TEXT",
        action="append",
        help="text to measure on (repeatable; default: the last fifth of every calibration text,"
        " which is then not calibrated with)",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        dest="n_ctx",
        type=int,
        default=512,
        metavar="N",
        help="tokens per chunk (default: 512)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=-1,
        metavar="N",
        help="calibrate with at most N chunks of each text (default: all)",
    )
    parser.add_argument(
        "--test-chunks",
        type=int,
        default=20,
        metavar="N",
        help="measure on at most N chunks of each text (default: 20)",
    )
    TargetOptions.add_flags(parser, only=("types", "damage"))
    parser.add_argument("--model-name", metavar="NAME", help="name in the file and of the files")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove the unquantized model and other work at the end",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    from .auto import Auto, AutoOptions
    from .auto_plan import Target, plan_lines

    source = _source(args)
    target = Target(args.target_size, args.target_bpw, args.fit_gpu, args.context)
    chosen = TargetOptions.from_flags(args)
    options = AutoOptions(
        tuple(args.file or (DEFAULT,)),
        tuple(args.test or ()),
        args.n_ctx,
        args.chunks,
        args.test_chunks,
        None if chosen.damage is None else os.fspath(chosen.damage),
        tuple(chosen.types),
        args.model_name,
        args.clean,
    )
    on_one_device(args, "the stages run in one process")
    load = LoadOptions.from_flags(args)
    load = replace(load, device=str(chosen_device(load)))
    name = os.path.basename(os.path.abspath(source.removeprefix("hf://").split("@")[0]))
    folder = Path(args.output or f"{name.removesuffix('.gguf')}-gguf")
    chain = Auto(api, source, folder, target, options, load)
    print(f"{printable(chain.source, 400)}: {chain.n_parameters / 1e6:,.1f} million parameters")
    print(f"result: {printable(chain.out, 400)}\n")
    print("\n".join(plan_lines(chain.plan(), folder, chain.aim)), flush=True)
    if args.dry_run:
        return 0
    chain.run()
    print(f"\ndone in {sum(s.seconds for s in chain.stages.done):.1f} s: {printable(folder, 400)}")
    if not args.clean:
        print(f"{printable(chain.work, 400)} lets another target start from the importance matrix")
    return 0


def _source(args: argparse.Namespace) -> str:
    if args.remote is None and args.model is not None:
        return args.model
    if (name := args.remote or args.model) and not (args.remote and args.model):
        return f"hf://{name.removeprefix('hf://')}"
    raise UsageError("give the checkpoint: either CHECKPOINT or --remote REPO")
