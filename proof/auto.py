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
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert.source import CheckpointSource
from ..errors import UsageError, ValidationError, printable
from ..formats.disk import check_disks, output_error
from ..formats.output import PartFile
from ..formats.source import Source
from ..imatrix.default_texts import DEFAULT, default_texts
from ..quantize.plan.recipe import Recipe
from ..runtime.evaluate.chunks import read_text
from ..runtime.evaluate.compact_base import entries, record_type
from ..runtime.evaluate.comparison import Comparison, figures_from_json
from ..runtime.options import LoadOptions
from ..version import __version__
from . import auto_plan
from .auto_plan import Planned, Target
from .card import LICENSE_KEYS, Card, model_card
from .compare_page import html_page
from .figures import size_of, text_table
from .progress import Bar, StatsBar
from .stages import Finished, Stages, digest, say

if TYPE_CHECKING:
    from ..convert.checkpoint.folder import Checkpoint
    from ..convert.hub.repository import Repository

_HELD_OUT = 5  # one part of so many of every text is measured, and not calibrated with
_REFERENCE = "IQ4_K"  # the preset whose speed the plan is estimated from


@dataclass(frozen=True)
class AutoOptions:
    """How `Auto` works. texts: calibration texts (`default`: the one that comes with iqforge).
    tests: texts to measure on; without, the last fifth of every calibration text is held out for
    it. chunks, test_chunks: at most so many chunks of each text. damage, types: see
    `recipe_for_target`.
    """

    texts: tuple[str, ...] = (DEFAULT,)
    tests: tuple[str, ...] = ()
    n_ctx: int = 512
    chunks: int = -1
    test_chunks: int = 20
    damage: str | None = None
    types: tuple[str, ...] = ()
    name: str | None = None
    clean: bool = False


