"""`iqforge convert-lora`: convert a PEFT LoRA adapter to GGUF."""

from __future__ import annotations

import argparse

from ...errors import printable
from ..options import LoraOptions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge convert-lora` to its parser."""
    parser.description = (
        "Convert a PEFT LoRA adapter (adapter_config.json, adapter_model.safetensors or .bin) to a"
        " GGUF file."
    )
    parser.add_argument("adapter", metavar="LORA_DIR", help="folder of the adapter")
    LoraOptions.add_flags(parser, only=("base",))
    parser.add_argument(
        "--outfile",
        metavar="OUT",
        help=(
            "file or folder to write to; {outtype} is replaced by the type "
            "(default: the adapter's folder)"
        ),
    )
    parser.add_argument(
        "--outtype",
        choices=("f32", "f16", "bf16", "q8_0", "auto"),
        default="f32",
        type=str.lower,
        help="type of the matrices; auto keeps bf16 or f16 (default: f32)",
    )
    LoraOptions.add_flags(parser, only=("name",))
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, write nothing"
    )
    LoraOptions.add_flags(parser, only=("threads",))


def run(args: argparse.Namespace, api) -> int:
    """Convert the adapter, or print its tensors with --dry-run, and return 0."""
    options = LoraOptions.from_flags(args)
    if args.dry_run:
        plan, path = api.plan_lora(args.adapter, args.outfile, args.outtype, options=options)
        for tensor in plan:
            print(
                f"{printable(tensor.name)} "
                f" {' x '.join(str(size) for size in reversed(tensor.shape))}  {tensor.type}"
            )
        print(
            f"{printable(path, 400)}: {len(plan)} tensors,"
            f" {sum(tensor.n_bytes for tensor in plan) / 1e6:.2f} MB would be written"
        )
        return 0
    path = api.convert_lora(args.adapter, args.outfile, args.outtype, options=options)
    print(f"{printable(path, 400)} written")
    return 0
