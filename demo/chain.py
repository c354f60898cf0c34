"""The stages of the demo, each of them a call of the Python API."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from ..errors import printable
from ..proof.progress import Bar
from ..proof.stages import Stages
from .comparison import compare
from .figures import Baseline, Demo, Measurement
from .text import N_CTX, Texts, choose_texts

MODEL = Path(__file__).resolve().parent / "model"
TYPES = ("Q8_0", "Q6_K", "IQ4_K", "IQ4_K_R4", "IQ4_KS", "Q4_K", "IQ4_NL", "IQ3_K", "IQ2_K")
EMBEDDING_TYPE = "Q8_0"
SPLIT_TYPE, SHARD_TENSORS = "IQ4_K", 16


class Chain:
    """The stages in order, in one folder. Each prints what it does and how long it took."""

    def __init__(self, api, folder: Path, chunks: int):
        self.api, self.folder, self.chunks = api, folder, chunks
        self.stages = Stages()
        self.stage = self.stages.stage
        self.base = self.file("BF16")
        self.imatrix, self.predictions = folder / "imatrix.dat", folder / "base.kld"
        self.calibration_text, self.measuring_text = (
            folder / "calibration.txt",
            folder / "measuring.txt",
        )

    def file(self, type: str) -> Path:
        """Return the path of the file of a type."""
        return self.folder / f"demo-{type}.gguf"

    def run(self) -> Demo:
        """Run all stages and return their figures.

        Raises OutputError if the folder cannot be written, and NotFoundError if this Python has no
        text for the demo.
        """
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
            self.stages.done,
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
        """Create the folder and write the two texts."""
        from ..formats.disk import output_error
        from ..formats.output import PartFile
        from ..quantize.run.parallel import default_threads
        from ..version import __version__

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
        """Convert the checkpoint to BF16. Return the parameter count and bits per weight."""
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
            Bar() as bar,
        ):
            self.api.convert_model(MODEL, self.base, "bf16", name="iqforge demo", progress=bar)
            with self.api.open_source(self.base) as model:
                n_elements, n_bytes = (
                    sum(t.n_elements for t in model.tensors),
                    sum(t.n_bytes for t in model.tensors),
                )
                self.stages.say(
                    f"{len(model.tensors)} tensors, {n_elements / 1e6:.2f} M parameters,"
                    f" {os.path.getsize(self.base) / 1e6:.2f} MB"
                )
        return n_elements, 8 * n_bytes / n_elements

    def collect(self) -> int:
        """Collect the importance matrix. Return the number of chunks it was collected from."""
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
            Bar() as bar,
        ):
            imatrix = self.api.collect_imatrix(
                self.base,
                self.calibration_text,
                self.imatrix,
                n_ctx=N_CTX,
                chunks=self.chunks,
                progress=bar.chunk,
            )
            self.stages.say(
                f"{len(imatrix.entries)} tensors, {imatrix.chunk_count} chunks of"
                f" {imatrix.chunk_size} tokens"
            )
        return imatrix.chunk_count

    def quantize(self) -> dict[str, tuple[float, float]]:
        """Quantize to every type. Return bits per weight and seconds by type."""
        done = {}
        with self.stage(
            f"Quantize to {len(TYPES)} types",
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
            with Bar() as bar:
                self.api.warm_up([*TYPES, EMBEDDING_TYPE], progress=bar)
            if bar.compile_seconds:
                self.stages.say(f"compiled the searches in {bar.compile_seconds:.1f} s, once")
            for type in TYPES:
                started = time.monotonic()
                with Bar(type) as bar:
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
                seconds = time.monotonic() - started - bar.compile_seconds
                done[type] = report.bits_per_weight, seconds
                self.stages.say(
                    f"{type:<9} {report.bits_per_weight:5.2f} bpw"
                    f" {os.path.getsize(self.file(type)) / 1e6:7.2f} MB {done[type][1]:7.1f} s"
                )
        return done

    def split_and_merge(self) -> str:
        """Split one file, merge the shards and compare. Return a sentence on what is equal."""
        from ..formats.disk import output_error

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
                merged.unlink(missing_ok=True)  # merging never overwrites a file
            except OSError as error:
                raise output_error(error, merged) from None
            self.api.merge_model(paths[0], merged)
            found = compare(self.api, source, merged)
            self.stages.say(f"{len(paths)} shards; {found}")
        return (
            f"{SPLIT_TYPE} was split into {len(paths)} shards of at most {SHARD_TENSORS} tensors"
            f" and merged again: {found}."
        )

    def measure_base(self, bits: float) -> tuple[Baseline, int]:
        """Measure the unquantized model and keep its predictions. Return the figures and the number
        of chunks.
        """
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
            Bar() as bar,
        ):
            result = self.api.measure_perplexity(
                self.base,
                self.measuring_text,
                n_ctx=N_CTX,
                chunks=self.chunks,
                kl_divergence_base=self.predictions,
                progress=bar.chunk,
            )
            self.stages.say(
                f"PPL = {result.perplexity:.4f} +/- {result.uncertainty:.5f} over"
                f" {result.n_chunks} chunks of {N_CTX} tokens, {result.tokens_per_second:.0f}"
                " tokens/s"
            )
        size = os.path.getsize(self.base)
        return (
            Baseline("BF16", bits, size, (result.perplexity, result.uncertainty), result.seconds),
            result.n_chunks,
        )

    def measure(self, quantized: dict[str, tuple[float, float]]) -> list[Measurement]:
        """Measure perplexity and KL divergence of every type."""
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
                with Bar(type) as bar:
                    result = self.api.measure_perplexity(
                        self.file(type),
                        None,
                        kl_divergence_base=self.predictions,
                        kl_divergence=True,
                        progress=bar.chunk,
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
                self.stages.say(
                    f"{type:<9} PPL {s.ppl[0]:8.4f}   mean KLD {s.mean_kld[0]:.6f}"
                    f" {result.seconds:7.1f} s"
                )
        return done
