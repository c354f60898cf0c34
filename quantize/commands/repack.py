"""`iqforge repack`: the tensors of a GGUF file into row-interleaved form, or back."""

from __future__ import annotations

import argparse
import time

from ...errors import UsageError, printable
from ..report.printing import MIB, Printer, place_of
from ..run.report import TensorReport


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "iqforge repack [flags] IN OUT [NTHREADS]"
    parser.description = (
        "Write IN (a GGUF file, or the first shard of a split one) to OUT with every tensor in the"
        " row-interleaved form of its type (IQ4_K becomes IQ4_K_R4), where it has one and the rows"
        " are a multiple of its row group. No value changes. token_embd stays plain, as its rows"
        " are looked up singly. BF16_R16 is for processors with AVX512-BF16: use --pattern to leave"
        " BF16 tensors out. iqforge types lists the forms."
    )
    parser.add_argument("words", nargs="+", metavar="IN OUT [NTHREADS]", help="NTHREADS: as -t")
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        action="append",
        default=[],
        help="only tensors in whose name this is found; may be repeated, one of them must match",
    )
    parser.add_argument(
        "--undo",
        action="store_true",
        help="interleaved tensors into plain form: the inverse, byte for byte",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be done and the sizes, write nothing; OUT may be left out",
    )
    parser.add_argument(
        "-t", "--threads", metavar="N", type=int, default=0, help="threads (default: all cores)"
    )


def run(args: argparse.Namespace, api) -> int:
    src, out, threads = parse_words(args.words, args.threads, args.dry_run)
    changed = repack(
        api, src, out, pattern=args.pattern, undo=args.undo, threads=threads, dry_run=args.dry_run
    )
    return 0 if changed else 1  # a script must not take an older OUT for the result


def repack(
    api, src: str, out: str | None, *, pattern: list[str], undo: bool, threads: int, dry_run: bool
) -> bool:
    """Repack, and print how it goes. Returns whether there was anything to do; if not, nothing is
    written.
    """
    started = time.monotonic()
    printer = Printer(dry_run=dry_run, line=tensor_line)
    try:
        report = api.repack_model(
            src, out, pattern=pattern, undo=undo, threads=threads, dry_run=dry_run, progress=printer
        )
    finally:
        printer.close()
    seconds = time.monotonic() - started
    changed = [tensor.planned for tensor in report.tensors if not tensor.planned.kept]
    size = sum(plan.target.n_bytes for plan in changed)
    print(
        f"\n{len(changed)} of {len(report.tensors)} tensors {'undone' if undo else 'repacked'}, "
        f"{size / MIB:.2f} of {report.target_bytes / MIB:.2f} MiB"
    )
    if not changed:
        print("nothing to do: no file was written")
        return False
    if dry_run:
        print("dry run: nothing was written")
    else:
        print(
            f"repack time = {seconds:.2f} s ({report.target_bytes / max(seconds, 1e-9) / 1e6:.0f}"
            f" MB/s), written to {printable(out)}"
        )
    return True


def parse_words(words: list[str], threads: int, dry_run: bool) -> tuple[str, str | None, int]:
    """(IN, OUT, threads) of the positional words; OUT is None where a dry run leaves it out."""
    if len(words) > 3 or len(words) < (1 if dry_run else 2):
        raise UsageError("expected IN OUT [NTHREADS]")
    if len(words) == 3:
        try:
            threads = int(words[2])
        except ValueError:
            raise UsageError(f"invalid nthread '{words[2]}', expected a number") from None
    return words[0], words[1] if len(words) > 1 else None, max(0, threads)


def tensor_line(index: int, count: int, report: TensorReport) -> str:
    """The line of tensor number `index` of `count`: shape (fastest first), types, size, and why it
    stays as it is.
    """
    plan = report.planned
    what = f"{'kept':>10s}" if plan.kept else f"-> {plan.target.type.type_name:>7s}"
    line = (
        place_of(index, count, plan.source) + f"{what}, size = {plan.target.n_bytes / MIB:8.3f} MiB"
    )
    return line + (f" ({plan.note})" if plan.note else "")
