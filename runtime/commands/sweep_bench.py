"""`iqforge sweep-bench`: speed of prompts and of generation as the context fills, like the tool of
this name in ik_llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import UsageError
from ..bench import options as bench_options
from .flags import add_device_flag

_HEADS = (
    ("PP", 6),
    ("TG", 6),
    ("N_KV", 6),
    ("T_PP s", 8),
    ("S_PP t/s", 8),
    ("T_TG s", 8),
    ("S_TG t/s", 8),
)
_MEMORY_HEADS = (("RSS HWM", 8), ("VRAM delta", 10))


@dataclass(frozen=True)
class Row:
    """A prompt of pp tokens at once and tg generated ones, each behind n_kv others; seconds. See
    `runtime.bench`.
    """

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float

    @property
    def speed_pp(self) -> float:
        return self.pp / self.t_pp

    @property
    def speed_tg(self) -> float:
        return self.tg / self.t_tg


def sweep(
    model,
    n_ctx: int,
    *,
    tg: int = 0,
    stride: int = 1,
    first_repetitions: int = 1,
    warmup: bool = True,
    seed: int = 0,
) -> Iterator[Row]:
    """Rows for n_kv = 0, ub, 2 ub, ... below n_ctx, with ub = `model.ubatch`; tg: tokens generated
    for each (0: ub/4).

    Generation is measured first, and what it left in the context is dropped. The prompt that is
    measured stays there for the next row. stride: only every such row is measured, the others fill
    the context. first_repetitions: of the first row. UsageError for a model whose state cannot be
    cut back.
    """
    import torch

    from ..bench.bench import Runner
    from ..cache import KVCache

    ub, tg = model.ubatch, tg or max(1, model.ubatch // 4)
    state = model.new_state(positions(n_ctx, ub, tg))
    if not all(isinstance(layer, KVCache) for layer in state.layers):
        raise UsageError(
            "a sweep needs a model whose context can be cut back, and some layers of this one keep"
            " a running state"
        )
    runner = Runner(model, state, ub, torch.Generator().manual_seed(seed))
    if warmup:
        runner.warm_up(ub, tg)

    def timed(run, n: int) -> float:
        begin = time.perf_counter()
        run(n)
        return time.perf_counter() - begin

    for index, n_kv in enumerate(range(0, n_ctx, ub)):
        for _ in range(first_repetitions if index == 0 else 1):
            state.n_past = n_kv
            t_tg = timed(runner.generate, tg) if index % stride == 0 else 0.0
            state.n_past = n_kv
            t_pp = timed(runner.prompt, ub)
            if index % stride == 0:
                yield Row(ub, tg, n_kv, t_pp, t_tg)


def positions(n_ctx: int, ub: int, tg: int = 0) -> int:
    """Tokens that the context of a sweep must hold; tg as in `sweep`."""
    return -(-n_ctx // ub) * ub + (tg or max(1, ub // 4))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "For every -ub tokens of context: -n tokens are generated, then comes a prompt of -ub"
        " tokens, which stays in the context. Each line shows both speeds at that depth."
    )
    parser.add_argument(
        "-m", "--model", metavar="MODEL", help="GGUF file, or the first shard of a split model"
    )
    parser.add_argument(
        "--synthetic",
        metavar="SHAPE:TYPE",
        help="random weights of a real shape, as in `iqforge bench`",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=4096,
        metavar="N",
        help="depth to go to (default: 4096)",
    )
    parser.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=0,
        metavar="N",
        help="tokens to generate per line (default: -ub/4)",
    )
    parser.add_argument(
        "-nrep",
        "--n-repetitions",
        type=int,
        default=1,
        metavar="N",
        help="repeat the first line (default: 1)",
    )
    parser.add_argument(
        "--sweep-stride",
        type=int,
        default=1,
        metavar="N",
        help="measure every N-th line only (default: 1)",
    )
    parser.add_argument(
        "--sweep-memory",
        action="store_true",
        help="peak of resident memory and growth of device memory, MiB",
    )
    parser.add_argument(
        "--no-warmup", action="store_true", help="nothing runs before the first line"
    )
    parser.add_argument(
        "-wb", "--warmup-batch", action="store_true", help=argparse.SUPPRESS
    )  # the warm-up is a whole batch anyway
    parser.add_argument(
        "--output-format", choices=("md", "jsonl"), default="md", help="(default: md)"
    )
    add_device_flag(parser, "auto")
    parser.add_argument(
        "--fit",
        nargs="?",
        type=int,
        const=1024,
        metavar="MIB",
        help="choose by free memory what stays on the CPU",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what takes a slower path")
    bench_options.add_options(parser)


def run(args: argparse.Namespace, api) -> int:
    from .bench import only_setting, open_model

    if args.ctx_size < 1 or args.n_predict < 0 or min(args.n_repetitions, args.sweep_stride) < 1:
        raise UsageError("-c, -nrep and --sweep-stride are at least 1, -n at least 0")
    device, setting = only_setting(args, "a sweep")
    about = {
        "n_kv_max": args.ctx_size,
        "n_batch": setting["n_batch"],
        "n_ubatch": setting["n_ubatch"],
        "flash_attn": int(setting["flash_attn"]),
        "n_gpu_layers": setting["n_gpu_layers"] if device.type == "cuda" else 0,
        "n_threads": setting["n_threads"],
        "n_threads_batch": setting["n_threads"],
    }
    context = positions(args.ctx_size, setting["n_ubatch"], args.n_predict)
    with open_model(
        args.model or args.synthetic,
        args.model is None,
        device,
        setting,
        context=context,
        fit_margin=args.fit,
        verbose=args.verbose,
    ) as model:
        before = _device_bytes(device)
        if args.output_format == "md":
            print("\nmain: " + ", ".join(f"{key} = {value}" for key, value in about.items()) + "\n")
            heads = _HEADS + (_MEMORY_HEADS if args.sweep_memory else ())
            print("|" + " | ".join(name.rjust(width) for name, width in heads) + " |")
            print(
                "|"
                + "|".join("-" * (width + (2 if i else 1)) for i, (_, width) in enumerate(heads))
                + "|",
                flush=True,
            )
        for row in sweep(
            model,
            args.ctx_size,
            tg=args.n_predict,
            stride=args.sweep_stride,
            first_repetitions=args.n_repetitions,
            warmup=not args.no_warmup,
        ):
            memory = (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                (_device_bytes(device) - before) / 2**20,
            )
            memory = memory if args.sweep_memory else ()
            fields = about | _fields(row) | dict(zip(("rss_hwm_mib", "vram_delta_mib"), memory))
            print(
                _line(row, memory) if args.output_format == "md" else json.dumps(fields), flush=True
            )
    return 0


def _line(row: Row, memory: tuple[float, ...]) -> str:
    cells = [f"{row.pp:6d}", f"{row.tg:6d}", f"{row.n_kv:6d}"]
    cells += [
        f"{x:8.{digits}f}"
        for x, digits in ((row.t_pp, 3), (row.speed_pp, 2), (row.t_tg, 3), (row.speed_tg, 2))
    ]
    return (
        "|"
        + " | ".join(cells + [f"{x:{width}.1f}" for x, (_, width) in zip(memory, _MEMORY_HEADS)])
        + " |"
    )


def _fields(row: Row) -> dict[str, float]:
    return {
        "pp": row.pp,
        "tg": row.tg,
        "n_kv": row.n_kv,
        "t_pp": row.t_pp,
        "speed_pp": row.speed_pp,
        "t_tg": row.t_tg,
        "speed_tg": row.speed_tg,
    }


def _device_bytes(device) -> int:
    """Memory of the device that is taken, by whomever."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