class Auto:
    """The chain for one source, folder and target. `plan` says what `run` will do."""

    def __init__(
        self,
        api,
        source: str,
        folder: Path,
        target: Target,
        options: AutoOptions,
        load: LoadOptions,
    ):
        self.api, self.target, self.options, self.load = api, target, options, load
        self.folder, self.work = folder, folder / "work"
        self.source, self.provenance = self._identify(source)
        self.stages, self.finished = Stages(), Finished(self.work / "stages.json")
        self.calibration, self.tests = self._divide()
        self.aim = auto_plan.aim_of(target, api, self.source, load)
        name = options.name or self.provenance["name"]
        self.base = Path(self.source) if self.is_gguf else self.work / f"{name}.gguf"
        self.imatrix = folder / f"{name}.imatrix.gguf"
        self.types = folder / f"{name}-{target.label}.plan.json"
        self.out = folder / f"{name}-{target.label}.gguf"
        self._keys()

    @property
    def is_gguf(self) -> bool:
        return os.path.isfile(self.source)

    @property
    def is_remote(self) -> bool:
        return self.source.startswith("hf://")

    def _identify(self, source: str) -> tuple[str, dict[str, Any]]:
        """Return the source, pinned to a commit if it is remote, and what tells it from others."""
        with self.api.open_source(source) as opened:
            origin = opened.origin
            checkpoint = origin.checkpoint if isinstance(origin, CheckpointSource) else None
            self.n_parameters = sum(tensor.n_elements for tensor in opened.tensors)
            self.n_vocab = self._vocabulary(opened)
            self.license = {
                key: str(opened.metadata[f"general.{stored}"].data)
                for key, stored in LICENSE_KEYS.items()
                if f"general.{stored}" in opened.metadata
            }
            self.active = auto_plan.active_parameters(opened)
            self.choose_share = auto_plan.choose_seconds(opened, 1.0)
            self.base_bytes = sum(tensor.n_bytes for tensor in opened.tensors)
            if source.startswith("hf://") and (repository := _repository(checkpoint)) is not None:
                address = f"hf://{repository.name}@{repository.commit}"
                name = repository.name.rsplit("/", 1)[-1]
                return address, {
                    "name": name,
                    "repository": repository.name,
                    "commit": repository.commit,
                }
            files = [[file, *_stat(file)] for file in sorted(map(str, opened.files))]
        name = os.path.basename(os.path.abspath(source)).removesuffix(".gguf")
        return source, {"name": name, "files": files}

    @staticmethod
    def _vocabulary(source: Source) -> int:
        tokens = source.metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise UsageError(
                "has no vocabulary, which an importance matrix needs", file=source.path
            )
        return len(tokens.data)

    def _divide(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the calibration texts and the texts that are measured, by name."""
        given: dict[str, str] = {}
        for path in self.options.texts:
            if path == DEFAULT:
                given |= {name.replace("/", "-"): text for text, name in default_texts()}
            else:
                given[_unique(Path(path).stem, given)] = read_text(path)
        tests: dict[str, str] = {}
        for path in self.options.tests:
            tests[_unique(Path(path).stem, tests)] = read_text(path)
        if tests:
            return given, tests
        calibration = {}
        for name, text in given.items():
            cut = text.rfind("\n", 0, len(text) * (_HELD_OUT - 1) // _HELD_OUT) + 1
            calibration[name], tests[name] = text[:cut], text[cut:]
        return calibration, tests

    def _keys(self) -> None:
        """Set the digest of every stage: of its own options and of the stages before it."""
        o, load = self.options, asdict(self.load)
        texts = [hashlib.sha256(t.encode()).hexdigest() for t in self.calibration.values()]
        tests = [hashlib.sha256(t.encode()).hexdigest() for t in self.tests.values()]
        damage = _stat(o.damage) if o.damage else None
        convert = digest(__version__, self.source, self.provenance)
        collect = digest(convert, texts, o.n_ctx, o.chunks)
        choose = digest(collect, asdict(self.aim), damage, o.types)
        compare = digest(choose, tests, o.n_ctx, o.test_chunks, load)
        self.keys = {
            "convert": convert,
            "imatrix": collect,
            "choose": choose,
            "quantize": choose,
            "compare": compare,
        }

    def plan(self) -> list[Planned]:
        """Return the stages with estimates. Tries a search for seconds, unless everything is done.
        Raise OutputError if the disk has too little space.
        """
        o = self.options
        done = {
            name: self.finished.result(name, key) is not None for name, key in self.keys.items()
        }
        calibrate = auto_plan.token_count(self.calibration, o.chunks, o.n_ctx)
        measure = auto_plan.token_count(self.tests, o.test_chunks, o.n_ctx)
        rate = quantize = 1.0
        if not all(done.values()):
            device = self.load.device if self.load.device != "auto" else "cpu"
            rate = auto_plan.flops_per_second(device) / (2 * self.active)  # tokens/s
        if not done["quantize"]:
            estimate = self.api.quantize_model(
                self.source,
                self._place(),
                _REFERENCE,
                dry_run=True,
                estimate=True,
                device=self.load.device,
                allow_requantize=self.is_gguf,
            ).estimate
            quantize = estimate.working + estimate.finishing
        record = record_type(*entries(self.n_vocab)).itemsize
        planned = [
            Planned(
                "convert",
                "Convert the checkpoint to GGUF",
                auto_plan.convert_seconds(self.base_bytes, self.is_remote),
                self.base_bytes,
                done["convert"],
            ),
            Planned(
                "imatrix", "Collect an importance matrix", calibrate / rate, 0, done["imatrix"]
            ),
            Planned("choose", "Choose types", quantize * self.choose_share, 0, done["choose"]),
            Planned(
                "quantize",
                "Quantize and read back",
                quantize * 1.3,
                self.aim.file_bytes(self.n_parameters),
                done["quantize"],
            ),
            Planned(
                "compare",
                "Compare with the unquantized model",
                2.5 * measure / rate,
                record * measure // 2,
                done["compare"],
            ),
        ]
        if self.is_gguf:
            planned = planned[1:]
        check_disks([(self._place(), sum(one.n_bytes for one in planned if not one.is_done))])
        return planned

    def _place(self) -> Path:
        """Return a path on the disk of the results: their folder may not exist yet."""
        folder = self.folder.absolute()
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        return folder / self.out.name

    def run(self) -> Comparison:
        """Run what is missing, and return the figures of the result."""
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise output_error(error, self.work) from None
        if not self.is_gguf:
            self._stage("convert", "Convert the checkpoint to GGUF", self._convert)
        self._stage("imatrix", "Collect an importance matrix", self._collect)
        chosen = self._stage("choose", "Choose types", self._choose)
        # Not the plan file: it names all tensors, which makes the keys of the file longer.
        recipe = Recipe(
            chosen["type"],
            tensor_types=chosen["tensor_types"],
            allow_requantize=self.is_gguf,
        )
        made = self._stage(
            "quantize", "Quantize and read back", functools.partial(self._quantize, recipe)
        )
        found = self._stage("compare", "Compare with the unquantized model", self._compare)
        comparison = Comparison(
            figures_from_json(found["base"]),
            tuple(map(figures_from_json, found["models"])),
            found["seconds"],
        )
        card = Card(
            self.provenance,
            self.license,
            comparison,
            self.api.inspect_model(self.out),
            self.target,
            self.aim,
            chosen,
            made,
            sorted(self.calibration),
            sorted(self.tests),
            self.options,
        )
        with self.stages.stage("Write the model card and the page"):
            page = html_page(comparison, card.facts())
            for path, text in (
                (self.folder / "compare.html", page),
                (self.folder / "README.md", model_card(card)),
                (self.folder / "figures.json", json.dumps(comparison.to_json(), indent=1) + "\n"),
            ):
                with PartFile(path) as part:
                    part.write(text.encode())
                say(f"{printable(path, 400)}")
        if self.options.clean:
            shutil.rmtree(self.work)
        print("\n" + text_table(comparison, differences=False))
        return comparison

    def _stage(self, name: str, title: str, run) -> dict[str, Any]:
        """Run a stage, unless an earlier run has finished it."""
        if (result := self.finished.result(name, self.keys[name])) is not None:
            with self.stages.stage(title):
                say("already done")
            return result
        with self.stages.stage(title):
            files, result = run()
            return self.finished.record(name, self.keys[name], files, **result)

    def _convert(self) -> tuple[list[Path], dict[str, Any]]:
        with Bar() as bar:
            self.api.convert_model(self.source, self.base, name=self.options.name, progress=bar)
        say(f"{printable(self.base, 400)}: {size_of(self.base.stat().st_size)}")
        return [self.base], {}

    def _collect(self) -> tuple[list[Path], dict[str, Any]]:
        with Bar() as bar:
            imatrix = self.api.collect_imatrix(
                self.base,
                list(self.calibration.values()),
                self.imatrix,
                dataset=", ".join(self.calibration),  # no paths: bytes depend on it
                n_ctx=self.options.n_ctx,
                chunks=self.options.chunks,
                resume=True,
                load=self.load,
                progress=bar.chunk,
            )
        say(f"{len(imatrix.entries)} tensors, {imatrix.chunk_count} chunks of {self.options.n_ctx}")
        return [self.imatrix], {"chunks": imatrix.chunk_count, "n_ctx": self.options.n_ctx}

    def _choose(self) -> tuple[list[Path], dict[str, Any]]:
        with StatsBar() as bar:
            fitted = self.api.recipe_for_target(
                self.base,
                self.imatrix,
                size=self.aim.n_bytes,
                bpw=self.aim.bpw,
                damage=self.options.damage,
                types=self.options.types,
                device=self.load.device,
                allow_requantize=self.is_gguf,
                progress=bar,
            )
        self.api.quantize_model(
            self.base,
            None,
            fitted.recipe,
            self.imatrix,
            dry_run=True,
            estimate=False,
            save_plan=self.types,
        )
        say(f"{fitted.bits_per_weight:.4f} bits per weight")
        say(f"predicted mean KL divergence {fitted.predicted_kld:.5f}")
        return [self.types], {
            "type": fitted.recipe.type,
            "tensor_types": fitted.recipe.tensor_types,
            "bits_per_weight": fitted.bits_per_weight,
            "predicted_kld": fitted.predicted_kld,
            "sensitivities": fitted.sensitivities,
        }

    def _quantize(self, recipe: Recipe) -> tuple[list[Path], dict[str, Any]]:
        with Bar() as bar:
            report = self.api.quantize_model(
                self.base,
                self.out,
                recipe,
                self.imatrix,
                device=self.load.device,
                validate=True,
                progress=bar,
            )
        size = self.out.stat().st_size
        wanted = self.aim.n_bytes
        if wanted is not None and size > wanted:
            raise ValidationError(f"has {size} bytes, more than the {wanted} wanted", file=self.out)
        share = "" if wanted is None else f", {100 * size / wanted:.2f} % of the target"
        say(f"{printable(self.out, 400)}: {size_of(size)}{share}; every tensor was read back")
        with open(self.out, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return [self.out], {"sha256": sha256, "bits_per_weight": report.bits_per_weight}

    def _compare(self) -> tuple[list[Path], dict[str, Any]]:
        texts = []
        for name, text in self.tests.items():
            texts.append(self.work / "test" / f"{name}.txt")
            texts[-1].parent.mkdir(exist_ok=True)
            with PartFile(texts[-1]) as part:
                part.write(text.encode())
        comparison = self.api.compare_models(
            self.base,
            [self.out],
            texts,
            self.work / "compare",
            n_ctx=self.options.n_ctx,
            chunks=self.options.test_chunks,
            load=self.load,
            progress=lambda what: Bar(what).chunk,
        )
        return [], comparison.to_json()


def _repository(checkpoint: Checkpoint | None) -> Repository | None:
    from ..convert.hub.checkpoint import RemoteCheckpoint  # needs packages for HTTP

    return checkpoint.repository if isinstance(checkpoint, RemoteCheckpoint) else None


def _stat(path: str | os.PathLike) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _unique(name: str, taken: dict[str, str]) -> str:
    number, found = 2, name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found
