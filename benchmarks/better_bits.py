"""Measure what rounding with second moments gains over the search with an importance matrix.

    python benchmarks/better_bits.py --write-texts DIR
    python benchmarks/better_bits.py MODEL.gguf --work DIR --text TEXT [--text TEXT ...]
        [--calibrate default] [--type T ...] [--chunks 60] [--jobs 4] [--device cuda:0,cuda:1]
    python benchmarks/better_bits.py --table DIR [DIR ...]

The first command writes texts that the default calibration lacks: Python's help topics, those whose
name has a CRC-32 divisible by 5 (`topics-test.txt`) apart from the others (`topics.txt`), source of
its standard library (`source.txt`), and numpy's docstrings (`numpy.txt`). The second one collects
second moments from the calibration texts, writes every type (with --pure; or `mix:IQ3_K` for the
mix of that name, or `bpw:3.5` for --target-bpw) with the importance matrix of the same texts (their
diagonal) and with the second moments, token embeddings and output at Q8_0, and compares both with
MODEL on each text. Every figure is appended to DIR/results.jsonl; a run that is started again
measures what is missing. Without --type one type of every family comes first. The third one prints
tables of one or several such folders, by type and by family: ratios below 1 are gains.

Types are tried and judged on the devices in turn, `--jobs` at a time. `--round-on` says where they
are rounded: the bytes are those of the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import iqforge
from iqforge.formats.types import TYPES
from iqforge.quantize.rounding.methods import UNGUIDED

MIXES = [
    "mix:IQ4_K",
    "bpw:3",
    "mix:Q4_K_M",
    "mix:IQ2_K",
    "mix:IQ3_K",
    "bpw:2.5",
    "bpw:3.5",
    "bpw:4",
]
# Types whose gains are given as one figure. All others form the last family.
FAMILIES = {
    "2 and 3 bits": ["IQ3_K", "Q2_K", "IQ2_KS", "IQ2_K", "IQ2_KL", "IQ3_KS", "Q3_K"],
    "4 and 5 bits": ["IQ4_K", "Q4_K", "IQ4_KS", "IQ4_XS", "IQ4_NL", "IQ5_K", "IQ5_KS", "Q5_K"]
    + ["IQ4_KSS"],
    "trellis": ["IQ2_KT", "IQ4_KT", "IQ3_KT", "IQ1_KT"],
    "grids": ["IQ2_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_S", "IQ1_S", "IQ1_M"],
    "mixes and targets": MIXES,
}
OTHERS = "others"
SOURCES = ("argparse", "asyncio.base_events", "dataclasses", "decimal", "difflib", "inspect")
SOURCES += ("pathlib", "subprocess", "tarfile", "typing", "unittest.mock", "zipfile")


def families() -> dict[str, list[str]]:
    """Return the plain types that second moments guide, and mixes, by family."""
    types = [t for t in TYPES.values() if t.is_quantized and t.base is None]
    types.sort(key=lambda t: -t.bits_per_weight)
    known = {name for names in FAMILIES.values() for name in names}
    rest = [t.name for t in types if t.name not in UNGUIDED and t.name not in known]
    return FAMILIES | {OTHERS: rest}


def in_turns() -> list[str]:
    """Return all types and mixes: the first of every family, then the second of each, and so on."""
    by_turn = itertools.zip_longest(*families().values())
    return [name for turn in by_turn for name in turn if name is not None]


def main() -> None:
    """Write the texts, measure, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--write-texts", metavar="DIR")
    parser.add_argument("--table", nargs="+", metavar="DIR")
    parser.add_argument("--calibrate", action="append", metavar="TEXT")
    parser.add_argument("--text", action="append", default=[], metavar="TEXT")
    parser.add_argument("--work", metavar="DIR")
    parser.add_argument("--type", action="append", dest="types")
    parser.add_argument("--shrink", type=float, help="instead of choosing it for each role")
    parser.add_argument("--calibration-chunks", type=int, default=-1, metavar="N")
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="types at a time")
    parser.add_argument("--threads", type=int, default=0, help="of each (default: cores by jobs)")
    parser.add_argument("--device", default="cpu", help="that evaluates the models, or several")
    parser.add_argument(
        "--round-on", default="cpu", metavar="DEVICE", help="auto: that of --device"
    )
    args = parser.parse_args()
    if args.write_texts:
        write_texts(Path(args.write_texts))
    elif args.table:
        print_tables([Path(folder) for folder in args.table])
    elif args.model and args.text and args.work:
        measure(args)
    else:
        parser.error("MODEL, --text and --work are needed, or --write-texts, or --table")


def write_texts(folder: Path) -> None:
    """Write `topics.txt`, `topics-test.txt`, `source.txt` and `numpy.txt`."""
    import importlib
    import inspect
    from pydoc_data.topics import topics

    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    held_out = {name for name in topics if zlib.crc32(name.encode()) % 5 == 0}
    for file, names in (("topics.txt", topics.keys() - held_out), ("topics-test.txt", held_out)):
        (folder / file).write_text("\n".join(topics[name] for name in sorted(names)))
    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)
    (folder / "source.txt").write_text(text)
    pages = {inspect.getdoc(getattr(np, name, None)) or "" for name in sorted(np.__all__)}
    (folder / "numpy.txt").write_text("\n\n".join(sorted(pages)))


