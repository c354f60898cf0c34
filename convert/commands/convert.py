"""`iqforge convert`: a Hugging Face checkpoint becomes a GGUF file."""

from __future__ import annotations

import argparse

from ...errors import UsageError, printable


def configure(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--force",
        action="store_true",
        help="use an importance matrix that seems to belong to another model",
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--split-max-tensors", metavar="N", type=int, help="write shards of at most N tensors"
    )
    limit.add_argument(
        "--split-max-size",
        metavar="N(K|M|G)",
        help="write shards with at most this much tensor data",
    )
    parser.add_argument(
        "--no-tensor-first-split",
        action="store_true",
        help="write a first shard with metadata only",
    )
    parser.add_argument(
        "--metadata",
        metavar="FILE",
        help='JSON file with general.* keys to set, such as {"general.author": "N"}',
    )
    parser.add_argument(
        "--merge-gate-up",
        "--fuse-gate-up-exps",
        action="store_true",
        dest="merge_gate_up",
        help="merge gate and up of each expert into one tensor, ffn_gate_up_exps",
    )
    blocks = parser.add_mutually_exclusive_group()
    blocks.add_argument(
        "--no-mtp",
        "--no-nextn",
        action="store_const",
        const="drop",
        default="keep",
        dest="mtp",
        help="leave out the blocks for multi-token prediction",
    )
    blocks.add_argument(
        "--mtp",
        action="store_const",
        const="only",
        dest="mtp",
        help="convert only these blocks, with embeddings, final norm and head",
    )
    parser.add_argument(
        "--mla-layout",
        choices=("mainline", "ik"),
        default="mainline",
        help=(
            "latent attention (deepseek2): attn_k_b and attn_v_b per head (mainline, the default),"
            " or attn_kv_b as well, like the converter of ik_llama.cpp (ik)"
        ),
    )
    parser.add_argument(
        "--model-name",
        metavar="N",
        help="general.name (default: from the model card or the folder)",
    )
    parser.add_argument(
        "--pre",
        metavar="NAME",
        help="name of the pre-tokenizer (default: derived from its regexes)",
    )
    parser.add_argument(
        "--vocab-only", action="store_true", help="write metadata and vocabulary, no tensors"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, write nothing"
    )
    parser.add_argument(
        "-t", "--threads", metavar="N", type=int, default=0, help="threads (default: all)"
    )


def _model(args: argparse.Namespace) -> str:
    if args.remote is None and args.model is not None:
        return args.model
    if (name := args.remote or args.model) and not (args.remote and args.model):
        return f"hf://{name.removeprefix('hf://')}"
    raise UsageError("give the checkpoint: either HF_DIR or --remote REPO")


def run(args: argparse.Namespace, api) -> int:
    options = {
        "merge_gate_up": args.merge_gate_up,
        "pre": args.pre,
        "name": args.model_name,
        "vocab_only": args.vocab_only,
        "mtp": args.mtp,
        "mla_layout": args.mla_layout,
    }
    output = {
        "metadata": args.metadata,
        "split_max_size": args.split_max_size,
        "split_max_tensors": args.split_max_tensors,
        "no_tensor_first_split": args.no_tensor_first_split,
    }
    if args.dry_run:
        return _dry_run(args, api, options, output)
    bar = _Bar()
    try:
        path = api.convert_model(
            _model(args),
            args.outfile,
            outtype=args.outtype,
            imatrix=args.imatrix,
            threads=args.threads,
            force=args.force,
            progress=bar,
            **options,
            **output,
        )
    finally:
        bar.close()
    print(f"{printable(path, 400)}: {bar.n_tensors} tensors, {bar.n_bytes / 1e6:.2f} MB written")
    return 0


def _dry_run(args: argparse.Namespace, api, options: dict, output: dict) -> int:
    with api.open_source(_model(args), **options) as source:
        planned, plan = api.plan_conversion(
            source,
            args.outfile,
            args.outtype,
            keep_name=args.model_name is not None,
            imatrix=args.imatrix,
            force=args.force,
            **output,
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


class _Bar:
    """A progress bar on stderr where that is a terminal, and the totals of the run."""

    def __init__(self):
        self.n_tensors = self.n_bytes = 0
        self._bar = None

    def begin(self, planned) -> None:
        from tqdm import tqdm

        self.n_tensors, self.n_bytes = (
            len(planned),
            sum(tensor.target.n_bytes for tensor in planned),
        )
        self._bar = tqdm(
            total=sum(tensor.source.n_elements for tensor in planned),
            unit="el",
            unit_scale=True,
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )

    def advance(self, n_elements: int) -> None:
        if self._bar is not None:
            self._bar.update(n_elements)

    def tensor_done(self, index: int, report) -> None:
        pass

    def end(self, report) -> None:
        pass

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
