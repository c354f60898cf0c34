"""`iqforge quantize`: flags and printed lines as llama-quantize has them, with the error of every tensor added."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError, printable
from ..formats.source import TensorInfo
from .flags import asks_for_size, changes_of, configure, notes, parse_words, recipe_fields, recipes_of, target_options
from .pace import Pace
from .plan import PlannedTensor
from .recipe import AUTO
from .report import Progress, RunReport, TensorReport

if TYPE_CHECKING:
    from .budget import Fitted
    from .changes import Changes
    from .estimate import Estimate
    from .validate import Checked

MIB = 1 << 20
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # the time left is ours: it knows the types to come
__all__ = ["Printer", "configure", "place_of", "run", "tensor_line"]


def run(args: argparse.Namespace, api) -> int:
    fields, plan = recipe_fields(args)
    src, outputs, threads = parse_words(args.words, AUTO if asks_for_size(args) else plan.type if plan else fields.get("type"))
    for line in notes(args):
        print(line)
    if args.repack:
        return run_repack(args, api, src, outputs, threads)
    changes, target, started = changes_of(args), target_options(args, outputs, fields), time.monotonic()
    fitted = None if target is None else fit(args, api, src, target, changes, threads)
    choosing = time.monotonic() - started if fitted else 0.0
    recipes = recipes_of(args, outputs, fields, plan, fitted.recipe if fitted else None)
    shards = api.Shards(args.keep_split, args.partial_requant, args.split_max_size, args.split_max_tensors)
    printers = [Printer(dry_run=args.dry_run, label=os.path.basename(out) if len(outputs) > 1 else "") for out, _ in outputs]
    try:
        reports = api.quantize_models(src, [(out, recipe) for (out, _), recipe in zip(outputs, recipes)], args.imatrix, changes=changes,
                                      nan_to_zero=args.nan_to_zero, threads=threads, dry_run=args.dry_run, estimate=not args.no_estimate,
                                      device=args.device, provenance=not args.no_provenance, save_plan=args.save_plan,
                                      restart=args.restart, shards=shards, gate_up=args.gate_up, validate=args.validate,
                                      progress=printers)
    finally:
        for printer in printers:
            printer.close()
    for (out, _), report in zip(outputs, reports):
        print_totals(out, report)
    seconds = time.monotonic() - started
    if args.dry_run:
        print_estimate(reports[0].estimate, choosing)
        if args.validate and reports[0].estimate is not None:
            print("reading back, for --validate, is not in that time")
        print("dry run: nothing was written" + (f" but the plan, {printable(args.save_plan)}" if args.save_plan else ""))
    else:
        elements = sum(t.planned.source.n_elements for report in reports for t in report.tensors if not t.planned.kept)
        written = ", ".join(printable(out) for out, _ in outputs)
        print(f"quantize time = {seconds:.2f} s ({elements / max(seconds, 1e-9) / 1e6:.2f} M elements/s), written to {written}")
    if args.validate and not args.dry_run:
        print(f"validated: {sum(len(report.tensors) for report in reports)} tensor(s) were read back, values and errors are as reported")
    return 0


def fit(args: argparse.Namespace, api, src: str, target: dict[str, object], changes: Changes, threads: int) -> Fitted:
    """The types for a given size, and a line that says what is expected of them."""
    from .stats_command import Printer as StatsPrinter

    bar = StatsPrinter(quiet=True)
    try:
        fitted = api.recipe_for_target(src, args.imatrix, changes=changes, threads=threads, provenance=not args.no_provenance, progress=bar,
                                       **target)
    finally:
        bar.close()
    print(f"target      = {fitted.n_bytes / MIB:8.2f} MiB ({fitted.bits_per_weight:.4f} BPW), predicted KL divergence "
          f"{fitted.predicted_kld:.5f} by {printable(fitted.sensitivities)}")
    return fitted


def run_repack(args: argparse.Namespace, api, src: str, outputs: list[tuple[str, str]], threads: int) -> int:
    """As `iqforge repack`; that there is nothing to do is no failure here, as it is none of llama-quantize."""
    from . import repack_command

    if len(outputs) > 1:
        raise UsageError("--repack makes one output")
    if args.keep_split or args.partial_requant or args.split_max_size or args.split_max_tensors or args.gate_up:
        raise UsageError("--repack makes one file of the tensors as they are: no shards, no experts merged or parted")
    if args.validate:
        raise UsageError("--repack does not read back; iqforge validate does")
    patterns = [pattern for text in args.repack_pattern for pattern in text.split(",") if pattern]
    repack_command.repack(api, src, outputs[0][0], pattern=patterns, undo=False, threads=threads, dry_run=args.dry_run)
    return 0


def print_totals(out: str, report: RunReport) -> None:
    """Sizes of one output, and what may be wrong with it."""
    print(f"\nmodel size  = {report.source_bytes / MIB:8.2f} MiB")
    print(f"quant size  = {report.target_bytes / MIB:8.2f} MiB ({report.bits_per_weight:.2f} BPW): {printable(out)}")
    if report.replaced:
        print(f"warning: {report.replaced} of {len(report.tensors)} tensor(s) required fallback quantization")
    if zeroed := sum(t.zeroed for t in report.tensors):
        print(f"warning: {zeroed} NaN or infinite value(s) in {sum(t.zeroed > 0 for t in report.tensors)} tensor(s) were set to 0")


def print_estimate(estimate: Estimate | None, choosing: float = 0.0) -> None:
    """What the run would take, and of what the time is made. choosing: seconds that it took to find types for a size, which the run takes
    again."""
    if estimate is None:
        return
    for disk in estimate.disks:
        free = f", {disk.free / MIB:.2f} MiB are free" if disk.free >= 0 else ""
        print(f"disk        = {disk.needed / MIB:8.2f} MiB in {printable(disk.folder)}{free}")
        if not disk.fits:
            print(f"warning: {(disk.needed - disk.free) / MIB:.2f} MiB too few are free in {printable(disk.folder)}")
    print(f"peak memory = {estimate.peak_bytes / MIB:8.2f} MiB (estimated)")
    work = "the disk" if estimate.disk_bound else "quantizing"
    types = f"choosing types {choosing:.2f}, " if choosing else ""
    print(f"time        = {choosing + estimate.seconds:8.2f} s (estimated: {types}preparing {estimate.setup:.2f}, "
          f"loading code {estimate.loading:.2f}, {work} {estimate.working:.2f}, finishing {estimate.finishing:.2f})")
    if estimate.compiling >= 0.5:
        print(f"searches were compiled in {estimate.compiling:.1f} s, which is kept for later runs; run this again for closer figures")


class Printer(Progress):
    """A line per tensor on stdout, a bar with the time left on stderr."""

    def __init__(self, dry_run: bool = False, line: Callable[[int, int, TensorReport], str] | None = None, label: str = ""):
        """line: what makes a tensor's line of its index, the number of tensors and its report; label: what stands before each line."""
        self.dry_run, self.bar, self.count, self.line = dry_run, None, 0, line or tensor_line
        self.planned: list[PlannedTensor] = []
        self.pace = Pace([])
        self.label = f"{printable(label)}: " if label else ""

    def begin(self, planned: list[PlannedTensor]) -> None:
        from tqdm import tqdm

        self.count, self.planned, self.pace = len(planned), planned, Pace(planned)
        if not self.dry_run:
            self.bar = tqdm(total=sum(p.source.n_elements for p in planned), unit="el", unit_scale=True, leave=False, disable=None,
                            dynamic_ncols=True, desc=self.label.rstrip(": ") or None, bar_format=_BAR)

    def resume(self, finished: Sequence[TensorReport]) -> None:
        self.pace = Pace(self.planned, len(finished))
        if self.bar is not None:
            self.bar.initial = self.bar.n = sum(report.planned.source.n_elements for report in finished)

    def advance(self, n_elements: int) -> None:
        self.pace.advance(n_elements)
        if self.bar is not None and not self.bar.disable:
            left = self.pace.seconds_left()
            self.bar.set_postfix_str("" if left is None else f"{self.bar.format_interval(left)} left", refresh=False)
            self.bar.update(n_elements)

    def tensor_done(self, index: int, report: TensorReport) -> None:
        from tqdm import tqdm

        tqdm.write(self.label + self.line(index, self.count, report), file=sys.stdout)

    def validated(self, index: int, checked: Checked) -> None:
        from .validate_command import checked_line

        if checked.fault:
            print(self.label + checked_line(index, self.count, checked), flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def place_of(index: int, count: int, tensor: TensorInfo) -> str:
    """How the line of a tensor begins: its number, name, shape and type."""
    dims = [*reversed(tensor.shape), 1, 1, 1][:4]
    return (f"[{index + 1:4d}/{count:4d}] {printable(tensor.name):>36s} - [{', '.join(f'{d:5d}' for d in dims)}], "
            f"type = {tensor.type.type_name:>6s}, ")


def tensor_line(index: int, count: int, report: TensorReport) -> str:
    """The line of tensor number `index` of `count`: shape (fastest first), types, sizes in MiB, relative errors."""
    source, target = report.planned.source, report.planned.target
    line = place_of(index, count, source)
    if report.planned.kept:
        return line + f"size = {source.n_bytes / MIB:8.3f} MiB"
    line += f"converting to {target.type.type_name} .. size = {source.n_bytes / MIB:8.2f} MiB -> {target.n_bytes / MIB:8.2f} MiB"
    if report.rmse is not None:
        line += f", rel. rmse = {report.rmse:.5f}"
        line += f", weighted = {report.weighted_rmse:.5f}" if report.weighted else ", no importance"
    if report.zeroed:
        line += f", {report.zeroed} non-finite set to 0"
    return line + (f" ({report.planned.note})" if report.planned.note else "")
