"""Names of converted models and files, and what model cards add to the metadata."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.metadata.general import size_label, title
from iqforge.convert.metadata.model_card import model_card_metadata, read_model_card
from iqforge.convert.naming import default_file_name, output_path
from iqforge.errors import OutputError
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES

from .opened_checkpoint import opened
from .tiny_checkpoint import make_tiny_llama


@pytest.mark.parametrize(
    "count, label",
    [
        (86_336, "86K"),
        (8_030_261_248, "8.0B"),
        (30_532_122_624, "31B"),
        (270_000_000, "270M"),
        (1_540_000_000, "1.5B"),
        (9_970_000_000, "10B"),
    ],
)
def test_size_label(count: int, label: str):
    assert size_label([TensorInfo("a.weight", (count,), TYPES["F32"])]) == label


def test_names():
    assert title("tiny-llama-3-8B-v1.5-instruct") == "Tiny Llama 3 8B v1.5 Instruct"
    assert default_file_name("Mini Llama", "20M", "bf16") == "Mini-Llama-20M-BF16.gguf"
    assert (
        default_file_name("Llama 3 8B/Instruct", "8.0B", "q8_0") == "Llama-3-8B-Instruct-Q8_0.gguf"
    )
    assert default_file_name("..", None, "vocab") == "model-vocab.gguf"


def test_output_path(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "tiny-model", n_layers=1)
    with opened(folder) as source:
        label = source.metadata["general.size_label"].data
        assert output_path(source, None, "auto") == folder / f"Tiny-Model-{label}-BF16.gguf"
        assert output_path(source, tmp_path, "q8_0") == tmp_path / f"Tiny-Model-{label}-Q8_0.gguf"
        assert (
            output_path(source, tmp_path / "x-{ftype}-{OUTTYPE}.gguf", "auto")
            == tmp_path / "x-bf16-BF16.gguf"
        )
        with pytest.raises(OutputError, match="does not exist"):
            output_path(source, tmp_path / "absent" / "x.gguf", "auto")
        with pytest.raises(OutputError, match="not a folder"):
            output_path(source, f"{tmp_path}/absent{os.sep}", "auto")


def test_name_in_a_download_cache(tmp_path: Path):
    folder = make_tiny_llama(
        tmp_path / "models--acme--tiny-chat" / "snapshots" / "0123abcd", n_layers=1
    )
    with opened(folder) as source:
        assert source.metadata["general.name"].data == "Tiny Chat"


def test_model_card_and_sampling(tmp_path: Path):
    make_tiny_llama(tmp_path, n_layers=1)
    (tmp_path / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\nbase_model: acme/Big-Model\ntags: [a,"
        " 'b']\nmodel_name: Shiny\nmodel-index:\n- name: x\n  results: []\n---\n# text\nlicense:"
        " other\n"
    )
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 20, "top_p": null, "min_p": "x"}'
    )
    with opened(tmp_path) as source:
        data = {
            key: value.data for key, value in source.metadata.items() if key.startswith("general.")
        }
    assert (
        data["general.name"] == "Shiny"
        and data["general.license"] == "apache-2.0"
        and data["general.languages"] == ["en", "de"]
    )
    assert data[
        "general.base_model.0.repo_url"
    ] == "https://huggingface.co/acme/Big-Model" and data["general.tags"] == ["a", "b"]
    assert (
        data["general.sampling.temp"] == 0.5
        and data["general.sampling.top_k"] == 20
        and "general.sampling.min_p" not in data
    )


@pytest.mark.parametrize(
    "front, expected",
    [
        ("language: no\nlicense: 1.0", {"languages": ["no"], "license": "1.0"}),
        ("license: 'mit' # chosen", {"license": "mit"}),
        ("tags:\n  - a\n  - {b: c}\n  - [d]\n  -", {"tags": ["a"]}),
        ("license: >-\n  of two\n  lines", {"license": "of two lines"}),
        ("license: {name: mit}\ntags: 3", {"tags": ["3"]}),
        ("license: !!python/object/apply:os.system [exit]", {"license": "exit"}),
        ("license: [unclosed", {}),
        ("- a list", {}),
        ("a: &a [x, x]\nb: &b [*a, *a]\ntags: [*b, *b]", {}),
        ("[" * 5000, {}),
        ("\x00", {}),
    ],
)
def test_front_matter_of_all_kinds(tmp_path: Path, front: str, expected: dict):
    """Scalars are texts, as written, and a card that is not YAML counts as absent."""
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# text")
    (tmp_path / "config.json").write_text("{}")
    keys = model_card_metadata(read_model_card(open_checkpoint(tmp_path)))
    assert {key: value.data for key, value in keys.items()} == {
        f"general.{key}": value for key, value in expected.items()
    }
