"""From a checkpoint to a quantized file of a given size, with the proof that it is good: convert,
collect an importance matrix, choose types, quantize, read back, compare, and write a model card.

Every stage leaves whole files only, and is recorded with a digest of what it depends on. A run that
was interrupted, or is repeated with another target, does only what is missing. The same input and
options give the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, printable
from ..formats.disk import check_disks, output_error
from ..formats.output import PartFile
from ..imatrix.default_texts import DEFAULT
from ..runtime.evaluate.compact_base import entries, record_type
from ..runtime.evaluate.comparison import Comparison, figures_from_json
from ..version import __version__
from . import auto_plan
from .auto_compiling import CompileWatch, seconds_of_compiling
from .auto_plan import AutoPlan, Planned
from .auto_stages import AutoFiles, AutoStages, Found
from .auto_texts import AutoTexts
from .card import Card, model_card
from .compare_page import html_page
from .figures import text_table
from .origin import Origin, stat_of
from .stages import Finished, Stages, digest

if TYPE_CHECKING:
    from ..runtime.options import LoadOptions
    from .auto_options import AutoOptions

log = logging.getLogger(__name__)

# Parameters up to which sensitivities are measured: they need the model in float32, and up to twice
# the time of the importance matrix.
_MOST_MEASURED = 1_000_000_000
_REFERENCE = "IQ4_K"  # the preset whose speed the plan is estimated from
_TITLES = {
    "convert": "Convert the checkpoint to GGUF",
    "imatrix": "Collect an importance matrix",
    "sensitivity": "Measure how much each tensor matters",
    "choose": "Choose types",
    "quantize": "Quantize and read back",
    "compare": "Compare with the unquantized model",
}


class Auto:
    """The chain for one source, folder and target. `plan` says what `run` will do.

    api: the package `iqforge.api`. write: is given every line. bars: show progress on a terminal.
    UsageError for a target that cannot be reached.
    """

    def __init__(
        self,
        api,
        source: str,
        folder: Path,
        options: AutoOptions,
        load: LoadOptions,
        *,
        write: Callable[[str], None] = print,
        bars: bool = False,
    ):
        self.api, self.options, self.load, self.write = api, options, load, write
        self.target = options.target
        if load.adapters():
            raise UsageError(
                "merge adapters first (iqforge export-lora), and begin with the result"
            )
        self.texts = AutoTexts.read(options.texts or (DEFAULT,), options.tests)
        with api.open_source(source) as opened:
            self.origin = Origin.of(source, opened, options.types)
            inputs = [source, *opened.files]
        self.aim = auto_plan.aim_of(self.target, api, self.origin.address, load)
        self.origin.sizes.check(self.aim.n_bytes, self.aim.bpw)
        if self.origin.quantized:
            log.warning(
                "%s has weights in %s already: what is lost is measured against them",
                printable(source, 400),
                ", ".join(self.origin.quantized),
            )
        self.measures = (
            options.sensitivity
            and options.damage is None
            and load.split_mode in (None, "none")
            and self.origin.n_parameters <= _MOST_MEASURED
        )
        self.files = AutoFiles(folder, self.origin, options.name, self.target.label)
        read = [*options.texts, *options.tests, *([options.damage] if options.damage else [])]
        self.files.refuse_inputs([*inputs, *read])
        self.stages, self.finished = Stages(write), Finished(self.files.stages)
        self.work = AutoStages(
            api,
            self.origin,
            self.files,
            self.texts,
            self.aim,
            options,
            load,
            self.stages.say,
            bars,
        )
        self.keys = self._keys()

    def _keys(self) -> dict[str, str]:
        """Return the digest of every stage: of its own options and of the stages before it."""
        o, load = self.options, asdict(self.load)
        texts = [hashlib.sha256(t.encode()).hexdigest() for t in self.texts.calibration.values()]
        tests = [hashlib.sha256(t.encode()).hexdigest() for t in self.texts.tests.values()]
        damage = stat_of(o.damage) if o.damage else None
        convert = digest(__version__, self.origin.address, self.origin.provenance, o.name)
        collect = digest(convert, texts, o.n_ctx, o.chunks)
        sensitivity = digest(collect, auto_plan.PROBE_BYTES)
        before = sensitivity if self.measures else collect
        choose = digest(before, asdict(self.aim), damage, list(o.types))
        compare = digest(choose, tests, o.n_ctx, o.test_chunks, load)
        keys = {"convert": convert, "imatrix": collect, "sensitivity": sensitivity}
        keys |= {"choose": choose, "quantize": choose, "compare": compare}
        if not self.measures:
            del keys["sensitivity"]
        if self.origin.is_gguf:
            del keys["convert"]
        return keys

    def plan(self) -> AutoPlan:
        """Return the stages with estimates. Tries a search for seconds, unless everything is done.
        Raise OutputError if the disk has too little space.
        """
        o, origin = self.options, self.origin
        done = {
            name: self.finished.result(name, key) is not None for name, key in self.keys.items()
        }
        calibrate = auto_plan.token_count(self.texts.calibration, o.chunks, o.n_ctx)
        measure = auto_plan.token_count(self.texts.tests, o.test_chunks, o.n_ctx)
        rate = quantize = 1.0
        if not all(done.values()):
            device = self.load.device if self.load.device != "auto" else "cpu"
            rate = auto_plan.flops_per_second(device) / (2 * origin.active)  # tokens/s
        watch = CompileWatch()
        if not done["quantize"]:
            estimate = self.api.quantize_model(
                origin.address,
                self._place(),
                _REFERENCE,
                dry_run=True,
                estimate=True,
                device=self.load.device,
                allow_requantize=origin.is_gguf,
                progress=watch,
            ).estimate
            quantize = estimate.working + estimate.finishing
        probes = origin.n_probes / auto_plan.probe_layers(origin.n_probes)
        record = record_type(*entries(origin.n_vocab)).itemsize
        costs = {
            "convert": (
                auto_plan.convert_seconds(origin.n_bytes, origin.is_remote),
                origin.n_bytes,
            ),
            "imatrix": (calibrate / rate, 0),
            "sensitivity": (
                quantize + (probes + 1) * auto_plan.PROBE_TOKENS / rate,
                2 * origin.n_vocab * auto_plan.PROBE_TOKENS // 2,
            ),
            "choose": (quantize * origin.choose_share, 0),
            "quantize": (quantize * 1.3, self.aim.file_bytes(origin.sizes)),
            "compare": (2.5 * measure / rate, record * measure // 2),
        }
        stages = tuple(
            Planned(name, _TITLES[name], seconds, n_bytes, done[name])
            for name, (seconds, n_bytes) in costs.items()
            if name in self.keys
        )
        compiling = self._compiling(done, watch.factor)
        plan = AutoPlan(origin.address, self.files.out, self.aim, stages, compiling)
        check_disks([(self._place(), plan.n_bytes)])
        return plan

    def _compiling(self, done: dict[str, bool], factor: float) -> float:
        """Return about how long the stages that are left compile on the CPU."""
        tasks = [] if done.get("sensitivity", True) else [*self.origin.probe_tasks]
        missing = 0
        if self.load.device == "cpu":
            if not done["choose"]:
                tasks += self.origin.choice_tasks
            if not done["compare"] and not self.origin.is_remote:
                with self.api.load_model(self.origin.address, options=self.load) as model:
                    missing = model.count_missing_code()
        return seconds_of_compiling(tasks, missing, factor)

    def _place(self) -> Path:
        """Return a path on the disk of the results: their folder may not exist yet."""
        folder = self.files.folder.absolute()
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        return folder / self.files.out.name

    def run(self) -> Comparison:
        """Run what is missing, and return the figures of the result."""
        files = self.files
        try:
            files.work.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise output_error(error, files.work) from None
        if not self.origin.is_gguf:
            self._stage("convert", self.work.convert)
        self._stage("imatrix", self.work.collect)
        if self.measures:
            self._stage("sensitivity", self.work.sensitivities)
        chosen = self._stage("choose", functools.partial(self.work.choose, self.measures))
        made = self._stage("quantize", functools.partial(self.work.quantize, chosen))
        found = self._stage("compare", self.work.compare)
        comparison = Comparison(
            figures_from_json(found["base"]),
            tuple(map(figures_from_json, found["models"])),
            found["seconds"],
        )
        card = Card(
            self.origin.provenance,
            self.origin.license,
            comparison,
            self.api.inspect_model(files.out),
            self.target,
            self.aim,
            chosen,
            made,
            sorted(self.texts.calibration),
            sorted(self.texts.tests),
            self.options,
        )
        with self.stages.stage("Write the model card and the page"):
            for path, text in (
                (files.page, html_page(comparison, card.facts())),
                (files.card, model_card(card)),
                (files.figures, json.dumps(comparison.to_json(), indent=1) + "\n"),
            ):
                with PartFile(path) as part:
                    part.write(text.encode())
                self.stages.say(printable(os.fspath(path), 400))
        if self.options.clean:
            files.remove_work()
        self.write("\n" + text_table(comparison, differences=False))
        return comparison

    def _stage(self, name: str, run: Callable[[], Found]) -> dict[str, Any]:
        """Run a stage, unless an earlier run has finished it."""
        if (result := self.finished.result(name, self.keys[name])) is not None:
            with self.stages.stage(_TITLES[name]):
                self.stages.say("already done")
            return result
        with self.stages.stage(_TITLES[name]):
            files, result = run()
            return self.finished.record(name, self.keys[name], files, **result)
