"""Measure what rounding with second moments gains over the search with an importance matrix.

    python benchmarks/better_bits.py --write-texts DIR
    python benchmarks/better_bits.py MODEL.gguf [MODEL.gguf ...] --work DIR --text TEXT [--text ...]
        [--calibrate default] [--type T ...] [--chunks 60] [--jobs 32] [--device cuda:0,cuda:1]
    python benchmarks/better_bits.py --table DIR [DIR ...]

The first command writes texts that the default calibration lacks: Python's help topics, those whose
name has a CRC-32 divisible by 5 (`topics-test.txt`) apart from the others (`topics.txt`), source of
its standard library (`source.txt`), and numpy's docstrings (`numpy.txt`). The second one collects
second moments from the calibration texts, writes every type (with --pure; or `mix:IQ3_K` for the
mix of that name, or `bpw:3.5` for --target-bpw) with the importance matrix of the same texts (their
diagonal) and with the second moments, token embeddings and output at Q8_0, and compares both with
the model on each text. Every figure is appended to DIR/MODEL/results.jsonl at once; a run that is
started again measures what is missing. Without --type it measures every type, mix and target. The
third one prints tables of one or several folders DIR/MODEL, by type and by family: ratios below 1
are gains.

Types are rounded on the CPU, `--jobs` cores at a time, and with `--round-jobs` also on the GPUs,
which changes no byte. Models are run on the devices, each by `--judges` processes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import zlib
from pathlib import Path

from better_bits_run import Settings, read_results, run
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
    parser.add_argument("models", nargs="*")
    parser.add_argument("--write-texts", metavar="DIR")
    parser.add_argument("--table", nargs="+", metavar="DIR")
    parser.add_argument("--calibrate", action="append", metavar="TEXT")
    parser.add_argument("--text", action="append", default=[], metavar="TEXT")
    parser.add_argument("--work", metavar="DIR")
    parser.add_argument("--type", action="append", dest="types")
    parser.add_argument("--shrink", type=float, help="instead of choosing it for each role")
    parser.add_argument("--calibration-chunks", type=int, default=-1, metavar="N")
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=100, help="items with endings, of each text")
    parser.add_argument("--jobs", type=int, default=0, help="cores that quantize (default: all)")
    parser.add_argument("--judges", type=int, default=1, help="processes that judge each model")
    parser.add_argument(
        "--round-jobs", type=int, default=0, help="processes that round on each GPU"
    )
    parser.add_argument("--device", default="cpu", help="that collects and judges, or several")
    args = parser.parse_args()
    if args.write_texts:
        write_texts(Path(args.write_texts))
    elif args.table:
        print_tables([Path(folder) for folder in args.table])
    elif args.models and args.text and args.work:
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
    """Append to the results what they lack, and print the tables."""
    settings = Settings(
        work=Path(args.work),
        texts=args.text,
        calibrate=args.calibrate or ["default"],
        calibration_chunks=args.calibration_chunks,
        chunks=args.chunks,
        tasks=args.tasks,
        shrink=args.shrink,
        jobs=args.jobs or os.cpu_count() or 1,
        judges=args.judges,
        round_jobs=args.round_jobs,
        devices=args.device.split(","),
    )
    run(args.models, args.types or in_turns(), settings)
    print_tables([settings.work / Path(model).stem for model in args.models])


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
