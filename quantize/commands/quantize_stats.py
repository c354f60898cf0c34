"""`iqforge quantize-stats`: print the errors of each type on each tensor as a table, JSON or a heat
map.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tqdm import tqdm

from ...errors import printable
from ...formats.commands.progress import Meter
from ...formats.source import TensorInfo
from ..options import StatsOptions
from ..plan.type_errors import ErrorSums, TensorStats
from ..report.bars import CompileBar
from ..report.stats import StatsProgress, StatsReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge quantize-stats` to its parser."""
    parser.usage = "iqforge quantize-stats MODEL [flags]"
    parser.description = (
        "Quantize the tensors of MODEL (a GGUF file, the first shard of a split one, or a"
        " checkpoint folder) to each type, decode them again and print the errors. Nothing is"
        " written except the heat map."
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file or a checkpoint folder")
    parser.add_argument(
        "--type",
        metavar="T",
        nargs="+",
        action="extend",
        default=[],
        help="types to try (default: all plain types that can be quantized to)",
    )
    parser.add_argument(
        "--imatrix",
        metavar="F",
        help="importance matrix, legacy .dat or GGUF: it guides the searches and weighs the errors",
    )
    StatsOptions.add_flags(parser, only=("force", "include", "rows"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--html", metavar="OUT", help="also write a heat map, as a single HTML file"
    )
    StatsOptions.add_flags(parser, only=("device", "threads"), device="auto")


def run(args: argparse.Namespace, api) -> int:
    """Measure and print the errors, write the heat map, and return 0. Raise an error first if the
    heat map cannot be written.
    """
    from ...formats.output import check_output, refuse_same_file

    if args.html:
        refuse_same_file(args.html, [args.model, *([args.imatrix] if args.imatrix else [])])
        check_output(args.html)  # fails before the work, not after it
    printer = StatsPrinter(quiet=args.json)
    try:
        report = api.quantize_stats(
            args.model,
            args.type,
            args.imatrix,
            options=StatsOptions.from_flags(args),
            progress=printer,
        )
    finally:
        printer.close()
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print("\n".join(total_lines(report)))
    if args.html:
        from ...formats.output import PartFile
        from ..report.stats_report import html_report

        refuse_same_file(args.html, report.files)
        with PartFile(args.html) as file:
            file.write(html_report(report).encode(errors="backslashreplace"))
        print(
            f"\nheat map written to {printable(args.html)}",
            file=sys.stderr if args.json else sys.stdout,
        )
    return 0


class StatsPrinter(CompileBar, StatsProgress):
    """Print a block of lines per tensor on stdout, unless `quiet`, and a bar on stderr."""

    def __init__(self, quiet: bool):
        super().__init__()
        self.quiet = quiet
        self.meter = Meter("measuring", unit="el")

    def begin(self, tensors: Sequence[TensorInfo], n_elements: int) -> None:
        """Print the heading, and show a bar of `n_elements` elements."""
        self.meter.begin(n_elements)
        self._write(HEADING)

    def advance(self, n_elements: int) -> None:
        """Move the bar by `n_elements` elements."""
        self.meter(n_elements)

    def tensor_done(self, stats: TensorStats) -> None:
        """Print the lines of a tensor."""
        self._write("\n".join(tensor_lines(stats)))

    def close(self) -> None:
        """Remove the bar."""
        self.meter.close()

    def _write(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text, file=sys.stdout)


HEADING = (
    f"{'type':>12}  {'bits':>7}  {'rmse':>10}  {'rel. rmse':>9}  {'weighted':>9}  {'max error':>10}"
)


def tensor_lines(stats: TensorStats) -> list[str]:
    """Return the tensor's name, shape and type, then a line per type."""
    tensor = stats.tensor
    rows = "" if stats.rows == tensor.n_rows else f", {stats.rows} of {tensor.n_rows} rows"
    first = (
        f"{printable(tensor.name)}  [{', '.join(map(str, reversed(tensor.shape)))}]"
        f" {tensor.type.type_name}{rows}"
    )
    if not stats.errors:
        return [first, "  its rows fit none of the types"]
    return [first, *(error_line(sums, stats.weighted) for sums in stats.errors.values())]


def error_line(sums: ErrorSums, weighted: bool) -> str:
    """Return the figures of one type; relative ones are parts of the source's root mean square."""
    share = f"{sums.weighted_rmse:9.5f}" if weighted else f"{'-':>9}"
    return (
        f"{sums.type.type_name:>12}  {sums.bits_per_weight:7.4f}  {sums.rmse:10.3e} "
        f" {sums.relative_rmse:9.5f}  {share}  {sums.largest_error:10.3e}"
    )


def total_lines(report: StatsReport) -> list[str]:
    """Return the same over all tensors that can have the type, and what was measured."""
    lines = [f"\nall {len(report.tensors)} tensors", HEADING]
    for type in report.types:
        count = sum(type.name in tensor.errors for tensor in report.tensors)
        note = (
            "" if count == len(report.tensors) else f"  ({count} of {len(report.tensors)} tensors)"
        )
        lines.append(
            error_line(report.total(type), report.weighted) + note
            if count
            else f"{type.type_name:>12}  fits no tensor"
        )
    measured, rows = (
        sum(values) for values in zip(*((t.rows, t.tensor.n_rows) for t in report.tensors))
    )
    if measured < rows:
        lines.append(
            f"\na sample: {measured} of {rows} rows, about {report.sampled} of each tensor, evenly"
            " spaced"
        )
    if report.imatrix is not None and not all(tensor.weighted for tensor in report.tensors):
        lines.append(
            f"no importances for {sum(not t.weighted for t in report.tensors)} of"
            f" {len(report.tensors)} tensors; their columns have weight 1"
        )
    return lines
