"""`iqforge convert`: a Hugging Face checkpoint becomes a GGUF file."""

from __future__ import annotations

import argparse

_OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert a Hugging Face checkpoint (config.json, safetensors, tokenizer.json) to a GGUF file."
    parser.add_argument("model", metavar="HF_DIR", help="folder of the checkpoint")
    parser.add_argument("--outfile", metavar="OUT", help="file or folder to write to; {outtype} stands for the type "
                        "(default: the checkpoint's folder, named after model, size and type)")
    parser.add_argument("--outtype", choices=_OUTTYPES, default="auto", type=str.lower,
                        help="type of the matrices; auto keeps bf16 or f16 (default: auto)")
    parser.add_argument("--merge-gate-up", "--fuse-gate-up-exps", action="store_true", dest="merge_gate_up",
                        help="store gate and up of each expert as one tensor, ffn_gate_up_exps")
    parser.add_argument("--model-name", metavar="N", help="general.name (default: from the model card or the folder)")
    parser.add_argument("--pre", metavar="NAME", help="name of the pre-tokenizer (default: recognized by its regexes)")
    parser.add_argument("--vocab-only", action="store_true", help="write metadata and vocabulary, no tensors")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, write nothing")
    parser.add_argument("-t", "--threads", metavar="N", type=int, default=0, help="threads (default: all)")


def run(args: argparse.Namespace, api) -> int:
    from .checkpoint import open_checkpoint
    from .naming import output_path
    from .outtype import plan_outtype
    from .source import CheckpointSource

    checkpoint = open_checkpoint(args.model, weights=not args.vocab_only)
    options = {"merge_gate_up": args.merge_gate_up, "pre": args.pre, "name": args.model_name}
    with CheckpointSource(checkpoint, vocab_only=args.vocab_only, **options) as source:
        path = output_path(source, args.outfile, args.outtype)
        plan, _ = plan_outtype(source, args.outtype)
        if args.dry_run:
            _print_plan(source, plan)
        elif args.vocab_only:
            from ..formats.gguf.writer import GGUFWriter

            with GGUFWriter(path, source.metadata, ()):
                pass
    total = sum(tensor.n_bytes for tensor in plan)
    if args.dry_run:
        print(f"{path}: {len(plan)} tensors, {total / 1e6:.2f} MB would be written")
        return 0
    if not args.vocab_only:
        from tqdm import tqdm

        with tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            path = api.convert_model(args.model, path, outtype=args.outtype, threads=args.threads, progress=bar.update, **options)
    print(f"{path}: {len(plan)} tensors, {total / 1e6:.2f} MB written")
    return 0


def _print_plan(source, plan) -> None:
    width = max((len(tensor.name) for tensor in plan), default=0)
    for stored, tensor in zip(source.tensors, plan):
        shape = " x ".join(str(size) for size in reversed(tensor.shape))
        print(f"{tensor.name:{width}}  {shape:>24}  {stored.type.name:>5} -> {tensor.type.name:<5} {tensor.n_bytes / 1e6:12.2f} MB")
