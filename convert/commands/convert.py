"""`iqforge convert`: convert a Hugging Face checkpoint to GGUF."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from ...errors import UsageError, printable
from ...formats.commands.progress import Meter, count_of
from ..architectures.layout_options import LayoutOptions
from ..options import ConvertOptions

_IGNORED = {
    "--verbose": "--dry-run prints a line for every tensor",
    "--no-lazy": "a tensor is read when it is written",
    "--use-temp-file": "memory is bounded without one",
}
_SPLIT = "--split-gate-up"
_NOT_SPLIT = (
    "gate and up are apart unless --merge-gate-up is given, or llama.cpp reads an architecture only"
    " with both in one tensor (gemma4, mistral4)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge convert` to its parser."""
    parser.description = (
        "Convert a Hugging Face checkpoint (config.json, safetensors, tokenizer.json) to a GGUF"
        " file."
    )
    parser.add_argument("model", metavar="HF_DIR", nargs="?", help="folder of the checkpoint")
    parser.add_argument(
        "--remote",
        metavar="REPO[@REVISION]",
        nargs="?",
        const="",
        help=(
            "read the checkpoint from this repository of the Hugging Face Hub and fetch only what"
            " is converted; without a value HF_DIR is the repository (HF_ENDPOINT, HF_TOKEN)"
        ),
    )
    parser.add_argument(
        "--outfile",
        metavar="OUT",
        help=(
            "file or folder to write to; {outtype} is replaced by the type "
            "(default: the checkpoint's folder, named after model, size and type)"
        ),
    )
    parser.add_argument(
        "--outtype",
        metavar="TYPE",
        default="auto",
        type=str.lower,
        help=(
            "type of the matrices: f32, f16, bf16, q8_0, auto (keeps bf16 or f16; the default), or"
            " a preset of iqforge quantize such as iq4_k, which quantizes without an intermediate"
            " file"
        ),
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance matrix for a preset")
    ConvertOptions.add_flags(parser, only=("force",))
    limit = parser.add_mutually_exclusive_group()
    ConvertOptions.add_flags(limit, only=("split_max_tensors", "split_max_size"))
    ConvertOptions.add_flags(parser, only=("no_tensor_first_split", "metadata"))
    gate_up = parser.add_mutually_exclusive_group()
    LayoutOptions.add_flags(gate_up, only=("merge_gate_up",))
    gate_up.add_argument(_SPLIT, action="store_true", help=argparse.SUPPRESS)
    LayoutOptions.add_flags(parser.add_mutually_exclusive_group(), only=("mtp",))
    LayoutOptions.add_flags(parser, only=("mla_layout",))
    ConvertOptions.add_flags(parser, only=("name", "pre"))
    LayoutOptions.add_flags(parser, only=("vocab_only",))
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, write nothing"
    )
    ConvertOptions.add_flags(parser, only=("device",), device="auto")
    ConvertOptions.add_flags(parser, only=("threads",))
    for flag in _IGNORED:
        parser.add_argument(
            flag, action="append_const", const=flag, dest="ignored", help=argparse.SUPPRESS
        )


def _model(args: argparse.Namespace) -> str:
    if args.remote is None and args.model is not None:
        return args.model
    if (name := args.remote or args.model) and not (args.remote and args.model):
        return f"hf://{name.removeprefix('hf://')}"
    raise UsageError("give the checkpoint: either HF_DIR or --remote REPO")


def run(args: argparse.Namespace, api) -> int:
    """Convert the checkpoint, or print the plan with --dry-run, and return 0."""
    options, layout = ConvertOptions.from_flags(args), LayoutOptions.from_flags(args)
    ignored = {flag: _IGNORED[flag] for flag in args.ignored or ()}
    for flag, why in (ignored | ({_SPLIT: _NOT_SPLIT} if args.split_gate_up else {})).items():
        print(f"note: {flag} changes nothing here: {why}", file=sys.stderr)
    if args.dry_run:
        return _dry_run(args, api, options, layout)
    progress = _Progress()
    try:
        path = api.convert_model(
            _model(args),
            args.outfile,
            outtype=args.outtype,
            imatrix=args.imatrix,
            options=options,
            layout=layout,
            progress=progress,
        )
    finally:
        progress.close()
    files = api.inspect_model(path).files
    others = f" and {count_of(len(files) - 1, 'more shard')}" if len(files) > 1 else ""
    size = sum(map(os.path.getsize, files))
    print(
        f"{printable(path, 400)}{others}: {count_of(progress.n_tensors, 'tensor')},"
        f" {size / 1e6:.2f} MB written"
    )
    return 0


def _dry_run(args: argparse.Namespace, api, options: ConvertOptions, layout: LayoutOptions) -> int:
    stored = asdict(layout)
    with api.open_source(_model(args), pre=options.pre, name=options.name, **stored) as source:
        planned, plan = api.plan_conversion(
            source, args.outfile, args.outtype, imatrix=args.imatrix, options=options
        )
    width = max((len(tensor.target.name) for tensor in planned), default=0)
    for tensor in planned:
        target, shape = (
            tensor.target,
            " x ".join(str(size) for size in reversed(tensor.target.shape)),
        )
        types, note = (
            f"{tensor.source.type.name:>5} -> {target.type.name:<5}",
            (f"  ({tensor.note})" if tensor.note else ""),
        )
        print(
            f"{printable(target.name):{width}}  {shape:>24}  {types} {target.n_bytes / 1e6:12.2f}"
            f" MB{note}"
        )
    for path, group in zip(plan.paths, plan.groups):
        print(
            f"{printable(path, 400)}: {len(group)} tensors,"
            f" {sum(tensor.n_bytes for tensor in group) / 1e6:.2f} MB would be written"
        )
    enough = (
        ""
        if plan.free_bytes < 0
        else f", {plan.free_bytes} are free"
        + (": not enough" if plan.free_bytes < plan.n_bytes else "")
    )
    print(f"space needed: {plan.n_bytes} bytes{enough}")
    return 0


class _Progress:
    """A progress bar or lines on stderr, and the totals of the run."""

    def __init__(self):
        self.n_tensors = 0
        self._meter = Meter("converting", unit="el")

    def begin(self, planned) -> None:
        self.n_tensors = len(planned)
        self._meter.begin(sum(tensor.source.n_elements for tensor in planned))

    def advance(self, n_elements: int) -> None:
        self._meter(n_elements)

    def tensor_done(self, index: int, report) -> None:
        pass

    def end(self, report) -> None:
        pass

    def close(self) -> None:
        self._meter.close()
