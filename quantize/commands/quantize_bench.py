"""`iqforge quantize-bench`, also `python -m iqforge.quantize.commands.quantize_bench`: how fast
each type is quantized, and how well.

On a GPU the weights are resident and only the search is timed, by the device's own clock; on the
CPU the whole call is. The first run, which compiles, is not counted. The bytes of a GPU are
compared with the CPU's on the first and last rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

from ...errors import IqforgeError, MalformedFileError, NotFoundError, UsageError

# What a row of the output holds: (key in --json, heading, format)
_COLUMNS = [
    ("type", "type", "{}"),
    ("speed", "M elements/s", "{:.2f}"),
    ("whole", "whole call", "{:.2f}"),
    ("same_bytes", "same bytes as cpu", "{}"),
    ("table", "reference table", "{:.2f}"),
    ("table_ratio", "ratio", "{:.2f}"),
    ("reference", "reference library", "{:.2f}"),
    ("ratio", "ratio", "{:.2f}"),
    ("error", "error", "{:.5f}"),
    ("reference_error", "reference error", "{:.5f}"),
    ("error_ratio", "ratio", "{:.3f}"),
]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "How fast rows are quantized to each type, and with what error, on sample rows like a"
        " model's weights."
    )
    parser.add_argument(
        "--type",
        nargs="+",
        metavar="T",
        help=(
            "types to time (default: all that have a search; `all`: also those that "
            "only interleave the rows of another, and F16 and BF16)"
        ),
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--rows", type=int, default=4096, help="on the CPU at most (default 4096)")
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--threads", type=int, default=1, help="on the CPU (default 1)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=5,
        help="timed runs: on a GPU the median counts, on the CPU the best",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.2,
        help="on the CPU, about how long a run takes (default 0.2)",
    )
    parser.add_argument(
        "--check-rows",
        type=int,
        default=64,
        help="rows at either end whose bytes are compared with the CPU's",
    )
    parser.add_argument("--no-importance", action="store_true", help="weigh all columns alike")
    parser.add_argument(
        "--reference-speeds",
        metavar="FILE",
        help='JSON with million elements per second: {"melem_per_s": {TYPE: number}}',
    )
    parser.add_argument(
        "--reference-library",
        metavar="PATH",
        help=(
            "libggml*.so of ik_llama.cpp or llama.cpp, whose quantizers run on the same rows in"
            " turn with ours (CPU)"
        ),
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--md", action="store_true", help="as a Markdown table")
    form.add_argument("--json", action="store_true", help="as JSON: a list of objects")


def run(args: argparse.Namespace, api=None) -> int:
    rows = []
    for row in measured_rows(args):
        rows.append(row)
        if args.md:
            print("\n".join(markdown(rows).splitlines()[0 if len(rows) == 1 else -1 :]), flush=True)
        elif not args.json:
            if len(rows) == 1:
                columns = [column for column in _COLUMNS if column[0] in row]
                print("  ".join(f"{heading:>12s}" for _, heading, _ in columns))
            print(
                "  ".join(
                    f"{_shown(row, key, form):>{max(12, len(heading))}s}"
                    for key, heading, form in columns
                ),
                flush=True,
            )
    if args.json:
        print(json.dumps(rows, indent=1))
    return 1 if any(row.get("same_bytes") is False for row in rows) else 0


def measured_rows(args: argparse.Namespace) -> Iterator[dict]:
    """One row per type as it is measured, with those keys of `_COLUMNS` that the arguments ask for;
    speeds in million elements per second, None where there is nothing to compare with. UsageError
    for arguments that cannot be used.
    """
    if (
        min(args.rows, args.cols, args.threads, args.repeat, args.check_rows) < 1
        or not args.seconds > 0
    ):
        raise UsageError(
            "--rows, --cols, --threads, --repeat, --check-rows and --seconds take numbers above 0"
        )
    if args.reference_library and args.device != "cpu":
        raise UsageError("--reference-library runs on the CPU, beside --device cpu")
    from ..report.reference_library import ReferenceLibrary
    from ..report.timing import measure, measure_on_cpu, sample_rows

    table = read_speeds(args.reference_speeds) if args.reference_speeds else None
    library = ReferenceLibrary(args.reference_library) if args.reference_library else None
    x, importance = sample_rows(args.rows, args.cols)
    importance = None if args.no_importance else importance
    for type in _types(args.type):
        if args.device == "cpu":
            timing = measure_on_cpu(
                type,
                x,
                importance,
                library,
                threads=args.threads,
                repeat=args.repeat,
                seconds=args.seconds,
            )
            row = {"type": timing.type, "speed": timing.search / 1e6}
        else:
            timing = measure(
                type, x, importance, args.device, args.threads, args.repeat, args.check_rows
            )
            row = {
                "type": timing.type,
                "speed": timing.search / 1e6,
                "whole": timing.whole / 1e6,
                "same_bytes": timing.same_bytes,
            }
        if table is not None:
            known = table.get(timing.type)
            row |= {"table": known, "table_ratio": row["speed"] / known if known else None}
        if library is not None:
            known = timing.reference / 1e6 if timing.reference else None
            row |= {"reference": known, "ratio": row["speed"] / known if known else None}
        row["error"] = timing.error
        if library is not None:
            known = timing.reference_error
            row |= {
                "reference_error": known,
                "error_ratio": timing.error / known if known else None,
            }
        yield row


def _types(asked: list[str] | None) -> list:
    from ...formats.types import TYPES, ggml_type
    from ..encode import encodable_types

    if asked and asked != ["all"]:
        return [ggml_type(name) for name in asked]
    types = [ggml_type(name) for name in encodable_types() if name in TYPES and name != "F32"]
    return types if asked else [type for type in types if type.is_quantized and not type.base]


def read_speeds(path: str | os.PathLike) -> dict[str, float]:
    """Million elements per second by type name. NotFoundError, MalformedFileError."""
    try:
        with open(path, encoding="utf-8") as file:
            speeds = json.load(file)["melem_per_s"]
        return {name: float(speed) for name, speed in speeds.items()}
    except OSError as error:
        raise NotFoundError(error.strerror or "cannot be read", file=path) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedFileError(
            'not a table of speeds: {"melem_per_s": {TYPE: number}}', file=path
        ) from None


def markdown(rows: list[dict]) -> str:
    columns = [column for column in _COLUMNS if rows and column[0] in rows[0]]
    lines = [
        "| " + " | ".join(heading for _, heading, _ in columns) + " |",
        "| --- |" + " ---: |" * (len(columns) - 1),
    ]
    lines += [
        "| " + " | ".join(_shown(row, key, form) for key, _, form in columns) + " |" for row in rows
    ]
    return "\n".join(lines)


def _shown(row: dict, key: str, form: str) -> str:
    value = row.get(key)
    return (
        {True: "yes", False: "NO"}[value]
        if isinstance(value, bool)
        else ""
        if value is None
        else form.format(value)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m iqforge.quantize.commands.quantize_bench")
    configure(parser)
    try:
        return run(parser.parse_args(argv))
    except IqforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
