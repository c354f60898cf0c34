"""Command line flags that every command running a model has. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from . import ignored_flags
from .ignored_flags import add_ignored_flags

if TYPE_CHECKING:
    from ...formats.source import Source

MOST_TOKENS = 2**31 - 1  # of -ub and -b
DEFAULT_MARGIN = 1024  # MiB that --fit leaves free


def add_model_flags(
    parser: argparse.ArgumentParser,
    *,
    model_required: bool = True,
    several_texts: bool = False,
    device: str = "cpu",
) -> None:
    """Flags of commands that evaluate windows of a text: -f, -c, -b, --chunks, and those of
    `add_runtime_flags`.

    several_texts: -f may be repeated, and `file` is a list (or None). device: the default.
    """
    add_runtime_flags(parser, model_required=model_required, device=device)
    parser.add_argument(
        "-f",
        "--file",
        metavar="TEXT",
        action="append" if several_texts else "store",
        help="UTF-8 text to evaluate" + (" (repeatable)" if several_texts else ""),
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=512,
        metavar="N",
        help="tokens per window (default: 512)",
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=2048,
        metavar="N",
        help="tokens per pass, in whole windows (default: 2048)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=-1,
        metavar="N",
        help="evaluate at most N windows (default: all)",
    )
    parser.add_argument("-s", "--seed", help=argparse.SUPPRESS)  # nothing here is random


def add_runtime_flags(
    parser: argparse.ArgumentParser, *, model_required: bool = True, device: str = "cpu"
) -> None:
    """-m, -t, --device, cache types and the reference's switches: what every command that runs a
    model has.
    """
    parser.add_argument(
        "-m",
        "--model",
        required=model_required,
        metavar="MODEL",
        help="GGUF file, or the first shard of a split model",
    )
    parser.add_argument(
        "-t", "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all)"
    )
    add_device_flag(parser, device)
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16", "f16"),
        help="f32: the truth path (CPU's default), bf16: a GPU's default",
    )
    parser.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=int,
        metavar="N",
        help=(
            "so many of the last layers on the GPU, with "
            "more than there are also embedding and output (default: all)"
        ),
    )
    parser.add_argument(
        "-ot",
        "--override-tensor",
        action="append",
        metavar="REGEX=D,..",
        help="tensors whose names match on CPU or CUDAn",
    )
    parser.add_argument(
        "-ncmoe",
        "--n-cpu-moe",
        type=int,
        metavar="N",
        help="experts of the first N layers stay on the CPU",
    )
    parser.add_argument(
        "-cmoe", "--cpu-moe", action="store_true", help="all experts stay on the CPU"
    )
    parser.add_argument(
        "--fit",
        nargs="?",
        type=int,
        const=DEFAULT_MARGIN,
        metavar="MIB",
        help=(
            "choose by the GPU's free memory what "
            f"stays on the CPU, leaving so much free (default: {DEFAULT_MARGIN} MiB)"
        ),
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say what runs on a slower path"
    )
    parser.add_argument(
        "--cache-size",
        type=int,
        default=512,
        metavar="MIB",
        help="memory for decoded weights (default: 512 MiB)",
    )
    parser.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        metavar="N",
        help="most tokens that go through the model at a time",
    )
    parser.add_argument(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help=(
            "storage of keys: f32, f16, bf16, q8_0, q6_0, q5_1, q5_0, q4_1, "
            "q4_0, iq4_nl, q8_kv (CPU); default: f16, for windows of a text none"
        ),
    )
    parser.add_argument(
        "-ctv", "--cache-type-v", metavar="TYPE", help="storage of values, likewise"
    )
    parser.add_argument(
        "-khad",
        "--k-cache-hadamard",
        action="store_true",
        help="turn keys by a Hadamard matrix where they are quantized",
    )
    parser.add_argument(
        "-vhad", "--v-cache-hadamard", action="store_true", help="turn values likewise"
    )
    parser.add_argument(
        "-fa",
        "--flash-attn",
        nargs="?",
        const=True,
        default=True,
        metavar="on|off",
        help="flash attention (default: on)",
    )
    parser.add_argument(
        "-amb",
        "--attention-max-batch",
        type=int,
        default=0,
        metavar="MIB",
        help="most memory for scores with -fa off",
    )
    parser.add_argument(
        "-ser",
        "--smart-expert-reduction",
        metavar="K,t",
        help=(
            "the K best experts, of the others those more than t times "
            "as probable as the best (changes the model)"
        ),
    )
    parser.add_argument(
        "-muge",
        "--merge-up-gate-experts",
        action="store_true",
        help="gate and up experts as one matrix",
    )
    add_ignored_flags(parser)


def add_device_flag(parser: argparse.ArgumentParser, default: str) -> None:
    """--device of every command that runs a model."""
    parser.add_argument(
        "--device",
        default=default,
        metavar="D",
        help=(
            "cpu, cuda, cuda:N, or auto: the first GPU where there is one, else "
            f"the CPU (default: {default})"
        ),
    )


def cache_settings(args: argparse.Namespace):
    """The `CacheSettings` that the flags ask for, or None if no flag is about the cache. UsageError
    for what cannot be.
    """
    from ..cache import CacheSettings
    from ..switches import parse_on_off

    if args.cache_type_k is None and args.cache_type_v is None:
        if args.k_cache_hadamard or args.v_cache_hadamard:
            note("-khad, -vhad", "the cache is not quantized")
        return None
    settings = CacheSettings(
        args.cache_type_k or "f16",
        args.cache_type_v or "f16",
        args.k_cache_hadamard,
        args.v_cache_hadamard,
    )
    for flag, turned, type in (
        ("-khad", settings.hadamard_k, settings.k),
        ("-vhad", settings.hadamard_v, settings.v),
    ):
        if turned and not type.is_quantized:
            note(flag, f"the cache stores {type.name.lower()}")
    if settings.v.is_quantized and not parse_on_off("-fa", args.flash_attn):
        raise UsageError(
            f"values of a cache cannot be quantized ({args.cache_type_v}) without flash attention"
            " (-fa off)"
        )
    return settings


def switches(args: argparse.Namespace):
    """The `Switches` that the flags ask for. UsageError for values out of range."""
    from ..switches import Switches, parse_on_off, parse_ser

    flash = parse_on_off("-fa", args.flash_attn)
    ser = parse_ser(args.smart_expert_reduction) if args.smart_expert_reduction else None
    chosen = Switches(flash, args.attention_max_batch, ser, args.merge_up_gate_experts)
    if args.attention_max_batch and flash:
        note("-amb", "flash attention has no matrix of scores")
    return chosen


def placement(args: argparse.Namespace, device):
    """The `placement.Request` of -ngl, -ot, --n-cpu-moe, --cpu-moe and --fit, which change nothing
    where `device` is the CPU. UsageError for what cannot be.
    """
    from ..placement import ALL, Request, parse_overrides

    check_layers(args.gpu_layers or 0, "--n-cpu-moe", args.n_cpu_moe or 0)
    given = [
        flag
        for flag, value in (
            ("-ngl", args.gpu_layers),
            ("--n-cpu-moe", args.n_cpu_moe),
            ("--cpu-moe", args.cpu_moe or None),
            ("--fit", args.fit),
            ("-ot", args.override_tensor),
        )
        if value is not None
    ]
    overrides = tuple(
        override for text in args.override_tensor or () for override in parse_overrides(text)
    )
    layers = ALL if args.gpu_layers is None or args.gpu_layers < 0 else args.gpu_layers
    request = Request(layers, overrides, ALL if args.cpu_moe else args.n_cpu_moe or 0, args.fit)
    request.check(device)
    if (
        given and device.type == "cpu"
    ):  # only now: what is refused is not also said to change nothing
        note(", ".join(given), f"everything is on the CPU with --device {args.device}")
    return request


def chosen_device(name: str):
    """The torch device of `--device`; says on stderr which `auto` has chosen. UsageError for one
    that is not there.
    """
    from ..devices import usable_device

    device = usable_device(name)
    if name == "auto":
        print(
            f"device: {device}" + (" (there is no GPU)" if device.type == "cpu" else ""),
            file=sys.stderr,
        )
    return device


def note(flags: str, why: str) -> None:
    """One line on stderr about flags that change nothing."""
    print(
        f"note: {flags} {'change' if ',' in flags else 'changes'} nothing here: {why}",
        file=sys.stderr,
    )


def batch_tokens(args: argparse.Namespace) -> int:
    """Tokens per pass over windows: of -b, or of -ub if that is less; never less than a window."""
    return max(args.ctx_size, min(args.batch_size, args.ubatch_size or args.batch_size))


def open_model(
    args: argparse.Namespace,
    *,
    source: Source | None = None,
    context: int = 0,
    rows: int = 0,
    window: int = 0,
):
    """The model that the flags ask for, of `source` or else of -m, loaded.

    Notes on stderr which flags change nothing here, and why; for a GPU what the model takes on each
    device, reckoned for a sequence of `context` tokens and `rows` of them at a time, or for `rows`
    in windows of `window` tokens. DeviceError if that is more than there is.
    """
    import torch

    from ...formats.gguf.reader import open_gguf
    from ..model import DEFAULT_UBATCH, Model

    for ignored in ignored_flags.given(args):
        note(ignored.flag, ignored.why)
    if args.threads < 0 or getattr(args, "batch_size", 1) < 1 or args.cache_size < 0:
        raise UsageError("-t and --cache-size cannot be negative, -b must be positive")
    if args.ubatch_size is not None and not 1 <= args.ubatch_size <= MOST_TOKENS:
        raise UsageError(
            f"-ub is {args.ubatch_size}, expected at least 1 token, at most {MOST_TOKENS}"
        )
    if args.threads:
        torch.set_num_threads(
            min(args.threads, os.cpu_count() or 1)
        )  # more would only get in each other's way
    device = chosen_device(args.device)
    options = {
        "precision": args.precision,
        "placement": placement(args, device),
        "switches": switches(args),
        "cache": cache_settings(args),
    }
    source = source or open_gguf(args.model)
    try:
        model = Model(
            source,
            device,
            args.cache_size * 2**20,
            ubatch=args.ubatch_size or DEFAULT_UBATCH,
            context=context,
            verbose=(lambda line: print(line, file=sys.stderr)) if args.verbose else None,
            **options,
        )
        for flag, why in model_notes(model):
            note(flag, why)
        if model.device.type != "cpu":
            load_on_gpu(model, rows, window)
    except BaseException:
        source.close()
        raise
    return model


def check_layers(gpu_layers: int, cpu_flag: str, cpu_experts: int) -> None:
    """UsageError for numbers of layers on the GPU (-ngl), or with experts on the CPU (`cpu_flag`),
    that are none.
    """
    if gpu_layers < -1:
        raise UsageError(f"-ngl is {gpu_layers}, expected -1 (all) or more")
    if cpu_experts < 0:
        raise UsageError(f"{cpu_flag} is {cpu_experts}, expected 0 or more")


def model_notes(model) -> list[tuple[str, str]]:
    """(flag, why) of the switches about experts and of the overrides that change nothing with this
    `Model`.
    """
    unused = (
        model.weights.placement.unused(tensor.name for tensor in model.source.tensors)
        if model.device.type != "cpu"
        else []
    )
    return _expert_notes(model) + [
        (f"-ot '{printable(pattern, 80)}'", "no tensor has such a name") for pattern in unused
    ]


def _expert_notes(model) -> list[tuple[str, str]]:
    chosen, has_experts = (
        model.weights.switches,
        model.hyperparameters.integer("expert_count", 0) > 0,
    )
    if not has_experts:
        return [
            (flag, "the model has no experts")
            for flag, given in (("-ser", chosen.ser), ("-muge", chosen.merge_gate_up))
            if given
        ]
    used = model.hyperparameters.integer("expert_used_count")
    if chosen.ser is not None and chosen.ser[0] >= used:
        return [("-ser", f"the model uses {used} experts, and {chosen.ser[0]} are always kept")]
    return []


def load_on_gpu(model, rows: int = 0, window: int = 0) -> None:
    """Bring a model to its GPU: the table of memory first, then a bar. DeviceError if there is too
    little memory.
    """
    import time

    from tqdm import tqdm

    from ..memory import check, table

    memories = model.memory(rows, window)
    print("\n".join(table(memories)), file=sys.stderr)
    check(memories)
    started = time.perf_counter()
    with tqdm(
        unit="B", unit_scale=True, unit_divisor=1024, desc="loading", leave=False, disable=None
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model.load(advance)
    seconds = time.perf_counter() - started
    n_bytes = sum(m.weights for m in memories if m.device.type != "cpu")
    print(
        f"loaded {n_bytes / 2**30:.2f} GiB in {seconds:.2f} s, {n_bytes / 2**30 / seconds:.2f}"
        " GiB/s",
        file=sys.stderr,
    )


class RunningOutput:
    """A progress callback: `[n]P,` on stdout after each window as the reference prints it; pace and
    time left on stderr.

    The pace is right only at the end of a pass, which covers several windows: it is shown after the
    first, then now and then.
    """

    def __init__(self, args: argparse.Namespace, values: bool = True, every_seconds: float = 60):
        self.per_pass = batch_tokens(args) // max(1, args.ctx_size)
        self.values, self.every, self.next = values, every_seconds, 0.0

    def __call__(self, p) -> None:
        """`p` is a `Progress`."""
        if self.values and p.perplexity is not None:
            print(
                f"[{p.window}]{p.perplexity:.4f},",
                end="" if p.window < p.n_windows else "\n",
                flush=True,
            )
        if p.window == p.n_windows:
            print(
                f"{p.n_windows} windows of {p.n_ctx} tokens in {p.seconds:.2f} s,"
                f" {p.tokens_per_second:.0f} tokens/s",
                file=sys.stderr,
            )
        elif p.window % self.per_pass == 0 and p.seconds >= self.next:
            print(
                f"{p.n_windows} windows of {p.n_ctx} tokens, {p.tokens_per_second:.0f} tokens/s,"
                f" ETA {p.seconds_left / 60:.2f} minutes",
                file=sys.stderr,
            )
            self.next = p.seconds + self.every
