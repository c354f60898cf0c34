"""What the commands that quantize print: a line per tensor, a bar, totals, and what is estimated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ...errors import printable
from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor
from ..run.report import Checked, RunProgress, RunReport, TensorReport
from ..run.workload import RunEstimate
from .eta import TimeLeft

MIB = 1 << 20
_BAR = (  # the time left is ours: it knows the types to come
    "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
)


def print_totals(out: str, report: RunReport) -> None:
    """Sizes of one output, and what may be wrong with it."""
    print(f"\nmodel size  = {report.source_bytes / MIB:8.2f} MiB")
    print(
        f"quant size  = {report.target_bytes / MIB:8.2f} MiB ({report.bits_per_weight:.2f} BPW):"
        f" {printable(out)}"
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
    """What the run would take, and of what the time is made. choosing: seconds that it took to find
    types for a size, which the run takes again.
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
    if estimate.compiling >= 0.5:
        print(
            f"searches were compiled in {estimate.compiling:.1f} s, which is kept for later runs;"
            " run this again for closer figures"
        )


class Printer(RunProgress):
    """A line per tensor on stdout, a bar with the time left on stderr."""

    def __init__(
        self,
        dry_run: bool = False,
        line: Callable[[int, int, TensorReport], str] | None = None,
        label: str = "",
    ):
        """line: what makes a tensor's line of its index, the number of tensors and its report;
        label: what stands before each line.
        """
        self.dry_run, self.bar, self.count, self.line = dry_run, None, 0, line or tensor_line
        self.planned: list[PlannedTensor] = []
        self.time_left = TimeLeft([])
        self.label = f"{printable(label)}: " if label else ""

    def begin(self, planned: list[PlannedTensor]) -> None:
        from tqdm import tqdm

        self.count, self.planned, self.time_left = len(planned), planned, TimeLeft(planned)
        if not self.dry_run:
            self.bar = tqdm(
                total=sum(p.source.n_elements for p in planned),
                unit="el",
                unit_scale=True,
                leave=False,
                disable=None,
                dynamic_ncols=True,
                desc=self.label.rstrip(": ") or None,
                bar_format=_BAR,
            )

    def resume(self, finished: Sequence[TensorReport]) -> None:
        self.time_left = TimeLeft(self.planned, len(finished))
        if self.bar is not None:
            self.bar.initial = self.bar.n = sum(
                report.planned.source.n_elements for report in finished
            )

    def advance(self, n_elements: int) -> None:
        self.time_left.advance(n_elements)
        if self.bar is not None and not self.bar.disable:
            left = self.time_left.seconds_left()
            self.bar.set_postfix_str(
                "" if left is None else f"{self.bar.format_interval(left)} left", refresh=False
            )
            self.bar.update(n_elements)

    def tensor_done(self, index: int, report: TensorReport) -> None:
        from tqdm import tqdm

        tqdm.write(self.label + self.line(index, self.count, report), file=sys.stdout)

    def validated(self, index: int, checked: Checked) -> None:
        if checked.fault:
            print(self.label + checked_line(index, self.count, checked), flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def place_of(index: int, count: int, tensor: TensorInfo) -> str:
    """How the line of a tensor begins: its number, name, shape and type."""
    dims = [*reversed(tensor.shape), 1, 1, 1][:4]
    return (
        f"[{index + 1:4d}/{count:4d}] {printable(tensor.name):>36s} -"
        f" [{', '.join(f'{d:5d}' for d in dims)}], type = {tensor.type.type_name:>6s}, "
    )


def tensor_line(index: int, count: int, report: TensorReport) -> str:
    """The line of tensor number `index` of `count`: shape (fastest first), types, sizes in MiB,
    relative errors.
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
    """The line of tensor number `index` of `count`: what is wrong with it, or its errors."""
    line, report = place_of(index, count, checked.tensor), checked.report
    if checked.fault:
        return f"{line}FAULT: {printable(checked.fault)}"
    if report.rmse is None:
        return line + "the source's bytes"
    weighted = f", weighted = {report.weighted_rmse:.5f}" if report.weighted else ""
    return line + f"rel. rmse = {report.rmse:.5f}{weighted}, largest = {report.largest_error:.5g}"
