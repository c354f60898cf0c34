"""Format the lines that commands print: of a tensor, of totals, of an estimate."""

from __future__ import annotations

from pathlib import Path

from ...errors import printable
from ...formats.source import TensorInfo
from ..run.report import Checked, RunReport, TensorReport
from ..run.workload import RunEstimate

MIB = 1 << 20


def written_files(out: str, report: RunReport) -> str:
    """Return the user's name of an output; where it has shards, the first file that is written and
    the number of the others.
    """
    first, *others = report.files or (out,)
    if Path(first) == Path(out):
        return printable(out)
    return printable(first) + (f" and {len(others)} more" if others else "")


def print_totals(out: str, report: RunReport) -> None:
    """Print the sizes of one output, and warnings about it."""
    print(f"\nmodel size  = {report.source_bytes / MIB:8.2f} MiB")
    print(
        f"quant size  = {report.target_bytes / MIB:8.2f} MiB ({report.bits_per_weight:.2f} BPW):"
        f" {written_files(out, report)}"
    )
    if report.replaced:
        print(
            f"warning: {report.replaced} of {len(report.tensors)} tensor(s) required fallback"
            " quantization"
        )
    if zeroed := sum(t.zeroed for t in report.tensors):
        print(
            f"warning: {zeroed} NaN or infinite value(s) in"
            f" {sum(t.zeroed > 0 for t in report.tensors)} tensor(s) were set to 0"
        )


def print_estimate(estimate: RunEstimate | None, choosing: float = 0.0) -> None:
    """Print the estimate of a run. choosing: seconds that it took to choose types for a size, which
    the run takes again.
    """
    if estimate is None:
        return
    for disk in estimate.disks:
        free = f", {disk.free / MIB:.2f} MiB are free" if disk.free >= 0 else ""
        print(f"disk        = {disk.needed / MIB:8.2f} MiB in {printable(disk.folder)}{free}")
        if not disk.fits:
            print(
                f"warning: {(disk.needed - disk.free) / MIB:.2f} MiB too few are free in"
                f" {printable(disk.folder)}"
            )
    print(f"peak memory = {estimate.peak_bytes / MIB:8.2f} MiB (estimated)")
    work = "the disk" if estimate.disk_bound else "quantizing"
    types = f"choosing types {choosing:.2f}, " if choosing else ""
    print(
        f"time        = {choosing + estimate.seconds:8.2f} s (estimated: {types}preparing"
        f" {estimate.setup:.2f}, loading code {estimate.loading:.2f}, {work}"
        f" {estimate.working:.2f}, finishing {estimate.finishing:.2f})"
    )


def place_of(index: int, count: int, tensor: TensorInfo) -> str:
    """Return the beginning of a tensor's line: its number, name, shape and type."""
    dims = [*reversed(tensor.shape), 1, 1, 1][:4]
    return (
        f"[{index + 1:4d}/{count:4d}] {printable(tensor.name):>36s} -"
        f" [{', '.join(f'{d:5d}' for d in dims)}], type = {tensor.type.type_name:>6s}, "
    )


def tensor_line(index: int, count: int, report: TensorReport) -> str:
    """Return the line of tensor number `index` of `count`: shape (fastest first), types, sizes in
    MiB, relative errors.
    """
    source, target = report.planned.source, report.planned.target
    line = place_of(index, count, source)
    if report.planned.kept:
        return line + f"size = {source.n_bytes / MIB:8.3f} MiB"
    line += (
        f"converting to {target.type.type_name} .. size = {source.n_bytes / MIB:8.2f} MiB ->"
        f" {target.n_bytes / MIB:8.2f} MiB"
    )
    if report.rmse is not None:
        line += f", rel. rmse = {report.rmse:.5f}"
        line += f", weighted = {report.weighted_rmse:.5f}" if report.weighted else ", no importance"
    if report.zeroed:
        line += f", {report.zeroed} non-finite set to 0"
    return line + (f" ({report.planned.note})" if report.planned.note else "")


def checked_line(index: int, count: int, checked: Checked) -> str:
    """Return the line of tensor number `index` of `count`: its fault, or its errors."""
    line, report = place_of(index, count, checked.tensor), checked.report
    if checked.fault:
        return f"{line}FAULT: {printable(checked.fault)}"
    if report is None or report.rmse is None:
        return line + "the source's bytes"
    weighted = f", weighted = {report.weighted_rmse:.5f}" if report.weighted else ""
    return line + f"rel. rmse = {report.rmse:.5f}{weighted}, largest = {report.largest_error:.5g}"
