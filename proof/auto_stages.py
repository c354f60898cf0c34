"""The stages of `iqforge auto`, each of which writes whole files and returns what the next ones and
the model card need.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ValidationError, printable
from ..formats.output import PartFile, refuse_same_file
from ..quantize.plan.recipe import Recipe
from .auto_plan import PROBE_BYTES, probe_layers
from .auto_texts import sample
from .figures import size_of
from .progress import Bar, StatsBar

if TYPE_CHECKING:
    from ..runtime.options import LoadOptions
    from .auto_options import AutoOptions
    from .auto_plan import Aim
    from .auto_texts import AutoTexts
    from .origin import Origin

Found = tuple[list[Path], dict[str, Any]]  # the files of a stage, and its results as JSON
Shown = TypeVar("Shown", Bar, StatsBar)


class AutoFiles:
    """Where everything is: `folder` can be uploaded without `work`."""

    def __init__(self, folder: Path, origin: Origin, name: str | None, label: str):
        name = name or origin.name
        self.folder, self.work = folder, folder / "work"
        self.base = Path(origin.address) if origin.is_gguf else self.work / f"{name}.gguf"
        self.imatrix = folder / f"{name}.imatrix.gguf"
        self.sensitivity = folder / f"{name}.sensitivity.json"
        self.types = folder / f"{name}-{label}.plan.json"
        self.out = folder / f"{name}-{label}.gguf"
        self.card, self.page = folder / "README.md", folder / "compare.html"
        self.figures = folder / "figures.json"
        self.tests, self.compared = self.work / "test", self.work / "compare"
        self.stages = self.work / "stages.json"

    def refuse_inputs(self, inputs: Iterable[str | os.PathLike]) -> None:
        """OutputError if a result would replace one of these, or lie among a checkpoint's files."""
        refuse_same_file(self.folder, inputs)
        for file in (self.imatrix, self.types, self.out, self.card, self.page, self.figures):
            refuse_same_file(file, inputs)

    def remove_work(self) -> None:
        """Remove what this program wrote to `work`, and the folder if nothing else is in it."""
        own = [
            *([self.base] if self.base.parent == self.work else []),
            self.stages,
            *self.tests.glob("*.txt"),
            *self.compared.glob("base-*.kld"),
            *self.compared.glob("figures-*.json"),
        ]
        for file in own:
            file.unlink(missing_ok=True)
        for folder in (self.tests, self.compared, self.work):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


