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
which changes no byte; with `--only-gpus` there alone. Models are run on the devices, each by
`--judges` processes.
"""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path

from rounding_quality.run import run
from rounding_quality.tables import in_turns, print_tables
from rounding_quality.tasks import Settings

SOURCES = ("argparse", "asyncio.base_events", "dataclasses", "decimal", "difflib", "inspect")
SOURCES += ("pathlib", "subprocess", "tarfile", "typing", "unittest.mock", "zipfile")


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
    parser.add_argument(
        "--only-gpus", action="store_true", help="leave rounding to GPUs where they have kernels"
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
    for library in ("OMP", "OPENBLAS", "MKL"):  # of each of dozens of processes
        os.environ.setdefault(f"{library}_NUM_THREADS", "2")
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
        only_gpus=args.only_gpus,
        devices=args.device.split(","),
    )
    run(args.models, args.types or in_turns(), settings)
    print_tables([settings.work / Path(model).stem for model in args.models])


if __name__ == "__main__":
    main()
