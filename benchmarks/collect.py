"""Measure how fast statistics of inputs are collected on a GPU, and compare the fast path with the
reference path.

    python benchmarks/collect.py llama-8b:IQ4_K qwen3-30b-a3b:IQ4_K [--chunks 100] [--hessian]
    python benchmarks/collect.py MODEL.gguf --text TEXT [--chunks 40] [--judge TEXT]

Models are files, or synthetic shapes with random weights, which see random tokens. Chunks have 512
tokens. A line per model and precision says tokens per second (without the first pass, which
compiles kernels), then how much sums differ from those of f32: the most over columns that carry
99.9 % of the sum of a tensor, and the most over tokens per expert. With --judge the model is
quantized to IQ3_K with every importance matrix, and the KL divergences from it are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import iqforge
import numpy as np
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.data import Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.imatrix.moments.collector import collect_moments, survey_inputs
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.tokenizer import SpecialTokens

N_CTX = 512


def opened(name: str, precision: str, device: str) -> Model:
    """Open a GGUF file, or random weights of a shape such as `llama-8b:IQ4_K`, as a model on
    `device`.
    """
    if os.path.exists(name):
        return Model(open_gguf(name), device, precision=precision)
    model = Model(SyntheticSource(name), device, precision=precision)
    model.special_tokens = SpecialTokens()
    return model


def tokens_of(model: Model, text: str | None, n: int) -> list[int]:
    """Return the first n tokens of a text, or random ones."""
    if text is None:
        return np.random.default_rng(0).integers(0, model.n_vocab, n).tolist()
    with open(text, encoding="utf-8") as file:
        return list(model.tokenizer.encode(file.read()))[:n]


def speed(model: Model, tokens: list[int], args: argparse.Namespace, ppl: bool) -> tuple:
    """Return (tokens per second, the importance matrix)."""
    options = {"n_ctx": N_CTX, "batch_tokens": args.batch, "compute_perplexity": ppl}
    collect(model, tokens[: args.batch], **options)
    torch.cuda.synchronize()
    started = time.perf_counter()
    made = collect(model, tokens, **options)
    torch.cuda.synchronize()
    return len(tokens) / (time.perf_counter() - started), made


def differences(fast: Imatrix, slow: Imatrix) -> str:
    """Say how much sums and counts differ."""
    most, at, counts, means = 0.0, "", 0.0, []
    for name, entry in slow.entries.items():
        found = fast.entries[name]
        if found.counts.sum() != entry.counts.sum():
            return f"{name} saw {found.counts.sum()} tokens instead of {entry.counts.sum()}"
        seen = np.maximum(entry.counts, 1)
        counts = max(counts, float((np.abs(found.counts - entry.counts) / seen).max()))
        a, b = found.sums.sum(0), entry.sums.sum(0)
        order = np.argsort(-b)
        heavy = order[: int(np.searchsorted(np.cumsum(b[order]), 0.999 * b.sum())) + 1]
        relative = np.abs(a[heavy] / b[heavy] - 1)
        means.append(float(relative.mean()))
        if relative.max() > most:
            most, at = float(relative.max()), name
    return f"sums within {most:.4%} ({at}), mean {np.mean(means):.4%}; experts within {counts:.2%}"


def divergences(name: str, made: dict[str, Imatrix], args: argparse.Namespace) -> dict[str, float]:
    """Return the mean KL divergence of an IQ3_K of the model by precision of the importances."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        base, common = os.path.join(folder, "base"), {"device": args.device, "precision": "f32"}
        iqforge.measure_perplexity(
            name, args.judge, chunks=args.judge_chunks, kl_divergence_base=base, **common
        )
        for precision, imatrix in made.items():
            file, out = os.path.join(folder, "imatrix.gguf"), os.path.join(folder, "out.gguf")
            save_imatrix(imatrix, file)
            iqforge.quantize_model(
                name,
                out,
                "IQ3_K",
                pure=True,
                imatrix=file,
                token_embedding_type="q8_0",
                output_tensor_type="q8_0",
                device=args.device,
                allow_requantize=True,
                restart=True,
            )
            score: Any = iqforge.measure_perplexity(
                out, None, kl_divergence_base=base, kl_divergence=True, **common
            )
            found[precision] = score.mean_kld
    return found


def hessian_speed(model: Model, tokens: list[int], args: argparse.Namespace) -> float:
    """Return tokens per second."""
    options = HessianOptions(n_ctx=N_CTX, batch_tokens=args.batch, experts="layer")
    total = survey_inputs(model, options)
    collect_moments(model, [Text(tokens[: args.batch])], options, total)
    total.done = 0
    torch.cuda.synchronize()
    started = time.perf_counter()
    collect_moments(model, [Text(tokens)], options, total)
    torch.cuda.synchronize()
    return len(tokens) / (time.perf_counter() - started)


def layer_speed(model: Model, tokens: list[int], args: argparse.Namespace) -> str:
    """Say how long the first layers take, one after the other."""
    options = HessianOptions(n_ctx=N_CTX, batch_tokens=args.batch)
    layers = LayerMoments(model, [Text(tokens)], options, tempfile.gettempdir())
    seconds = []
    for number in range(args.layers + 1):  # the first one compiles
        layers.wanted.add(number)
        layers.needed[number] = 1
        torch.cuda.synchronize()
        started = time.perf_counter()
        layers.layer(number)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        layers.done(number)
    layers.close()
    mean = statistics.fmean(seconds[1:])
    gib = torch.cuda.max_memory_allocated() / 2**30
    return (
        f"layer by layer: {mean:.2f} s per layer of {len(tokens):,} tokens"
        f" ({mean * len(model.network.blocks):.0f} s for all), {gib:.0f} GiB of GPU memory"
    )


def main() -> None:
    """Parse the command line and print the times, and with --judge the KL divergences, of each
    model.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", help="of a file's model; random tokens otherwise")
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a pass")
    parser.add_argument("--precision", nargs="+", default=["f16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hessian", action="store_true", help="also time second moments")
    parser.add_argument("--layers", type=int, default=0, help="also time so many layers in turn")
    parser.add_argument("--judge", metavar="TEXT", help="also compare KL divergences on this text")
    parser.add_argument("--judge-chunks", type=int, default=40)
    parser.add_argument("--no-reference", action="store_true", help="compare with nothing")
    args = parser.parse_args()
    for name in args.models:
        made = {}
        precisions = [*args.precision, *([] if args.no_reference else ["f32"])]
        for precision in precisions:
            with opened(name, precision, args.device) as model:
                model.load()
                tokens = tokens_of(model, args.text, args.chunks * N_CTX)
                rate, made[precision] = speed(model, tokens, args, False)
                line = f"{name} {precision}: {rate:,.0f} t/s"
                if precision != "f32":
                    line += f", with perplexity {speed(model, tokens, args, True)[0]:,.0f} t/s"
                    if args.hessian:
                        line += f", second moments {hessian_speed(model, tokens, args):,.0f} t/s"
                    if args.layers:
                        line += f", {layer_speed(model, tokens, args)}"
                print(line, flush=True)
        for precision in args.precision:
            if "f32" in made:
                found = differences(made[precision], made["f32"])
                print(f"{name} {precision} against f32: {found}", flush=True)
        if args.judge:
            judged = divergences(name, made, args)
            for precision, kld in judged.items():
                ratio = f" (x {kld / judged['f32']:.4f} of f32)" if "f32" in judged else ""
                print(f"{name} IQ3_K, importances in {precision}: {kld:.5f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
