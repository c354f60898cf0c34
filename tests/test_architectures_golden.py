"""The reference's conversions of every golden checkpoint, against the logits that transformers
computes from the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import u32
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from .golden import CASES, WITHOUT_LOGITS
from .shared import SHARED, shared
from .tiny_model import write_gguf

BOUND = 1e-4  # largest difference of logits
# case -> (largest difference, why)
EXCEPTIONS: dict[str, tuple[float, str]] = {
    "qwen3_5": (
        3e-4,
        "one unit in the last place of an embedding changes the logits by 8e-5: a head of the third"
        " token is so small that the norm after it multiplies rounding errors by a thousand",
    ),
}

LORA = "lora_llama"  # an adapter for the case llama


def check(path: Path, tokens: np.ndarray, expected: np.ndarray, bound: float = BOUND) -> None:
    """Compare logits of all rows, at once and token by token."""
    with load_model(path) as model:
        at_once = model.forward(tokens).numpy()
        state = model.new_state(len(tokens), CacheSettings("f32", "f32"))
        in_steps = np.stack([model.extend([token], state).numpy() for token in tokens])
    assert at_once.dtype == np.float32 and at_once.shape == expected.shape
    for logits in (at_once, in_steps):
        worst = np.abs(logits - expected).max(axis=1)
        assert worst.max() < bound, f"up to {worst.max():.2e} in row {int(worst.argmax())}"
        assert (logits.argmax(1) == expected.argmax(1)).all()


def test_no_case_is_left_out():
    folders = {path.parent.name for path in shared("golden/convert").glob("*/expected-f32.gguf")}
    assert folders == {*CASES, *WITHOUT_LOGITS, LORA}
    assert EXCEPTIONS.keys() <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    golden = np.load(shared(f"golden/convert/{case}/logits.npz"))
    bound, _ = EXCEPTIONS.get(case, (BOUND, ""))
    path = SHARED / f"golden/convert/{case}/expected-f32.gguf"
    check(path, golden["input_ids"], golden["logits"], bound)


def test_merged_gate_and_up():
    golden = np.load(shared("golden/convert/qwen3_moe/logits.npz"))
    path = SHARED / "golden/convert/qwen3_moe/expected-fused-f32.gguf"
    check(path, golden["input_ids"], golden["logits"])


def test_selecting_everything_is_dense_attention(tmp_path):
    """With at least as many selected positions as there are tokens, the indexer has no effect."""
    golden = np.load(shared("golden/convert/glm_moe_dsa/logits.npz"))
    path = SHARED / "golden/convert/glm_moe_dsa/expected-f32.gguf"
    keys = {"glm-dsa.attention.indexer.top_k": u32(len(golden["input_ids"]))}
    with open_gguf(path) as source:
        dense = write_gguf(tmp_path / "dense.gguf", source, metadata=keys)
    check(dense, golden["input_ids"], golden["logits_dense"])
    assert np.abs(golden["logits_dense"] - golden["logits"]).max() > 0.1


def test_base_and_adapter(tmp_path):
    """W + alpha / r * B A, with the matrices of the converted adapter."""
    golden = np.load(shared(f"golden/convert/{LORA}/logits.npz"))
    base = SHARED / "golden/convert/llama/expected-f32.gguf"
    check(base, golden["input_ids"], golden["base_logits"])
    with open_gguf(SHARED / f"golden/convert/{LORA}/expected-f32.gguf") as file:
        alpha = file.metadata["adapter.lora.alpha"].data
        low_rank = {
            t.name: decode(t.type, file.read_rows(t, 0, t.n_rows).copy(), t.n_cols)
            for t in file.tensors
        }
    with open_gguf(base) as source:
        merged = _Merged(source, low_rank, alpha)
        path = write_gguf(tmp_path / "merged.gguf", merged)
    assert merged.changed == 14  # seven matrices of two layers
    check(path, golden["input_ids"], golden["logits"])


class _Merged:
    """A float32 source with an adapter added to its matrices."""

    def __init__(self, source, low_rank: dict[str, np.ndarray], alpha: float):
        self.metadata, self.tensors = source.metadata, source.tensors
        self._source, self._low_rank, self._alpha, self.changed = source, low_rank, alpha, 0

    def read_rows(self, tensor, start: int, stop: int) -> np.ndarray:
        rows = self._source.read_rows(tensor, start, stop)
        if (a := self._low_rank.get(f"{tensor.name}.lora_a")) is None:
            return rows
        b = self._low_rank[f"{tensor.name}.lora_b"][start:stop]
        self.changed += 1
        values = decode(tensor.type, rows.copy(), tensor.n_cols)
        return (values + self._alpha / len(a) * (b @ a)).astype(np.float32).view(np.uint8)
