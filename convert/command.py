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
    blocks = parser.add_mutually_exclusive_group()
    blocks.add_argument("--no-mtp", "--no-nextn", action="store_const", const="drop", default="keep", dest="mtp",
                        help="leave out the blocks that predict further tokens")
    blocks.add_argument("--mtp", action="store_const", const="only", dest="mtp",
                        help="write only these blocks, with embeddings, final norm and head")
    parser.add_argument("--mla-layout", choices=("mainline", "ik"), default="mainline", help="latent attention (deepseek2): as attn_k_b and "
                        "attn_v_b per head, or with attn_kv_b as ik_llama.cpp's own converter writes it (default: mainline)")
    parser.add_argument("--model-name", metavar="N", help="general.name (default: from the model card or the folder)")
    parser.add_argument("--pre", metavar="NAME", help="name of the pre-tokenizer (default: recognized by its regexes)")
    parser.add_argument("--vocab-only", action="store_true", help="write metadata and vocabulary, no tensors")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, write nothing")
    parser.add_argument("-t", "--threads", metavar="N", type=int, default=0, help="threads (default: all)")


def run(args: argparse.Namespace, api) -> int:
    options = {"merge_gate_up": args.merge_gate_up, "pre": args.pre, "name": args.model_name, "vocab_only": args.vocab_only,
               "mtp": args.mtp, "mla_layout": args.mla_layout}
    if args.dry_run:
        return _dry_run(args, api, options)
    bar = _Bar()
    try:
        path = api.convert_model(args.model, args.outfile, outtype=args.outtype, threads=args.threads, progress=bar, **options)
    finally:
        bar.close()
    print(f"{path}: {bar.n_tensors} tensors, {bar.n_bytes / 1e6:.2f} MB written")
    return 0


def _dry_run(args: argparse.Namespace, api, options: dict) -> int:
    from .naming import output_path
    from .outtype import plan_outtype

    with api.open_source(args.model, **options) as source:
        plan, _ = plan_outtype(source, args.outtype)
        path = output_path(source, args.outfile, args.outtype)
    width = max((len(tensor.name) for tensor in plan), default=0)
    for stored, tensor in zip(source.tensors, plan):
        shape = " x ".join(str(size) for size in reversed(tensor.shape))
        print(f"{tensor.name:{width}}  {shape:>24}  {stored.type.name:>5} -> {tensor.type.name:<5} {tensor.n_bytes / 1e6:12.2f} MB")
    print(f"{path}: {len(plan)} tensors, {sum(tensor.n_bytes for tensor in plan) / 1e6:.2f} MB would be written")
    return 0


class _Bar:
    """A progress bar on stderr where that is a terminal, and the totals of the run."""

    def __init__(self):
        self.n_tensors = self.n_bytes = 0
        self._bar = None

    def begin(self, planned) -> None:
        from tqdm import tqdm

        self.n_tensors, self.n_bytes = len(planned), sum(tensor.target.n_bytes for tensor in planned)
        self._bar = tqdm(total=sum(tensor.source.n_elements for tensor in planned), unit="el", unit_scale=True, leave=False, disable=None,
                         dynamic_ncols=True)

    def advance(self, n_elements: int) -> None:
        self._bar.update(n_elements)

    def tensor_done(self, index: int, report) -> None:
        pass

    def end(self, report) -> None:
        pass

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
