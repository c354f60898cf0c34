"""`iqforge quantize`: flags and printed lines as llama-quantize has them, with the error of every
tensor added.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ..plan.recipe import AUTO
from ..report.printing import MIB, Printer, print_estimate, print_totals
from .flags import (
    asks_for_size,
    changes_of,
    configure,
    notes,
    parse_words,
    recipe_fields,
    recipes_of,
    refuse_read_files,
    target_options,
)
from .repack import repack

if TYPE_CHECKING:
    from ..plan.budget import Fitted
    from ..plan.changes import Changes

__all__ = ["configure", "run"]


def run(args: argparse.Namespace, api) -> int:
    fields, plan = recipe_fields(args)
    src, outputs, threads = parse_words(
        args.words, AUTO if asks_for_size(args) else plan.type if plan else fields.get("type")
    )
    refuse_read_files(args, [out for out, _ in outputs])
    for line in notes(args):
        print(line)
    if args.repack:
        return run_repack(args, api, src, outputs, threads)
    changes, target, started = (
        changes_of(args),
        target_options(args, outputs, fields),
        time.monotonic(),
    )
    fitted = None if target is None else fit(args, api, src, target, changes, threads)
    choosing = time.monotonic() - started if fitted else 0.0
    recipes = recipes_of(args, outputs, fields, plan, fitted.recipe if fitted else None)
    shards = api.Shards(
        args.keep_split, args.partial_requant, args.split_max_size, args.split_max_tensors
    )
    printers = [
        Printer(dry_run=args.dry_run, label=os.path.basename(out) if len(outputs) > 1 else "")
        for out, _ in outputs
    ]
    try:
        reports = api.quantize_models(
            src,
            [(out, recipe) for (out, _), recipe in zip(outputs, recipes)],
            args.imatrix,
            changes=changes,
            nan_to_zero=args.nan_to_zero,
            threads=threads,
            dry_run=args.dry_run,
            estimate=not args.no_estimate,
            device=args.device,
            provenance=not args.no_provenance,
            save_plan=args.save_plan,
            restart=args.restart,
            shards=shards,
            gate_up=args.gate_up,
            validate=args.validate,
            progress=printers,
        )
    finally:
        for printer in printers:
            printer.close()
    made = [(out, report) for (out, _), report in zip(outputs, reports) if report.tensors]
    for out, report in made:
        print_totals(out, report)
    seconds = time.monotonic() - started
    if args.dry_run:
        print_estimate(reports[0].estimate, choosing)
        if args.validate and reports[0].estimate is not None:
            print("reading back, for --validate, is not in that time")
        print(
            "dry run: nothing was written"
            + (f" but the plan, {printable(args.save_plan)}" if args.save_plan else "")
        )
    elif not made:
        print("nothing to do: no file was written")
    else:
        elements = sum(
            t.planned.source.n_elements
            for report in reports
            for t in report.tensors
            if not t.planned.kept
        )
        written = ", ".join(printable(out) for out, _ in made)
        print(
            f"quantize time = {seconds:.2f} s ({elements / max(seconds, 1e-9) / 1e6:.2f} M"
            f" elements/s), written to {written}"
        )
    if args.validate and made and not args.dry_run:
        print(
            f"validated: {sum(len(report.tensors) for report in reports)} tensor(s) were read back,"
            " values and errors are as reported"
        )
    return 0


def fit(
    args: argparse.Namespace,
    api,
    src: str,
    target: dict[str, object],
    changes: Changes,
    threads: int,
) -> Fitted:
    """The types for a given size, and a line that says what is expected of them."""
    from .quantize_stats import Printer as StatsPrinter

    bar = StatsPrinter(quiet=True)
    try:
        fitted = api.recipe_for_target(
            src,
            args.imatrix,
            changes=changes,
            threads=threads,
            provenance=not args.no_provenance,
            progress=bar,
            **target,
        )
    finally:
        bar.close()
    print(
        f"target      = {fitted.n_bytes / MIB:8.2f} MiB ({fitted.bits_per_weight:.4f} BPW),"
        f" predicted KL divergence {fitted.predicted_kld:.5f} by {printable(fitted.sensitivities)}"
    )
    return fitted


def run_repack(
    args: argparse.Namespace, api, src: str, outputs: list[tuple[str, str]], threads: int
) -> int:
    """As `iqforge repack`; that there is nothing to do is no failure here, as it is none of
    llama-quantize.
    """
    if len(outputs) > 1:
        raise UsageError("--repack makes one output")
    if (
        args.keep_split
        or args.partial_requant
        or args.split_max_size
        or args.split_max_tensors
        or args.gate_up
    ):
        raise UsageError(
            "--repack makes one file of the tensors as they are: no shards, no experts merged or"
            " parted"
        )
    if args.prune_layers or args.override_kv or args.extra_output_tensor or args.save_plan:
        raise UsageError(
            "--repack changes nothing but the order of rows: no layers left out, no keys set, no"
            " second output, no plan"
        )
    if args.validate:
        raise UsageError("--repack does not read back; iqforge validate does")
    patterns = [pattern for text in args.repack_pattern for pattern in text.split(",") if pattern]
    repack(
        api, src, outputs[0][0], pattern=patterns, undo=False, threads=threads, dry_run=args.dry_run
    )
    return 0