def measure(args: argparse.Namespace) -> None:
    """Append to the results what they lack, and print the table."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    hessian = work / "hessian.safetensors"
    started = time.monotonic()
    devices = args.device.split(",")
    if not hessian.exists():
        iqforge.collect_hessian(
            args.model,
            args.calibrate or ["default"],
            hessian,
            chunks=args.calibration_chunks,
            device=devices[0],
            precision="f32",
        )
    for text in args.text:
        base = base_of(work, text)
        if not base.exists():
            iqforge.measure_perplexity(
                args.model,
                text,
                chunks=args.chunks,
                kl_divergence_base=base,
                device=devices[0],
                precision="f32",
            )
    print(f"collected and evaluated in {time.monotonic() - started:.1f} s", flush=True)
    done = {(one["type"], one["guide"]) for one in read_results(work)}
    wanted = [
        (name, guide) for name in args.types or in_turns() for guide in ("imatrix", "hessian")
    ]
    wanted = [one for one in wanted if one not in done]
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.jobs)
    keywords = [
        {
            "shrink": args.shrink,
            "device": device,
            "round_on": device if args.round_on == "auto" else args.round_on,
            "threads": threads,
        }
        for device in devices
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        given = [
            (args.model, str(work), args.text, name, guide, keywords[i % len(devices)])
            for i, (name, guide) in enumerate(wanted)
        ]
        for future in as_completed([pool.submit(one_result, *one) for one in given]):
            result = future.result()
            with open(work / "results.jsonl", "a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    print_tables([work])


def base_of(work: Path, text: str) -> Path:
    return work / f"base-{Path(text).stem}.kld"


def one_result(
    model: str, folder: str, texts: list[str], name: str, guide: str, how: dict[str, Any]
) -> dict[str, Any]:
    """Quantize MODEL, and return its KL divergences and top-token agreement by text."""
    work = Path(folder)
    out = work / f"{name.replace(':', '-')}-{guide}.gguf"
    keywords: dict[str, Any] = {guide: work / "hessian.safetensors"}
    if guide == "hessian":
        keywords["hessian_shrink"] = how["shrink"]
    started = time.monotonic()
    recipe: Any = name
    fixed = {"token_embedding_type": "q8_0", "output_tensor_type": "q8_0"}
    if name.startswith("bpw:"):
        bpw = float(name.removeprefix("bpw:"))
        of_target = keywords if guide == "hessian" else {"imatrix": keywords["imatrix"]}
        recipe = iqforge.recipe_for_target(
            model, bpw=bpw, threads=how["threads"], **fixed, **of_target
        ).recipe
    elif name.startswith("mix:"):
        recipe = name.removeprefix("mix:")
        keywords |= fixed
    else:
        keywords |= fixed | {"pure": True}
    iqforge.quantize_model(
        model, out, recipe, device=how["round_on"], threads=how["threads"], restart=True, **keywords
    )
    result: dict[str, Any] = {
        "type": name,
        "guide": guide,
        "seconds": round(time.monotonic() - started, 1),
        "size": os.path.getsize(out),
        "kld": {},
        "top": {},
    }
    for text in texts:
        found: Any = iqforge.measure_perplexity(
            out,
            None,
            kl_divergence_base=base_of(work, text),
            kl_divergence=True,
            device=how["device"],
            precision="f32",
            threads=how["threads"],
        )
        stem = Path(text).stem
        result["kld"][stem] = found.mean_kld
        result["top"][stem] = found.statistics.same_top[0]
    out.unlink()
    return result


def read_results(work: Path) -> list[dict[str, Any]]:
    """Return what was measured so far."""
    path = work / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_tables(folders: list[Path]) -> None:
    """Print KL divergences with importances and ratios, by model and type; then means by type."""
    by_type: dict[str, list[float]] = {}
    for work in folders:
        found = {(one["type"], one["guide"]): one for one in read_results(work)}
        names = [name for name, guide in found if guide == "hessian" and (name, "imatrix") in found]
        if not names:
            continue
        texts = list(found[names[0], "hessian"]["kld"])
        print(f"\n{work.name}\n\n| type | " + " | ".join(texts) + " | mean | worst | top | s |")
        print("|---" * (len(texts) + 5) + "|")
        for name in names:
            before, after = found[name, "imatrix"], found[name, "hessian"]
            ratios = [after["kld"][text] / before["kld"][text] for text in texts]
            cells = [
                f"{before['kld'][text]:.5f} x {r:.3f}"
                for text, r in zip(texts, ratios, strict=True)
            ]
            top = sum(after["top"][text] - before["top"][text] for text in texts) / len(texts)
            cells += [f"{mean(ratios):.3f}", f"{max(ratios):.3f}", f"{100 * top:+.2f} %"]
            print(f"| {name} | " + " | ".join(cells) + f" | {after['seconds']} |")
            by_type.setdefault(name, []).extend(ratios)
    print_means("type", by_type)
    print_means("family", by_family(by_type))


def by_family(by_type: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the ratios of each family that has any."""
    found: dict[str, list[float]] = {}
    for family, names in families().items():
        for name in names:
            if name in by_type:
                found.setdefault(family, []).extend(by_type[name])
    return found


def print_means(what: str, by_name: dict[str, list[float]]) -> None:
    """Print a line for each name, and one for all."""
    print(f"\n| {what} | figures | geometric mean | worst |\n|---|---|---|---|")
    for name, ratios in by_name.items():
        print(f"| {name} | {len(ratios)} | x {mean(ratios):.3f} | x {max(ratios):.3f} |")
    if everything := [r for ratios in by_name.values() for r in ratios]:
        print(f"| all | {len(everything)} | x {mean(everything):.3f} | x {max(everything):.3f} |")


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


if __name__ == "__main__":
    main()
