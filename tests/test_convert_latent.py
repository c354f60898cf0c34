"""Conversion of models with latent attention: DeepSeek, Mistral 4."""

from __future__ import annotations

from pathlib import Path

import pytest

import iqforge
from iqforge.formats.gguf.reader import open_gguf

from .golden import assert_like_listing, assert_like_reference
from .shared import shared


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_file_equals_the_reference(tmp_path: Path, case: str):
    # the reference reads the tensors of a shard by name, we as they lie: the selection bias, in float32, comes first
    assert_like_reference(tmp_path, case, bytes_too=case != "deepseek_v3")


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3"])
def test_older_layout_equals_the_listing(tmp_path: Path, case: str):
    # that converter took name and size from the folder
    assert_like_listing(tmp_path, case, "ik-f32", mla_layout="ik", free_keys=("general.name", "general.size_label"))


def test_trained_model_converts(tmp_path: Path):
    made = iqforge.convert_model(shared("models/mini-deepseek"), tmp_path)
    with open_gguf(made) as file:
        assert {t.name: t.shape for t in file.tensors}["blk.2.attn_k_b.weight"] == (8, 256, 64)
        assert file.metadata["deepseek2.expert_gating_func"].data == 2 and file.metadata["deepseek2.block_count"].data == 3
