"""`iqforge quantize`: quantize a model, with the flags and totals of llama-quantize, and print the
errors of every role.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, printable
from ..options import QuantizeOptions, RepackOptions, Shards, TargetOptions
from ..plan.changes import Changes
from ..plan.recipe import AUTO
from ..report.bars import RunPrinter
from ..report.printing import MIB, print_estimate, print_totals, written_files
from ..report.summary import summary_lines
from .arguments import (
    asks_for_size,
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

__all__ = ["configure", "run"]


def run(args: argparse.Namespace, api) -> int:
    """Quantize or repack with the flags of llama-quantize, print totals, and return 0. Raise
    UsageError for flags that exclude each other.
    """
    fields, plan = recipe_fields(args, api)
    preset = AUTO if asks_for_size(args) else plan.type if plan else fields.get("type")
    src, outputs, threads = parse_words(args.words, None if preset is None else str(preset))
    if threads and args.threads:
        raise UsageError("-t and NTHREADS both give a number of threads")
    threads = threads or max(0, args.threads)
    refuse_read_files(args, [out for out, _ in outputs])
    for line in notes(args):
        print(line)
    if (args.hessian or args.calibrate) and args.repack:
        raise UsageError("--repack does not quantize: it takes no --hessian or --calibrate")
    if args.repack:
        return run_repack(args, api, src, outputs, threads)
    options = QuantizeOptions.from_flags(args, threads=threads)
    changes, target = Changes.from_flags(args), target_options(args, outputs)
    started, fitted, compiling = time.monotonic(), None, 0.0
    if target is not None:
        of_recipe = {name: value for name, value in fields.items() if name != "type"}
        fitted, compiling = fit(
            api, src, args.imatrix, args.hessian, target, changes, options, of_recipe
        )
    choosing = time.monotonic() - started - compiling if fitted else 0.0
    recipes = recipes_of(args, outputs, fields, plan, fitted.recipe if fitted else None)
    shards = Shards.from_flags(args)
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
            hessian=args.hessian,
            calibrate=args.calibrate,
            options=options,
            changes=changes,
            shards=shards,
            progress=printers,
        )
    finally:
        for printer in printers:
            printer.close()
    made = [
        (out, report)
        for (out, _), report in zip(outputs, reports)
        if report.tensors or report.files  # a vocabulary alone has no tensors
    ]
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
        written = ", ".join(written_files(out, report) for out, report in made)
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
    api,
    src: str,
    imatrix: str | None,
    hessian: str | None,
    target: TargetOptions,
    changes: Changes,
    options: QuantizeOptions,
    of_recipe: dict[str, Any],
) -> tuple[Fitted, float]:
    """Choose types for a given size and print what is predicted for them. Return them, and the
    seconds that compiling took.
    """
    from .quantize_stats import StatsPrinter

    bar = StatsPrinter(quiet=True)
    try:
        fitted = api.recipe_for_target(
            src,
            imatrix,
            hessian=hessian,
            hessian_shrink=options.hessian_shrink,
            refine=options.refine,
            target=target,
            changes=changes,
            threads=options.threads,
            device=options.device,
            provenance=options.provenance,
            progress=bar,
            **of_recipe,
        )
    finally:
        bar.close()
    print(
        f"target      = {fitted.n_bytes / MIB:8.2f} MiB ({fitted.bits_per_weight:.4f} BPW),"
        f" {predicted(fitted)}"
    )
    return fitted, bar.compile_seconds


def predicted(fitted: Fitted) -> str:
    """Return what a choice of types is predicted to do. Sensitivities of roles are those of other
    models: they rank types and have no scale.
    """
    if fitted.is_measured:
        source = printable(fitted.sensitivities)
        return f"predicted KL divergence {fitted.predicted_kld:.5f} by {source}"
    return "types ranked by errors and roles (--damage also predicts the KL divergence)"


def run_repack(
    args: argparse.Namespace, api, src: str, outputs: list[tuple[str, str]], threads: int
) -> int:
    """Repack, as `iqforge repack` does. Nothing to do is not a failure here, as with
    llama-quantize. Raise UsageError for flags that repacking does not take.
    """
    if len(outputs) > 1:
        raise UsageError("--repack makes one output")
    if args.keep_split or args.partial or args.max_size or args.max_tensors or args.gate_up:
        raise UsageError(
            "--repack makes one file of the tensors as they are: it does not split the file, and"
            " does not merge or split gate and up"
        )
    if args.prune_layers or args.override_kv or args.extra_output or args.save_plan:
        raise UsageError(
            "--repack only changes the order of rows: it takes no --prune-layers, --override-kv,"
            " --extra-output-tensor or --save-plan"
        )
    if args.validate:
        raise UsageError("--repack does not read its output back; use iqforge validate")
    patterns = [pattern for text in args.repack_pattern for pattern in text.split(",") if pattern]
    options = RepackOptions(pattern=patterns, dry_run=args.dry_run, threads=threads)
    repack(api, src, outputs[0][0], options, verbose=args.verbose)
    return 0
