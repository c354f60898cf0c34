"""`iqforge quantize-bench`: measure the speed and error of quantizing to each type. See
`quantize.report.type_bench`.
"""

from __future__ import annotations

import argparse
import json

from ..report.bars import CompileBar
from ..report.type_bench import TypeBenchOptions

# Columns of the output: (key in --json, heading, format)
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
    """Add the flags of `iqforge quantize-bench` to its parser."""
    parser.description = (
        "Measure the speed and error of quantizing to each type, on sample rows like a model's"
        " weights."
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
    TypeBenchOptions.add_flags(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--md", action="store_true", help="as a Markdown table")
    form.add_argument("--json", action="store_true", help="as JSON: a list of objects")


def run(args: argparse.Namespace, api) -> int:
    """Time the types and print a row for each as soon as it is measured, or JSON. Return 1 if bytes
    of a GPU are not those of the CPU, else 0.
    """
    rows, columns = [], []
    options = TypeBenchOptions.from_flags(args)
    for row in api.benchmark_types(args.type or (), options=options, progress=CompileBar()):
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


def markdown(rows: list[dict]) -> str:
    """Return results, dictionaries with the keys of `_COLUMNS`, as a table of Markdown. Columns
    that the first row lacks are left out.
    """
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
