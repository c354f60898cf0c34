"""Command line flags that every command running a model has. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys

from ..errors import UsageError

# Flags of the reference tools that choose hardware or memory placement and mean nothing here: (spellings, takes a value).
_IGNORED = [(("-ngl", "--gpu-layers", "--n-gpu-layers"), True), (("-sm", "--split-mode"), True), (("-ts", "--tensor-split"), True),
            (("-mg", "--main-gpu"), True), (("-ot", "--override-tensor"), True), (("-ub", "--ubatch-size"), True),
            (("-ctk", "--cache-type-k"), True), (("-ctv", "--cache-type-v"), True), (("-tb", "--threads-batch"), True),
            (("-s", "--seed"), True), (("-ncmoe", "--n-cpu-moe"), True), (("-amb",), True), (("-mla",), True),
            (("-fa", "--flash-attn"), None), (("-cmoe", "--cpu-moe"), False), (("-fmoe", "-no-fmoe"), False), (("-rtr",), False),
            (("-nkvo", "--no-kv-offload"), False),
            (("--mlock",), False), (("--no-mmap",), False)]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """-m, -f, -c, -b, --chunks, -t, --device, --cache-size, and those without effect."""
    parser.add_argument("-m", "--model", required=True, metavar="MODEL", help="GGUF file, or the first shard of a split model")
    parser.add_argument("-f", "--file", metavar="TEXT", help="UTF-8 text to evaluate")
    parser.add_argument("-c", "--ctx-size", type=int, default=512, metavar="N", help="tokens per window (default: 512)")
    parser.add_argument("-b", "--batch-size", type=int, default=2048, metavar="N", help="tokens per pass, in whole windows (default: 2048)")
    parser.add_argument("--chunks", type=int, default=-1, metavar="N", help="evaluate at most N windows (default: all)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default: cpu)")
    parser.add_argument("--cache-size", type=int, default=512, metavar="MIB", help="memory for decoded weights (default: 512 MiB)")
    for spellings, value in _IGNORED:
        options = {"nargs": "?", "const": True} if value is None else {} if value else {"action": "store_const", "const": True}
        parser.add_argument(*spellings, dest=f"ignored {spellings[0]}", help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)


def open_model(args: argparse.Namespace):
    """The model that the flags ask for. Notes on stderr which flags have no meaning here."""
    import torch

    from .model import load_model

    ignored = [name.split(" ", 1)[1] for name in vars(args) if name.startswith("ignored ")]
    if ignored:
        print(f"note: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect here", file=sys.stderr)
    if args.threads < 0 or args.batch_size < 1 or args.cache_size < 0:
        raise UsageError("-t and --cache-size cannot be negative, -b must be positive")
    if args.threads:
        torch.set_num_threads(min(args.threads, os.cpu_count() or 1))  # more would only get in each other's way
    return load_model(args.model, args.device, args.cache_size * 2**20)


class RunningOutput:
    """A progress callback: `[n]P,` on stdout after each window as the reference prints it; pace and time left on stderr.

    The pace is right only at the end of a pass, which covers several windows: it is shown after the first, then now and then.
    """

    def __init__(self, args: argparse.Namespace, values: bool = True, every_seconds: float = 60):
        self.per_pass = max(1, args.batch_size // max(1, args.ctx_size))
        self.values, self.every, self.next = values, every_seconds, 0.0

    def __call__(self, p) -> None:
        """`p` is a `Progress`."""
        if self.values and p.perplexity is not None:
            print(f"[{p.window}]{p.perplexity:.4f},", end="" if p.window < p.n_windows else "\n", flush=True)
        if p.window == p.n_windows:
            print(f"{p.n_windows} windows of {p.n_ctx} tokens in {p.seconds:.2f} s, {p.tokens_per_second:.0f} tokens/s", file=sys.stderr)
        elif p.window % self.per_pass == 0 and p.seconds >= self.next:
            print(f"{p.n_windows} windows of {p.n_ctx} tokens, {p.tokens_per_second:.0f} tokens/s, ETA {p.seconds_left / 60:.2f} minutes",
                  file=sys.stderr)
            self.next = p.seconds + self.every
