"""The progress bar of chains of stages."""

from __future__ import annotations

from tqdm import tqdm

from ..quantize.report.bars import CompileBar
from ..quantize.report.stats import StatsProgress
from ..quantize.run.report import RunProgress


class Bar(CompileBar, RunProgress):
    """A progress bar on stderr, shown only on a terminal.

    Conversion and quantization report to its methods; evaluation calls `chunk`.
    """

    def __init__(self, label: str = ""):
        super().__init__()
        self.label = label
        self._bar: tqdm | None = None

    def _open(self, total: int, unit: str, scale: bool) -> tqdm:
        self._bar = tqdm(
            total=total,
            unit=unit,
            unit_scale=scale,
            desc=self.label or None,
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )
        return self._bar

    def begin(self, planned) -> None:
        """Show a bar of the elements of a plan."""
        self._open(sum(tensor.source.n_elements for tensor in planned), "el", True)

    def advance(self, n_elements: int) -> None:
        """Move the bar by `n_elements` elements."""
        if self._bar is not None:
            self._bar.update(n_elements)

    def end(self, report) -> None:
        """Remove the bar; the report is not shown."""
        self.close()

    def probe(self, done: int, total: int, probe: object) -> None:
        """One more sensitivity is measured."""
        bar = self._bar or self._open(total, "tensor", False)
        bar.update(done - bar.n)

    def chunk(self, progress) -> None:
        """Show a bar of chunks and move it to this one; remove it after the last."""
        bar = self._bar
        if bar is None:
            bar = self._open(progress.n_chunks, "chunk", False)
        bar.update(progress.chunk - bar.n)
        if progress.chunk == progress.n_chunks:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class StatsBar(CompileBar, StatsProgress):
    """The bar of measuring errors of types, shown only on a terminal."""

    def __init__(self, label: str = ""):
        super().__init__()
        self.label = label
        self._bar: tqdm | None = None

    def begin(self, tensors, n_elements: int) -> None:
        """Show a bar of `n_elements` elements."""
        self.close()
        self._bar = tqdm(
            total=n_elements,
            unit="el",
            unit_scale=True,
            desc=self.label or None,
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )

    def advance(self, n_elements: int) -> None:
        """Move the bar by `n_elements` elements."""
        if self._bar is not None:
            self._bar.update(n_elements)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
