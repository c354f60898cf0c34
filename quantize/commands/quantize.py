"""`iqforge quantize`: the flags and totals of llama-quantize, with the errors of every role."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ..plan.recipe import AUTO
from ..report.bars import RunPrinter
from ..report.printing import MIB, print_estimate, print_totals
from ..report.summary import summary_lines
from .arguments import (
    asks_for_size,
    changes_of,
    notes,
    parse_words,
    recipe_fields,
    recipes_of,
    refuse_read_files,
    target_options,
)
from .flags import configure
from .repack import repack

if TYPE_CHECKING:
    from ..plan.budget import Fitted
    from ..plan.changes import Changes

__all__ = ["configure", "run"]


def run(args: argparse.Namespace, api) -> int:
    fields, plan = recipe_fields(args)
    preset = AUTO if asks_for_size(args) else plan.type if plan else fields.get("type")
    src, outputs, threads = parse_words(args.words, None if preset is None else str(preset))
    if threads and args.threads:
        raise UsageError("-t and NTHREADS both give a number of threads")
    threads = threads or max(0, args.threads)
    refuse_read_files(args, [out for out, _ in outputs])
    for line in notes(args):
        print(line)
    if args.repack:
        return run_repack(args, api, src, outputs, threads)
    changes, target = changes_of(args), target_options(args, outputs, fields)
    started, fitted, compiling = time.monotonic(), None, 0.0
    if target is not None:
        fitted, compiling = fit(args, api, src, target, changes, threads)
    choosing = time.monotonic() - started - compiling if fitted else 0.0
    recipes = recipes_of(args, outputs, fields, plan, fitted.recipe if fitted else None)
    shards = api.Shards(
        args.keep_split, args.partial_requant, args.split_max_size, args.split_max_tensors
    )
    printers = [
        RunPrinter(
            dry_run=args.dry_run,
            verbose=args.verbose,
            label=os.path.basename(out) if len(outputs) > 1 else "",
        )
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
    for number, (out, report) in enumerate(made):
        print("\n" * bool(number or args.verbose) + "\n".join(summary_lines(report)))
        print_totals(out, report)
    compiling += sum(printer.compile_seconds for printer in printers)
    seconds = time.monotonic() - started - compiling
    if compiling:
        print(f"compile time = {compiling:.2f} s (once; the code is kept for later runs)")
    if args.dry_run:
        print_estimate(reports[0].estimate, choosing)
        if args.validate and reports[0].estimate is not None:
            print("this does not include the time that --validate takes")
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
            f"validated: {sum(len(report.tensors) for report in reports)} tensor(s) were read back;"
            " their values and errors are as reported"
        )
    return 0


def fit(
    args: argparse.Namespace,
    api,
    src: str,
    target: dict[str, object],
    changes: Changes,
    threads: int,
) -> tuple[Fitted, float]:
    """Choose types for a given size and print what is predicted for them. Return them, and the
    seconds that compiling took.
    """
    from .quantize_stats import StatsPrinter

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
    return fitted, bar.compile_seconds


def run_repack(
    args: argparse.Namespace, api, src: str, outputs: list[tuple[str, str]], threads: int
) -> int:
    """Repack, as `iqforge repack` does. Nothing to do is not a failure here, as with
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
            "--repack makes one file of the tensors as they are: it does not split the file, and"
            " does not merge or split gate and up"
        )
    if args.prune_layers or args.override_kv or args.extra_output_tensor or args.save_plan:
        raise UsageError(
            "--repack only changes the order of rows: it takes no --prune-layers, --override-kv,"
            " --extra-output-tensor or --save-plan"
        )
    if args.validate:
        raise UsageError("--repack does not read its output back; use iqforge validate")
    patterns = [pattern for text in args.repack_pattern for pattern in text.split(",") if pattern]
    repack(
        api,
        src,
        outputs[0][0],
        pattern=patterns,
        undo=False,
        threads=threads,
        dry_run=args.dry_run,
        verbose=args.verbose,
    )
    return 0
