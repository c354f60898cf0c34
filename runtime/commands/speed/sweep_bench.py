"""`iqforge sweep-bench`: speed of prompts and of generation as the context fills, like the tool of
this name in ik_llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import resource
from typing import TYPE_CHECKING

from ....errors import UsageError
from ...bench.options import SweepOptions
from ..watch import Runs, watched
from .bench import add_model_flags, add_setting_flags
from .settings import only_setting, open_model

if TYPE_CHECKING:
    import torch

    from ...bench.sweep import SweepRow

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge sweep-bench` to its parser."""
    parser.description = (
        "For every -ub tokens of context, generate -n tokens, then evaluate a prompt of -ub tokens,"
        " which stays in the context. Each line shows both speeds at that depth."
    )
    add_model_flags(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=4096,
        metavar="N",
        help="depth to go to; 0: what the model was trained for (default: 4096)",
    )
    SweepOptions.add_flags(parser)
    parser.add_argument(
        "--sweep-memory",
        action="store_true",
        help="show peak resident memory and growth of device memory, MiB",
    )
    # The warm-up is a whole batch anyway.
    parser.add_argument("-wb", "--warmup-batch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output-format",
        choices=("md", "jsonl"),
        default="md",
        help="a table or JSON lines (default: md)",
    )
    add_setting_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Measure and print a row per depth. Return 0. Raise UsageError for a context below 0."""
    from ...bench.sweep import positions

    options = SweepOptions.from_flags(args)
    if args.ctx_size < 0:
        raise UsageError(f"-c is {args.ctx_size}, expected 0 or more")
    device, setting = only_setting(args, "a sweep")
    name = args.model or args.synthetic
    n_ctx = args.ctx_size or _trained_context(api, name, args.model is None)
    about = {
        "n_kv_max": n_ctx,
        "n_batch": setting["n_batch"],
        "n_ubatch": setting["n_ubatch"],
        "flash_attn": int(setting["flash_attn"]),
        "n_gpu_layers": setting["n_gpu_layers"] if device.type == "cuda" else 0,
        "n_threads": setting["n_threads"],
        "n_threads_batch": setting["n_threads"],
    }
    context = positions(n_ctx, setting["n_ubatch"], options.tg)
    with open_model(
        api,
        name,
        args.model is None,
        device,
        setting,
        context=context,
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
        with watched(model, f"{name}: sweep", _passes(options, n_ctx, model.ubatch)):
            for row in api.sweep_model(model, n_ctx, options=options):
                memory = (
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                    (_device_bytes(device) - before) / 2**20,
                )
                memory = memory if args.sweep_memory else ()
                fields = about | _fields(row) | dict(zip(("rss_hwm_mib", "vram_delta_mib"), memory))
                line = _line(row, memory) if args.output_format == "md" else json.dumps(fields)
                print(line, flush=True)
    return 0


def _trained_context(api, name: str, synthetic: bool) -> int:
    """Return the tokens that a model was trained for. ConfigError if its file does not say that."""
    from ...weights.hyperparameters import Hyperparameters

    with (api.random_source if synthetic else api.open_source)(name) as source:
        return Hyperparameters(source.metadata, str(source.path)).integer("context_length")


def _passes(options: SweepOptions, n_ctx: int, ubatch: int) -> Runs:
    """Return the passes of a sweep, in order."""
    tg = options.tg or max(1, ubatch // 4)
    warm = [(ubatch, 1), (1, min(tg, 4))] if options.warmup else []
    rows = -(-n_ctx // ubatch) + options.first_repetitions - 1
    return warm + [(1, tg), (ubatch, 1)] * min(rows, 10000)


def _line(row: SweepRow, memory: tuple[float, ...]) -> str:
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


def _fields(row: SweepRow) -> dict[str, float]:
    return {
        "pp": row.pp,
        "tg": row.tg,
        "n_kv": row.n_kv,
        "t_pp": row.t_pp,
        "speed_pp": row.speed_pp,
        "t_tg": row.t_tg,
        "speed_tg": row.speed_tg,
    }


def _device_bytes(device: torch.device) -> int:
    """Return the memory of the device that is in use, by any process."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