class AutoStages:
    """The work of the stages. say: is given a line about each result. bars: show progress on a
    terminal.
    """

    def __init__(
        self,
        api,
        origin: Origin,
        files: AutoFiles,
        texts: AutoTexts,
        aim: Aim,
        options: AutoOptions,
        load: LoadOptions,
        say: Callable[[str], None],
        bars: bool,
    ):
        self.api, self.origin, self.files, self.texts = api, origin, files, texts
        self.aim, self.options, self.load = aim, options, load
        self.say, self.bars = say, bars

    def convert(self) -> Found:
        """Convert the checkpoint to an unquantized GGUF file. Return its path."""
        base = self.files.base
        with self._shown(Bar()) as bar:
            self.api.convert_model(self.origin.address, base, name=self.options.name, progress=bar)
        self.say(f"{printable(base, 400)}: {size_of(base.stat().st_size)}")
        return [base], {}

    def collect(self) -> Found:
        """Collect the importance matrix on the calibration texts."""
        o = self.options
        with self._shown(Bar()) as bar:
            imatrix = self.api.collect_imatrix(
                self.files.base,
                list(self.texts.calibration.values()),
                self.files.imatrix,
                dataset=", ".join(self.texts.calibration),  # no paths: bytes depend on it
                n_ctx=o.n_ctx,
                chunks=o.chunks,
                resume=True,
                load=self.load,
                progress=None if bar is None else bar.chunk,
            )
        self.say(f"{len(imatrix.entries)} tensors, {imatrix.chunk_count} chunks of {o.n_ctx}")
        return [self.files.imatrix], {"chunks": imatrix.chunk_count, "n_ctx": o.n_ctx}

    def sensitivities(self) -> Found:
        """Measure how much each tensor suffers, on a sample of the calibration texts."""
        with self._shown(Bar()) as bar:
            probes = self.api.measure_sensitivity(
                self.files.base,
                sample(self.texts.calibration.values(), PROBE_BYTES),
                self.files.sensitivity,
                self.files.imatrix,
                n_ctx=self.options.n_ctx,
                chunks=-1,
                layers=probe_layers(self.origin.n_probes),
                load=replace(self.load, precision=None),
                progress=None if bar is None else bar.probe,
            )
        self.say(f"{len(probes)} sensitivities")
        return [self.files.sensitivity], {}

    def choose(self, measured: bool) -> Found:
        """measured: `sensitivities` has run."""
        with self._shown(StatsBar()) as bar:
            fitted = self.api.recipe_for_target(
                self.files.base,
                self.files.imatrix,
                size=self.aim.n_bytes,
                bpw=self.aim.bpw,
                damage=self.files.sensitivity if measured else self.options.damage,
                types=self.options.types,
                device=self.load.device,
                allow_requantize=self.origin.is_gguf,
                progress=bar,
            )
        self.api.quantize_model(
            self.files.base,
            None,
            fitted.recipe,
            self.files.imatrix,
            dry_run=True,
            estimate=False,
            save_plan=self.files.types,
        )
        self.say(f"{fitted.bits_per_weight:.4f} bits per weight")
        if fitted.is_measured:
            self.say(f"predicted mean KL divergence {fitted.predicted_kld:.5f}")
        else:  # sensitivities of roles have no scale
            self.say("types ranked by errors and roles")
        return [self.files.types], {
            "type": fitted.recipe.type,
            "tensor_types": fitted.recipe.tensor_types,
            "bits_per_weight": fitted.bits_per_weight,
            "predicted_kld": fitted.predicted_kld if fitted.is_measured else None,
            "sensitivities": fitted.sensitivities,
        }

    def quantize(self, chosen: dict[str, Any]) -> Found:
        """Quantize with the types that `choose` returned. Raise ValidationError if the file is
        larger than the target.
        """
        out, wanted = self.files.out, self.aim.n_bytes
        # Not the plan file: it names all tensors, which makes the keys of the file longer.
        recipe = Recipe(
            chosen["type"],
            tensor_types=chosen["tensor_types"],
            allow_requantize=self.origin.is_gguf,
        )
        with self._shown(Bar()) as bar:
            report = self.api.quantize_model(
                self.files.base,
                out,
                recipe,
                self.files.imatrix,
                device=self.load.device,
                validate=True,
                progress=bar,
            )
        size = out.stat().st_size
        if wanted is not None and size > wanted:
            raise ValidationError(f"has {size} bytes, more than the {wanted} wanted", file=out)
        share = "" if wanted is None else f", {100 * size / wanted:.2f} % of the target"
        self.say(f"{printable(out, 400)}: {size_of(size)}{share}; every tensor was read back")
        with open(out, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return [out], {"sha256": sha256, "bits_per_weight": report.bits_per_weight}

    def compare(self) -> Found:
        """Compare the file with the unquantized model on the test texts."""
        texts = []
        for name, text in self.texts.tests.items():
            texts.append(self.files.tests / f"{name}.txt")
            texts[-1].parent.mkdir(exist_ok=True)
            with PartFile(texts[-1]) as part:
                part.write(text.encode())
        comparison = self.api.compare_models(
            self.files.base,
            [self.files.out],
            texts,
            self.files.compared,
            n_ctx=self.options.n_ctx,
            chunks=self.options.test_chunks,
            load=self.load,
            progress=(lambda what: Bar(what).chunk) if self.bars else None,
        )
        return [], comparison.to_json()

    @contextmanager
    def _shown(self, bar: Shown) -> Iterator[Shown | None]:
        """Yield the bar, or None if nothing is shown."""
        try:
            yield bar if self.bars else None
        finally:
            bar.close()
