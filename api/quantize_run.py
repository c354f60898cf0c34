"""The run of `quantize_models`, once everything is planned: its estimate, and the files that it
writes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..quantize.run.report import RunProgress, RunReport, report_plan
from .calibration import Calibration
from .outputs import PlannedOutput, open_outputs

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..quantize.options import QuantizeOptions
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.rounding.choice import RoundingPlan
    from ..quantize.rounding.late import LateRounding
    from ..quantize.rounding.methods import Rounders
    from ..quantize.rounding.moments import TensorRounding
    from ..quantize.run.compile_task import CompileTask
    from ..quantize.run.piece import ImportanceLookup
    from ..quantize.run.resume import ResumableOutput


@dataclass
class QuantizeRun:
    """What is read and what is written: a plan, importances, files and progress for each output.

    source: the model after `changes`; model: before them. tasks: what is compiled ahead of the run.
    devices: numbers of GPUs, none for the CPU. rounders: where rows are rounded with moments.
    """

    source: Source
    model: Source
    changes: Changes
    options: QuantizeOptions
    plans: list[list[PlannedTensor]]
    lookups: Sequence[ImportanceLookup | None]
    files: list[PlannedOutput]
    tasks: list[CompileTask]
    devices: Sequence[int]
    rounders: Rounders
    progress: Sequence[RunProgress]

    def estimated(self, started: float) -> list[RunReport]:
        """Return the report of each plan with the time, memory and disk space that the run would
        take. started: when planning began, by `time.perf_counter`.
        """
        from ..quantize.run.compilation import compile_ahead
        from ..quantize.run.estimate import estimate_run

        compiling = time.perf_counter()
        compile_ahead(self.tasks, self.progress[0])
        setup = compiling - started
        reports = [report_plan(*of_output) for of_output in zip(self.plans, self.progress)]
        found = estimate_run(
            self.source,
            self.plans,
            self.lookups,
            threads=self.options.threads,
            devices=self.devices,
            setup=setup,
            files=[size for file in self.files for size in file.sizes],
        )
        return [
            replace(report, estimate=found, files=file.paths)
            for report, file in zip(reports, self.files)
        ]

    def made(
        self, roundings: Sequence[RoundingPlan], calibration: Calibration | None, own: bool
    ) -> list[RunReport]:
        """Write the files, and return a report for each output. roundings: how each is rounded with
        given moments, if with any; calibration: where moments are collected meanwhile, and `own`
        importances are as well. Raise the errors of `quantize_models`.
        """
        from ..quantize.run.compilation import compile_ahead
        from ..quantize.run.resume import finish_all
        from ..quantize.run.stream import RunOutput, stream

        with ExitStack() as opened:
            sinks = [
                opened.enter_context(sink)
                for sink in open_outputs(
                    self.files, devices=bool(self.devices), restart=self.options.restart
                )
            ]
            active = [number for number, file in enumerate(self.files) if file.sizes]
            if active:
                compile_ahead(self.tasks, self.progress[0])
            lookups = self.lookups
            guides: list[Mapping[str, TensorRounding]] = (
                [roundings[number].roundings for number in active] if roundings else []
            )
            late: list[dict[str, LateRounding]] = []
            waits: set[str] = set()
            if calibration is not None:
                if own:
                    lookups = [calibration.lookup(self.changes, self.model) for _ in lookups]
                late = self._late_roundings(calibration, sinks, [lookups[n] for n in active])
                guides += late
                if sinks:
                    waits = calibration.follow(
                        self.changes, self.model, sinks[0].planned, sinks[0].stored
                    )
            made = stream(
                self.source,
                [
                    RunOutput(
                        sink.planned,
                        sink,
                        lookups[number],
                        self.progress[number],
                        sink.finished,
                        sink.tensor_done,
                        guides[at] if guides else {},
                        waits,
                    )
                    for at, (number, sink) in enumerate(zip(active, sinks))
                ],
                threads=self.options.threads,
                devices=self.devices,
            )
            if calibration is not None:
                for number, sink, found in zip(active, sinks, late):
                    said = calibration.choices(
                        self.changes, self.model, sink.planned, found, sink.noted
                    )
                    self.progress[number].layers_rounded(said)
            checks = [
                self._check(sink, lookups[number], self.progress[number], report)
                for number, sink, report in zip(active, sinks, made)
                if self.options.validate
            ]
            finish_all(sinks, checks)
            reports = {
                number: replace(report, files=self.files[number].paths)
                for number, report in zip(active, made)
            }
            return [reports.get(number, RunReport()) for number in range(len(self.files))]

    def _late_roundings(
        self,
        calibration: Calibration,
        sinks: Sequence[ResumableOutput],
        lookups: Sequence[ImportanceLookup | None],
    ) -> list[dict[str, LateRounding]]:
        """Return how the tensors of each output are rounded, and let the outputs record it."""
        from ..quantize.rounding.late import record_of

        late = []
        for sink, lookup in zip(sinks, lookups):
            found = calibration.roundings(
                self.changes,
                self.model,
                self.source,
                sink.planned,
                lookup,
                len(sink.finished),
                self.rounders,
            )
            sink.note = lambda name, found=found: record_of(found.get(name))
            late.append(found)
        return late

    def _check(
        self,
        sink: ResumableOutput,
        lookup: ImportanceLookup | None,
        progress: RunProgress,
        report: RunReport,
    ) -> partial[None]:
        """Return what reads an output back before it gets its name, see `finish_all`."""
        from ..quantize.report.validate import require_sound
        from ..quantize.run.parallel import thread_count

        return partial(
            require_sound,
            sink.out,
            source=self.source,
            planned=sink.planned,
            reported=report.tensors,
            importance=lookup,
            progress=progress,
            threads=thread_count(self.options.threads),
        )
