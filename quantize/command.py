"""`iqforge quantize`: flags and printed lines as llama-quantize has them, with the error of every tensor added."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import UnknownTypeError, UsageError, printable
from ..formats.source import TensorInfo
from .overrides import ROLE_FLAGS, flag_name
from .plan import PlannedTensor
from .report import Progress, RunReport, TensorReport

if TYPE_CHECKING:
    from .estimate import Estimate

MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "iqforge quantize [flags] IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]"
    parser.description = ("Quantize IN (a GGUF file, the first shard of a split one, or a checkpoint folder) to TYPE. "
                          "Without OUT the result is ggml-model-TYPE.gguf beside IN. Several OUT TYPE are made in one pass over IN.")
    parser.add_argument("words", nargs="+", metavar="IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]", help="TYPE: a preset name or number, any case")
    parser.add_argument("--imatrix", metavar="F", help="importance matrix, legacy .dat or GGUF")
    parser.add_argument("--pure", action="store_true", help="one type for all tensors, without the preset's mix and --custom-q")
    parser.add_argument("--custom-q", metavar="REGEX=TYPE,..", action="append", default=[],
                        help="types for tensors with REGEX in their names, whatever the preset says; the first that matches counts; "
                        "may be repeated")
    parser.add_argument("--token-embedding-type", metavar="T", help="type of token_embd.weight")
    parser.add_argument("--output-tensor-type", metavar="T", help="type of output.weight")
    for role, what in ROLE_FLAGS.items():
        parser.add_argument(flag_name(role), metavar="T", help=f"type of {what}")
    parser.add_argument("--leave-output-tensor", action="store_true", help="keep output.weight as it is")
    parser.add_argument("--allow-requantize", action="store_true", help="accept tensors that are quantized already")
    parser.add_argument("--ignore-imatrix-rules", action="store_true", help="do without an importance matrix where one is demanded")
    parser.add_argument("--nan-to-zero", action="store_true", help="NaN and infinities in the source become 0 instead of an error")
    parser.add_argument("--device", metavar="D", default="cpu", help="cpu (default), cuda for all GPUs, cuda:N or cuda:N,M for some, "
                        "auto for all GPUs or, without one, the CPU; the bytes are the same, but for trellis types")
    parser.add_argument("--no-provenance", action="store_true", help="leave out the keys that say which version made the file of which "
                        "weights, recipe and importance matrix")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, the sizes, and what time, memory and space the run would "
                        "take, from trying some rows; write nothing")
    parser.add_argument("--no-estimate", action="store_true", help="with --dry-run: the plan and the sizes only, at once")


def run(args: argparse.Namespace, api) -> int:
    src, outputs, threads = parse_words(args.words)
    started = time.monotonic()
    printers = [Printer(dry_run=args.dry_run, label=os.path.basename(out) if len(outputs) > 1 else "") for out, _ in outputs]
    try:
        reports = api.quantize_models(src, outputs, args.imatrix, pure=args.pure, custom_q=args.custom_q, role_types=given_roles(args),
                                      token_embedding_type=args.token_embedding_type, output_tensor_type=args.output_tensor_type,
                                      leave_output_tensor=args.leave_output_tensor, allow_requantize=args.allow_requantize,
                                      ignore_imatrix_rules=args.ignore_imatrix_rules, nan_to_zero=args.nan_to_zero, threads=threads,
                                      dry_run=args.dry_run, estimate=not args.no_estimate, device=args.device, provenance=not args.no_provenance, progress=printers)
    finally:
        for printer in printers:
            printer.close()
    for (out, _), report in zip(outputs, reports):
        print_totals(out, report)
    seconds = time.monotonic() - started
    if args.dry_run:
        print_estimate(reports[0].estimate)
        print("dry run: nothing was written")
    else:
        elements = sum(t.planned.source.n_elements for report in reports for t in report.tensors if not t.planned.kept)
        written = ", ".join(printable(out) for out, _ in outputs)
        print(f"quantize time = {seconds:.2f} s ({elements / max(seconds, 1e-9) / 1e6:.2f} M elements/s), written to {written}")
    return 0


def print_totals(out: str, report: RunReport) -> None:
    """Sizes of one output, and what may be wrong with it."""
    print(f"\nmodel size  = {report.source_bytes / MIB:8.2f} MiB")
    print(f"quant size  = {report.target_bytes / MIB:8.2f} MiB ({report.bits_per_weight:.2f} BPW): {printable(out)}")
    if report.replaced:
        print(f"warning: {report.replaced} of {len(report.tensors)} tensor(s) required fallback quantization")
    if zeroed := sum(t.zeroed for t in report.tensors):
        print(f"warning: {zeroed} NaN or infinite value(s) in {sum(t.zeroed > 0 for t in report.tensors)} tensor(s) were set to 0")


def print_estimate(estimate: Estimate | None) -> None:
    """What the run would take, and of what the time is made."""
    if estimate is None:
        return
    for disk in estimate.disks:
        free = f", {disk.free / MIB:.2f} MiB are free" if disk.free >= 0 else ""
        print(f"disk        = {disk.needed / MIB:8.2f} MiB in {printable(disk.folder)}{free}")
        if not disk.fits:
            print(f"warning: {(disk.needed - disk.free) / MIB:.2f} MiB too few are free in {printable(disk.folder)}")
    print(f"peak memory = {estimate.peak_bytes / MIB:8.2f} MiB (estimated)")
    work = "the disk" if estimate.disk_bound else "quantizing"
    print(f"time        = {estimate.seconds:8.2f} s (estimated: preparing {estimate.setup:.2f}, loading code {estimate.loading:.2f}, "
          f"{work} {estimate.working:.2f}, finishing {estimate.finishing:.2f})")
    if estimate.compiling >= 0.5:
        print(f"searches were compiled in {estimate.compiling:.1f} s, which is kept for later runs; run this again for closer figures")


def given_roles(args: argparse.Namespace) -> dict[str, str]:
    """Type names by the role whose flag was given."""
    return {role: given for role in ROLE_FLAGS if (given := getattr(args, f"{role}_type")) is not None}


def parse_words(words: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """(IN, [(OUT, TYPE), ..], NTHREADS) of the positional words; a single OUT gets the reference's default name if it was left out."""
    from ..formats.ftypes import file_type

    if len(words) < 2:
        raise UsageError("expected IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]")
    src = words[0]
    try:
        preset = file_type(words[1])
        out = os.path.join(src if os.path.isdir(src) else os.path.dirname(src), f"ggml-model-{preset.name}.gguf")
        outputs, rest = [(out, preset.name)], words[2:]
    except UnknownTypeError:
        if len(words) < 3:
            raise
        pairs, rest = words[1:], words[len(words) - (len(words) - 1) % 2:]
        outputs = [(out, file_type(type).name) for out, type in zip(pairs[::2], pairs[1::2])]
    if len(rest) > 1 or any(_is_number(out) for out, _ in outputs[1:]):  # a number is no file, but NTHREADS in the wrong place
        raise UsageError(f"unexpected argument '{(rest if len(rest) > 1 else words)[-1]}'")
    try:
        return src, outputs, max(0, int(rest[0])) if rest else 0
    except ValueError:
        raise UsageError(f"invalid nthread '{rest[0]}', expected a number") from None


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True


