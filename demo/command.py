"""`iqforge demo`: the whole chain on the embedded model, from a checkpoint to a report of what each
type costs and loses.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MalformedFileError, UsageError, printable

if TYPE_CHECKING:
    from .report import Baseline, Demo, Measurement, Stage
    from .text import Texts

MODEL = Path(__file__).resolve().parent / "model"
TYPES = ("Q8_0", "Q6_K", "IQ4_K", "IQ4_K_R4", "IQ4_KS", "Q4_K", "IQ4_NL", "IQ3_K", "IQ2_K")
EMBEDDING_TYPE = "Q8_0"
SPLIT_TYPE, SHARD_TENSORS = "IQ4_K", 16
N_CTX = 512
DEFAULT_CHUNKS = 60
_INDENT = " " * 6


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert the embedded model, collect an importance matrix, quantize to several types, split"
        " and merge, measure each type against the unquantized model, and write report.html. Needs"
        " no network; takes a minute or two."
    )
    parser.add_argument(
        "--dir",
        default="iqforge-demo",
        metavar="DIR",
        help="folder for all files; older ones of a demo are replaced (default: iqforge-demo)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=DEFAULT_CHUNKS,
        metavar="N",
        help=(
            f"windows of {N_CTX} tokens to calibrate and to measure on, at most (default:"
            f" {DEFAULT_CHUNKS})"
        ),
    )


def run(args: argparse.Namespace, api) -> int:
    from ..formats.output import PartFile
    from .report import html_report, text_table

    if args.chunks < 1:
        raise UsageError(f"--chunks is {args.chunks}, expected 1 or more")
    chain = Chain(api, Path(args.dir), args.chunks)
    demo = chain.run()
    print("\n" + text_table(demo))
    print(
        "\nbpw: bits per weight over all tensors. KLD: divergence of the predictions from those of"
        " the BF16 model.\nIQ4_K_R4 is IQ4_K with rows interleaved by fours: the same values in"
        " another order, so the same figures."
    )
    path = chain.folder / "report.html"
    with PartFile(path) as file:
        file.write(html_report(demo).encode())
    print(f"\ntotal {demo.seconds:.1f} s, report: {printable(path, 400)}")
    return 0


class Chain:
    """The stages in order, in one folder. Each prints what it does and how long that took."""

    def __init__(self, api, folder: Path, chunks: int):
        self.api, self.folder, self.chunks = api, folder, chunks
        self.stages: list[Stage] = []
        self.base = self.file("BF16")
        self.imatrix, self.predictions = folder / "imatrix.dat", folder / "base.kld"
        self.calibration_text, self.measuring_text = (
            folder / "calibration.txt",
            folder / "measuring.txt",
        )

    def file(self, type: str) -> Path:
        return self.folder / f"demo-{type}.gguf"

    def run(self) -> Demo:
        """OutputError where the folder cannot be written, NotFoundError where this Python has no
        text.
        """
        from .report import Demo

        texts = self.prepare()
        n_parameters, base_bits = self.convert()
        n_calibration = self.collect()
        quantized = self.quantize()
        split = self.split_and_merge()
        baseline, n_measuring = self.measure_base(base_bits)
        measurements = self.measure(quantized)
        command = shlex.join(
            ["iqforge", "demo", "--dir", str(self.folder), "--chunks", str(self.chunks)]
        )
        return Demo(
            baseline,
            measurements,
            self.stages,
            texts,
            n_parameters,
            N_CTX,
            n_calibration,
            n_measuring,
            EMBEDDING_TYPE,
            split,
            command,
        )

    def prepare(self) -> Texts:
        """Make the folder and the two texts."""
        from ..formats.output import PartFile, output_error
        from ..quantize.run.stream import default_threads
        from ..version import __version__
        from .text import choose_texts

        texts = choose_texts()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise output_error(error, self.folder) from None
        for path, text in (
            (self.calibration_text, texts.calibration),
            (self.measuring_text, texts.measuring),
        ):
            with PartFile(path) as file:
                file.write(text.encode())
        print(
            f"iqforge {__version__} demo on {default_threads()} cores, files in"
            f" {printable(self.folder, 400)}"
        )
        return texts

    def convert(self) -> tuple[int, float]:
        """The checkpoint as BF16. Returns the number of parameters and bits per weight."""
        with (
            self.stage(
                "Convert the checkpoint to GGUF",
                "convert",
                MODEL,
                "--outfile",
                self.base,
                "--outtype",
                "bf16",
                "--model-name",
                "iqforge demo",
            ),
            _Bar() as bar,
        ):
            self.api.convert_model(MODEL, self.base, "bf16", name="iqforge demo", progress=bar)
            with self.api.open_source(self.base) as model:
                n_elements, n_bytes = (
                    sum(t.n_elements for t in model.tensors),
                    sum(t.n_bytes for t in model.tensors),
                )
                _say(
                    f"{len(model.tensors)} tensors, {n_elements / 1e6:.2f} M parameters,"
                    f" {os.path.getsize(self.base) / 1e6:.2f} MB"
                )
        return n_elements, 8 * n_bytes / n_elements

    def collect(self) -> int:
        """The importance matrix. Returns the number of windows it was collected from."""
        with (
            self.stage(
                "Collect an importance matrix",
                "imatrix",
                "-m",
                self.base,
                "-f",
                self.calibration_text,
                "-c",
                N_CTX,
                "--chunks",
                self.chunks,
                "-o",
                self.imatrix,
            ),
            _Bar() as bar,
        ):
            imatrix = self.api.collect_imatrix(
                self.base,
                self.calibration_text,
                self.imatrix,
                n_ctx=N_CTX,
                chunks=self.chunks,
                progress=bar.window,
            )
            _say(
                f"{len(imatrix.entries)} tensors, {imatrix.chunk_count} windows of"
                f" {imatrix.chunk_size} tokens"
            )
        return imatrix.chunk_count

    def quantize(self) -> dict[str, tuple[float, float]]:
        """Bits per weight and seconds by type."""
        done = {}
        with self.stage(
            f"Quantize to {len(TYPES)} types (the first time, the searches are compiled)",
            "quantize",
            "--pure",
            "--imatrix",
            self.imatrix,
            "--token-embedding-type",
            EMBEDDING_TYPE,
            self.base,
            self.file("TYPE"),
            "TYPE",
        ):
            for type in TYPES:
                started = time.monotonic()
                with _Bar(type) as bar:
                    report = self.api.quantize_model(
                        self.base,
                        self.file(type),
                        type,
                        self.imatrix,
                        pure=True,
                        token_embedding_type=EMBEDDING_TYPE,
                        restart=True,
                        progress=bar,
                    )
                done[type] = report.bits_per_weight, time.monotonic() - started
                _say(
                    f"{type:<9} {report.bits_per_weight:5.2f} bpw"
                    f" {os.path.getsize(self.file(type)) / 1e6:7.2f} MB {done[type][1]:7.1f} s"
                )
        return done

    def split_and_merge(self) -> str:
        """Split one of the files, merge the shards, compare. Returns what was found equal."""
        from ..formats.output import output_error

        source, merged = self.file(SPLIT_TYPE), self.folder / f"demo-{SPLIT_TYPE}-merged.gguf"
        prefix = self.folder / f"demo-{SPLIT_TYPE}"
        with self.stage(
            f"Split {SPLIT_TYPE} into shards and merge them",
            "gguf-split",
            "--split",
            "--split-max-tensors",
            SHARD_TENSORS,
            source,
            prefix,
        ):
            paths = self.api.split_model(source, prefix, max_tensors=SHARD_TENSORS)
            try:
                merged.unlink(missing_ok=True)  # merging never overwrites
            except OSError as error:
                raise output_error(error, merged) from None
            self.api.merge_model(paths[0], merged)
            found = compare(self.api, source, merged)
            _say(f"{len(paths)} shards; {found}")
        return (
            f"{SPLIT_TYPE} was cut into {len(paths)} shards of at most {SHARD_TENSORS} tensors and"
            f" merged again: {found}."
        )

    def measure_base(self, bits: float) -> tuple[Baseline, int]:
        """Perplexity of the unquantized model, its predictions kept. Returns it and the number of
        windows.
        """
        from .report import Baseline

        with (
            self.stage(
                "Measure the unquantized model and keep its predictions",
                "perplexity",
                "-m",
                self.base,
                "-f",
                self.measuring_text,
                "-c",
                N_CTX,
                "--chunks",
                self.chunks,
                "--kl-divergence-base",
                self.predictions,
            ),
            _Bar() as bar,
        ):
            result = self.api.measure_perplexity(
                self.base,
                self.measuring_text,
                n_ctx=N_CTX,
                chunks=self.chunks,
                kl_divergence_base=self.predictions,
                progress=bar.window,
            )
            _say(
                f"PPL = {result.perplexity:.4f} +/- {result.uncertainty:.5f} over"
                f" {result.n_windows} windows of {N_CTX} tokens, {result.tokens_per_second:.0f}"
                " tokens/s"
            )
        size = os.path.getsize(self.base)
        return (
            Baseline("BF16", bits, size, (result.perplexity, result.uncertainty), result.seconds),
            result.n_windows,
        )

    def measure(self, quantized: dict[str, tuple[float, float]]) -> list[Measurement]:
        """Perplexity and divergence of every type."""
        from .report import Measurement

        done = []
        with self.stage(
            "Measure every type against it",
            "perplexity",
            "-m",
            self.file("TYPE"),
            "--kl-divergence-base",
            self.predictions,
            "--kl-divergence",
        ):
            for type, (bits, seconds) in quantized.items():
                with _Bar(type) as bar:
                    result = self.api.measure_perplexity(
                        self.file(type),
                        None,
                        kl_divergence_base=self.predictions,
                        kl_divergence=True,
                        progress=bar.window,
                    )
                s = result.statistics
                done.append(
                    Measurement(
                        type,
                        bits,
                        os.path.getsize(self.file(type)),
                        s.ppl,
                        s.mean_kld,
                        s.kld_quantiles(0.99)[0],
                        s.same_top,
                        seconds,
                        result.seconds,
                    )
                )
                _say(
                    f"{type:<9} PPL {s.ppl[0]:8.4f}   mean KLD {s.mean_kld[0]:.6f}"
                    f" {result.seconds:7.1f} s"
                )
        return done

    @contextmanager
    def stage(self, title: str, *words: object) -> Iterator[None]:
        """Prints a heading with the command that does the same, takes the time."""
        from .report import Stage

        command = shlex.join(["iqforge", *map(str, words)])
        print(
            f"\n[{len(self.stages) + 1}] {title}\n{_INDENT}{printable(command, 2000)}", flush=True
        )
        started = time.monotonic()
        yield
        self.stages.append(Stage(title, command, time.monotonic() - started))
        _say(f"took {self.stages[-1].seconds:.1f} s")


def compare(api, one: Path, other: Path) -> str:
    """What two model files have in common if they hold the same. MalformedFileError naming the
    first difference if not.

    `split.*` keys do not count: merging leaves them behind.
    """
    with api.open_source(one) as a, api.open_source(other) as b:
        keys, others = (
            {k: v for k, v in f.metadata.items() if not k.startswith("split.")} for f in (a, b)
        )
        if keys != others:
            different = sorted(
                k for k in keys.keys() | others.keys() if keys.get(k) != others.get(k)
            )
            raise MalformedFileError(
                f"keys differ from those of {printable(one, 400)}: {', '.join(different)}",
                file=other,
            )
        if a.tensors != b.tensors:
            raise MalformedFileError(
                f"the tensor table differs from that of {printable(one, 400)}", file=other
            )
        for tensor in a.tensors:
            if (
                a.read_bytes(tensor, 0, tensor.n_bytes) != b.read_bytes(tensor, 0, tensor.n_bytes)
            ).any():
                raise MalformedFileError(
                    f"data differ from those in {printable(one, 400)}",
                    file=other,
                    tensor=tensor.name,
                )
        return (
            f"{len(a.tensors)} tensors with {sum(t.n_bytes for t in a.tensors):,} bytes and"
            f" {len(keys)} keys are equal"
        )


def _say(line: str) -> None:
    print(_INDENT + line, flush=True)


class _Bar:
    """A progress bar on stderr where that is a terminal: of a conversion or quantization, or
    (`window`) of an evaluation.
    """

    def __init__(self, label: str = ""):
        self.label, self._bar = label, None

    def _open(self, total: int, unit: str, scale: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            unit=unit,
            unit_scale=scale,
            desc=self.label or None,
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )

    def begin(self, planned) -> None:
        self._open(sum(tensor.source.n_elements for tensor in planned), "el", True)

    def advance(self, n_elements: int) -> None:
        self._bar.update(n_elements)

    def tensor_done(self, index: int, report) -> None:
        pass

    def end(self, report) -> None:
        self.close()

    def window(self, progress) -> None:
        if self._bar is None:
            self._open(progress.n_windows, "window", False)
        self._bar.update(progress.window - self._bar.n)
        if progress.window == progress.n_windows:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
