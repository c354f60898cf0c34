"""EXAONE 4.0: layers with a window, and the name of its pre-tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from iqforge.formats.tokenizer_hints import NFC_KEY

from .family_checkpoint import convert, split_as, write

LOCAL, GLOBAL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "config, near",
    [
        ({}, [1, 1, 1, 0, 1, 1]),
        ({"sliding_window_pattern": 2}, [1, 0, 1, 0, 1, 0]),
        ({"sliding_window_pattern": "LLG"}, [1, 1, 0, 1, 1, 0]),
        ({"layer_types": [LOCAL] + [GLOBAL] * 5, "sliding_window_pattern": "LLG"}, [1] + [0] * 5),
    ],
)
def test_layers_with_a_window(tmp_path: Path, config: dict, near: list[int]):
    base = {"num_hidden_layers": 6, "sliding_window": 8}
    write(tmp_path, "Exaone4ForCausalLM", base | config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["exaone4.attention.sliding_window_pattern"] == [bool(x) for x in near]
    assert metadata["exaone4.attention.sliding_window"] == 8


def test_null_is_no_window(tmp_path: Path):
    """Without the key the model has that of the class."""
    write(tmp_path, "Exaone4ForCausalLM", {}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["exaone4.attention.sliding_window"] == 4096
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"sliding_window": null, ', 1))
    _, metadata = convert(tmp_path, vocab_only=True)
    assert not [key for key in metadata if "sliding_window" in key]


@pytest.mark.parametrize("nfc", [False, True])
def test_the_pre_tokenizer_has_a_name_of_its_own(tmp_path: Path, nfc: bool):
    write(tmp_path, "Exaone4ForCausalLM", {}, {})
    split_as(tmp_path, "gpt-2", nfc=nfc)
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["tokenizer.ggml.pre"] == "exaone4"
    assert metadata.get(NFC_KEY, False) == nfc
    _, metadata = convert(tmp_path, vocab_only=True, pre="gpt-2")
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