class Printer(Progress):
    """A line per tensor on stdout, a bar with the time left on stderr."""

    def __init__(self, dry_run: bool = False, line: Callable[[int, int, TensorReport], str] | None = None, label: str = ""):
        """line: what makes a tensor's line of its index, the number of tensors and its report; label: what stands before each line."""
        self.dry_run, self.bar, self.count, self.line = dry_run, None, 0, line or tensor_line
        self.label = f"{printable(label)}: " if label else ""

    def begin(self, planned: list[PlannedTensor]) -> None:
        from tqdm import tqdm

        self.count = len(planned)
        if not self.dry_run:
            self.bar = tqdm(total=sum(p.source.n_elements for p in planned), unit="el", unit_scale=True, leave=False, disable=None,
                            dynamic_ncols=True, desc=self.label.rstrip(": ") or None)

    def resume(self, finished: Sequence[TensorReport]) -> None:
        if self.bar is not None:
            self.bar.initial = self.bar.n = sum(report.planned.source.n_elements for report in finished)

    def advance(self, n_elements: int) -> None:
        if self.bar is not None:
            self.bar.update(n_elements)

    def tensor_done(self, index: int, report: TensorReport) -> None:
        from tqdm import tqdm

        tqdm.write(self.label + self.line(index, self.count, report), file=sys.stdout)

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
