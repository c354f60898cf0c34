"""`iqforge export-lora`: merge LoRA adapters into a model."""

from __future__ import annotations

import argparse

from ...errors import UsageError, printable
from .progress import Meter


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge export-lora` to its parser."""
    parser.description = (
        "Write a model with LoRA adapters merged in. Weights that they change are decoded and"
        " written as floats; all other tensors keep their bytes. `iqforge quantize` makes the"
        " result small again."
    )
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="GGUF file, first shard of a split model, or checkpoint folder",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="an adapter in GGUF, and by what its changes are multiplied (repeatable)",
    )
    parser.add_argument(
        "--lora-scaled",
        action="append",
        default=[],
        metavar="FILE:SCALE",
        help="the same; also FILE SCALE as two words",
    )
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file to write")
    parser.add_argument(
        "--outtype",
        choices=("f32", "f16", "bf16"),
        type=str.lower,
        help="type of the weights that change (default: their own, f16 if they are quantized)",
    )


def run(args: argparse.Namespace, api) -> int:
    """Merge the adapters into the model, print the path, and return 0. Raise UsageError if there is
    no adapter.
    """
    adapters = [*args.lora, *args.lora_scaled]
    if not adapters:
        raise UsageError("an adapter is needed (--lora FILE)")
    with Meter("merging") as progress:
        with api.open_source(args.model) as source:
            progress.begin(sum(tensor.n_bytes for tensor in source.tensors))
        path = api.export_lora(
            args.model, args.output, adapters, outtype=args.outtype, progress=progress
        )
    print(f"{printable(path, 400)} written")
    return 0
