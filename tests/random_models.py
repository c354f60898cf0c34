"""Files of random tiny models, each made at its first use, with other weights in every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import iqforge
import numpy as np
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import Value
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.model import load_model

from .seed import run_seed
from .tiny_cases import CASES, SIZES, WIDE
from .tiny_model import write_gguf
from .tiny_models import TinyModel, make_tiny_model

WITH_EXPERTS = [
    case
    for case in CASES
    if any(
        (settings := CASES[case].config(WIDE)).get("text_config", settings).get(key)
        for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
]


NO_GATES = ("nemotron_h_moe", "nemotron_h_latent")  # of experts


class Models:
    """Checkpoints, files and logits, each made at its first use."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._tiny: dict[tuple[str, str], TinyModel] = {}
        self._logits: dict[Path, np.ndarray] = {}

    def tiny(self, case: str, size: str) -> TinyModel:
        if (case, size) not in self._tiny:
            folder = self.folder / f"{case}-{size}"
            self._tiny[case, size] = make_tiny_model(
                CASES[case], SIZES[size], folder, of_run=run_seed()
            )
        return self._tiny[case, size]

    def file(self, case: str, size: str, merged: bool = False) -> Path:
        """The f32 GGUF file of a checkpoint."""
        tiny = self.tiny(case, size)
        return self._made(
            tiny.folder / f"f32{'-merged' * merged}.gguf",
            lambda path: iqforge.convert_model(tiny.folder, path, "f32", merge_gate_up=merged),
        )

    def quantized(self, case: str, type: str, merged: bool = False) -> Path:
        """The wide model with every matrix in `type`."""
        source = self.file(case, "wide", merged)
        return self._made(
            source.with_name(f"{type}{'-merged' * merged}.gguf"),
            lambda path: iqforge.quantize_model(source, path, Recipe(type, pure=True)),
        )

    def decoded_logits(self, path: Path, tiny: TinyModel) -> np.ndarray:
        """Logits of the same weights as float32."""
        out = path.with_name("decoded.gguf")
        with open_gguf(path) as source:
            write_gguf(out, source)
        return logits_of(out, tiny)

    def logits(self, path: Path, tiny: TinyModel, **options) -> np.ndarray:
        if options:
            return logits_of(path, tiny, **options)
        if path not in self._logits:
            self._logits[path] = logits_of(path, tiny)
        return self._logits[path]

    def changed_logits(self, case: str, path: Path, keys: dict[str, Value | None]) -> np.ndarray:
        """Return the logits of a small model with other keys in its file, which goes to `path`.
        keys: without the prefix of the architecture; None removes one.
        """
        changed = {f"{CASES[case].architecture}.{key}": value for key, value in keys.items()}
        with open_gguf(self.file(case, "small")) as source:
            write_gguf(path, source, metadata=changed)
        return logits_of(path, self.tiny(case, "small"))

    @staticmethod
    def _made(path: Path, make: Callable[[Path], object]) -> Path:
        if not path.exists():
            make(path)
        return path


def logits_of(path: Path, tiny: TinyModel, **options) -> np.ndarray:
    with load_model(path, **options) as model:
        return model.forward(tiny.tokens).numpy()
