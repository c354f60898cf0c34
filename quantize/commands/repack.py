"""`iqforge repack`: interleave the rows of a GGUF file's tensors, or undo it."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from ...errors import UsageError, printable
from ..options import RepackOptions
from ..report.bars import RunPrinter
from ..report.printing import MIB, place_of
from ..report.summary import summary_lines
from ..run.report import TensorReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge repack` to its parser."""
    parser.usage = "iqforge repack [flags] IN OUT [NTHREADS]"
    parser.description = (
        "Write IN (a GGUF file, or the first shard of a split one) to OUT with every tensor in the"
        " row-interleaved form of its type (IQ4_K becomes IQ4_K_R4), if there is one and the number"
        " of rows is a multiple of its row group. No value changes. token_embd stays plain, as its"
        " rows are looked up one by one. BF16_R16 is for processors with AVX512-BF16: use --pattern"
        " to exclude BF16 tensors. iqforge types lists the forms."
    )
    parser.add_argument("words", nargs="+", metavar="IN OUT [NTHREADS]", help="NTHREADS: as -t")
    RepackOptions.add_flags(parser, only=("pattern", "undo", "dry_run"))
    parser.add_argument("--verbose", action="store_true", help="print a line for every tensor")
    RepackOptions.add_flags(parser, only=("threads",))


def run(args: argparse.Namespace, api) -> int:
    """Repack the file. Return 1 if there was nothing to change, so that no output was written, else
    0.
    """
    options = RepackOptions.from_flags(args)
    src, out, threads = parse_words(args.words, options.threads, options.dry_run)
    changed = repack(api, src, out, replace(options, threads=threads), verbose=args.verbose)
    return 0 if changed else 1  # a script must not take an older OUT for the result


def repack(
    api,
    src: str,
    out: str | None,
    options: RepackOptions,
    *,
    verbose: bool = False,
) -> bool:
    """Repack, and print progress and a summary. Return whether any tensor changes; if not, nothing
    is written.
    """
    started = time.monotonic()
    printer = RunPrinter(
        dry_run=options.dry_run, verbose=verbose, line=tensor_line, what="repacking"
    )
    try:
        report = api.repack_model(src, out, options=options, progress=printer)
    finally:
        printer.close()
    seconds = time.monotonic() - started
    changed = [tensor.planned for tensor in report.tensors if not tensor.planned.kept]
    size = sum(plan.target.n_bytes for plan in changed)
    print("\n" * verbose + "\n".join(summary_lines(report)))
    done = "undone" if options.undo else "repacked"
    print(
        f"\n{len(changed)} of {len(report.tensors)} tensors {done}, "
        f"{size / MIB:.2f} of {report.target_bytes / MIB:.2f} MiB"
    )
    if not changed:
        print("nothing to do: no file was written")
        return False
    if options.dry_run:
        print("dry run: nothing was written")
    else:
        print(
            f"repack time = {seconds:.2f} s ({report.target_bytes / max(seconds, 1e-9) / 1e6:.0f}"
            f" MB/s), written to {printable(out)}"
        )
    return True


def parse_words(words: list[str], threads: int, dry_run: bool) -> tuple[str, str | None, int]:
    """Return (IN, OUT, threads) of the positional words; OUT is None if a dry run leaves it out.
    Raise UsageError for other words.
    """
    if len(words) > 3 or len(words) < (1 if dry_run else 2):
        raise UsageError("expected IN OUT [NTHREADS]")
    if len(words) == 3:
        try:
            threads = int(words[2])
        except ValueError:
            raise UsageError(f"invalid NTHREADS: '{words[2]}' is not a number") from None
    return words[0], words[1] if len(words) > 1 else None, max(0, threads)


def tensor_line(index: int, count: int, report: TensorReport) -> str:
    """Return the line of tensor number `index` of `count`: shape (fastest first), types, size, and
    why it keeps its type.
    """
    plan = report.planned
    what = f"{'kept':>10s}" if plan.kept else f"-> {plan.target.type.type_name:>7s}"
    line = (
        place_of(index, count, plan.source) + f"{what}, size = {plan.target.n_bytes / MIB:8.3f} MiB"
    )
    return line + (f" ({plan.note})" if plan.note else "")
