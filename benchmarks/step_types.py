"""Speed with every type: 128 generated tokens from an empty context, or prompts of 2048 tokens, on
random weights of real shapes.

    python benchmarks/step_types.py --json steps.jsonl
    python benchmarks/step_types.py --json steps.jsonl --prompts
    python benchmarks/step_types.py --shape qwen3-30b-a3b --type IQ3_K Q4_K
    python benchmarks/step_types.py --json steps.jsonl --table

Without --type, every type that is packed on a device is measured: interleaved types whose packed
rows are those of their plain type need no row. First the types' kernels are compiled by several
processes. --json appends every figure to a file as soon as it is measured and does not measure it
again; --table prints the newest figures of that file and measures nothing. Prints Markdown:
tokens/s and the share of the limit, which is what the bytes of a token take at the rate of a
large copy (`copy_rate.py`; 4.3 TB/s on an H200), or the device's FLOP rate.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor

import torch
from copy_rate import copy_rate
from cuda_runtime import Figures, code, say


def product_specs(shape_name: str, type_name: str, device: int) -> list:
    """The products of a step that depend on the type."""
    from iqforge.cuda_kernels.matvec import plan as mp
    from iqforge.cuda_kernels.matvec.specs import product_spec
    from iqforge.formats.types import ggml_type
    from iqforge.runtime.bench.shapes import SHAPES

    s, type, here = SHAPES[shape_name], ggml_type(type_name), mp.limits(device)
    between = not type.is_float  # bf16 between gate and up, and down
    wanted = [
        (mp.NORM_MATVEC, s.width, 1, [s.n_heads * s.head, *2 * [s.n_kv_heads * s.head]], False),
        (mp.MATVEC_ADD, s.n_heads * s.head, 1, [s.width], False),
    ]
    if s.n_experts:
        wanted += [
            (mp.EXPERT_GATE_UP, s.width, 1, [s.hidden], False),
            (mp.EXPERT_DOWN, s.hidden, s.n_used, [s.width], False),
        ]
    else:
        wanted += [
            (mp.GATE_UP, s.width, 1, [s.hidden], between),
            (mp.MATVEC_ADD, s.hidden, 1, [s.width], between),
        ]
    return [
        product_spec(type, cols, n, kind, here.plan(type, cols, n, kind, rows), len(rows), bf16)
        for kind, cols, n, rows, bf16 in wanted
    ]


def prompt_specs(shape_name: str, type_name: str) -> list:
    """The kernels of a prompt that depend on the type."""
    from iqforge.cuda_kernels.packed.decode import dequantize_spec
    from iqforge.cuda_kernels.prompt import grouped as prompt_grouped
    from iqforge.formats.types import ggml_type
    from iqforge.runtime.bench.shapes import SHAPES

    type = ggml_type(type_name)
    if SHAPES[shape_name].n_experts:
        grouped = [
            prompt_grouped.spec(type, torch.bfloat16, small=small) for small in (False, True)
        ]
        return [dequantize_spec(type), *grouped]
    return [dequantize_spec(type)]


def compile_one(job: tuple) -> None:
    """Compile one kernel into the cache."""
    from iqforge.cuda_kernels.compile.nvrtc import compile_spec

    compile_spec(*job)


def compile_all(rows: list[tuple[str, str]], device: torch.device, prompts: bool) -> None:
    """Compile the kernels of all rows into the cache, on all cores."""
    from iqforge.cuda_kernels.compile.launch import architecture, device_index

    index = device_index(device)
    jobs = {
        (spec, architecture(index))
        for row in rows
        for spec in (prompt_specs(*row) if prompts else product_specs(*row, device=index))
    }
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs))


def measure(name: str, args: argparse.Namespace, device: torch.device, figures: Figures) -> None:
    """Measure the generation of one row, or its prompt."""
    import iqforge.api
    from iqforge.runtime.bench.bench import Test, run_test
    from iqforge.runtime.commands.speed.flags import OPTIONS
    from iqforge.runtime.commands.speed.settings import open_model
    from iqforge.runtime.cuda.common.device_facts import device_facts

    test = Test(n_prompt=args.n_prompt) if args.prompts else Test(n_gen=args.n_gen)
    setting = {option.field: option.default for option in OPTIONS} | {"precision": args.precision}
    if args.prompts:
        setting["n_ubatch"] = args.n_prompt
    with open_model(iqforge.api, name, True, device, setting, context=test.n_ctx) as model:
        result = run_test(model, test, repetitions=args.repetitions)
    speed = sum(result.samples_ts) / len(result.samples_ts)
    rate, most = result.bytes_per_second, copy_rate()
    if args.prompts:
        rate, most = result.flop_per_second, device_facts(device).bf16_rate
    limit = most * speed / rate if rate and most else None
    figures.add(name, args.test, samples_ts=result.samples_ts, limit_ts=limit)


def line(name: str, test: str, figures: Figures) -> str:
    """Return the line of one row of the table."""
    from iqforge.runtime.bench.bench import deviation, mean

    found = figures.known.get((name, test))
    if not found:
        return f"| {name} | - | - | - |"
    speed, limit = mean(found["samples_ts"]), found["limit_ts"]
    share = f"{100 * speed / limit:.0f} %" if limit else "-"
    return (
        f"| {name} | {f'{limit:,.0f}' if limit else '-'} |"
        f" {speed:,.1f} ± {deviation(found['samples_ts']):.1f} | {share} |"
    )


def main() -> int:
    """Measure the rows that were asked for, and print the table."""
    from iqforge.cuda_kernels.layouts.table import packed_types
    from iqforge.formats.types import ggml_type
    from iqforge.runtime.bench.random_blocks import supported
    from iqforge.runtime.weights.devices import usable_device

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["llama-8b", "qwen3-30b-a3b"])
    parser.add_argument("--type", nargs="+")
    parser.add_argument("--json", metavar="FILE", help="where figures are kept")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the figures")
    parser.add_argument("--prompts", action="store_true", help="measure prompts, not generation")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("-p", "--n-prompt", type=int, default=2048)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    args.test = "pp" if args.prompts else "tg"
    types = args.type or [
        name
        for name in packed_types()
        if supported(ggml_type(name)) and ggml_type(name).name != "F32"
    ]
    rows = [(shape, name) for shape in args.shape for name in types]
    length = {"n_prompt": args.n_prompt} if args.prompts else {"n_gen": args.n_gen}
    about, device = {"precision": args.precision} | length, torch.device("cpu")
    if not args.table:
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise SystemExit("no CUDA device found")
        device = usable_device(args.device)
        on_gpu = device.type == "cuda"
        about |= {
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "code": code(),
        }
        if on_gpu:
            compile_all(rows, device, args.prompts)
            say("compiled")
    figures, failed = Figures(args.json, about), 0
    print("| shape, type | limit | tokens/s | share |\n| --- | --- | --- | --- |", flush=True)
    for row in rows:
        name = ":".join(row)
        try:
            if not args.table and (name, args.test) not in figures.known:
                measure(name, args, device, figures)
        except Exception:  # the other rows are worth having
            failed += 1
            traceback.print_exc()
        print(line(name, args.test, figures), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
