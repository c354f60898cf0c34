"""Conversion of GLM-4.5 and GLM-5, with the blocks for multi-token prediction, without them, and
these alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import iqforge
import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError, UsageError
from iqforge.formats.gguf.reader import open_gguf

from .golden import assert_like_listing, assert_like_reference
from .shared import shared


@pytest.mark.parametrize("case", ["glm4_moe", "glm_moe_dsa"])
def test_file_equals_the_reference(tmp_path: Path, case: str):
    # order differs: tensors of a shard are read by name there, as they lie here; special tokens are
    # named last here
    assert_like_reference(tmp_path, case, bytes_too=False)


def test_without_further_blocks(tmp_path: Path):
    assert_like_listing(tmp_path, "glm4_moe", "nomtp-f32", mtp="drop")


def copy_of(case: str, folder: Path, **config) -> Path:
    shutil.copytree(shared(f"golden/convert/{case}/hf"), folder, copy_function=shutil.copyfile)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    return folder


def test_further_blocks_alone(tmp_path: Path):
    made = iqforge.convert_model(
        copy_of("glm4_moe", tmp_path / "Tiny-GLM"), tmp_path, "f32", mtp="only"
    )
    assert made.name.startswith("mtp-Tiny-GLM")
    with (
        open_gguf(shared("golden/convert/glm4_moe/expected-f32.gguf")) as whole,
        open_gguf(made) as part,
    ):
        names = {
            t.name for t in whole.tensors if t.name.startswith(("token_embd.", "output", "blk.2."))
        }
        assert {t.name for t in part.tensors} == names and len(names) == 28
        assert (
            part.metadata["glm4moe.block_count"].data == 3
            and part.metadata["glm4moe.nextn_predict_layers"].data == 1
        )
        for tensor in part.tensors:
            same = whole.tensor(tensor.name)
            assert (
                part.read_rows(tensor, 0, tensor.n_rows).tobytes()
                == whole.read_rows(same, 0, same.n_rows).tobytes()
            )


def test_blocks_announced_or_not(tmp_path: Path):
    silent = copy_of("glm4_moe", tmp_path / "silent", num_nextn_predict_layers=None)
    with CheckpointSource(open_checkpoint(silent)) as source:  # what is stored counts
        assert source.metadata["glm4moe.block_count"].data == 3
    fewer = copy_of("glm4_moe", tmp_path / "fewer", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="belongs to layer 2"):
        CheckpointSource(open_checkpoint(fewer))
    more = copy_of("glm4_moe", tmp_path / "more", num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match="model.layers.3"):
        CheckpointSource(open_checkpoint(more))
    with pytest.raises(UsageError, match="deepseek2"):
        CheckpointSource(open_checkpoint(more), mla_layout="ik")


@pytest.mark.parametrize(
    "rule",
    [
        {"index_topk_pattern": "FFS"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 2},
        {"index_topk_freq": 4},
    ],
)
def test_rules_for_indexers_are_those_of_transformers(tmp_path: Path, rule: dict):
    transformers = pytest.importorskip("transformers")
    config = transformers.GlmMoeDsaConfig(num_hidden_layers=3, **rule)
    assert config.indexer_types == ["full", "full", "shared"]
    folder = copy_of("glm_moe_dsa", tmp_path / "m", indexer_types=None, **rule)
    with CheckpointSource(open_checkpoint(folder)) as source:
        assert source.metadata["glm-dsa.attention.indexer.types"].data == [True, True, False]


@pytest.mark.parametrize("types", [["full", "full"], ["full", "full", "half"]])
def test_indexer_types_that_do_not_fit(tmp_path: Path, types: list[str]):
    folder = copy_of("glm_moe_dsa", tmp_path / "m", indexer_types=types)
    with pytest.raises(CheckpointError, match="indexer_types"):
        CheckpointSource(open_checkpoint(folder))


def test_indexer_where_a_layer_shares_one(tmp_path: Path):
    folder = copy_of("glm_moe_dsa", tmp_path / "m", indexer_types=["full", "shared", "shared"])
    with pytest.raises(CheckpointError, match="no such tensor in layer 1"):
        CheckpointSource(open_checkpoint(folder))
