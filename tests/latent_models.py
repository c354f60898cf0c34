"""Models with latent attention for tests of the runtime."""

from __future__ import annotations

import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from .shared import shared
from .tiny_model import write_gguf

CASES = ("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "mistral4")
F32 = CacheSettings("f32", "f32")
BOUND = 1e-4


def golden(case: str):
    return shared(f"golden/convert/{case}/expected-f32.gguf")


def logits(path, tokens, **options) -> torch.Tensor:
    with load_model(path, **options) as model:
        return model.forward(tokens)


def layouts(folder, case: str) -> dict[str, str]:
    """Files of one model with k_b and v_b per head, with kv_b alone, and with all of them."""
    hf, made = shared(f"golden/convert/{case}/hf"), {}
    for name, layout, drop in (
        ("per head", "mainline", ()),
        ("all", "ik", ()),
        ("joined", "ik", tuple(f"blk.{i}.attn_{x}_b.weight" for i in (0, 1) for x in "kv")),
    ):
        with CheckpointSource(open_checkpoint(hf), mla_layout=layout) as source:
            made[name] = write_gguf(folder / f"{case}-{name}.gguf", source, drop=drop)
    return made


def in_pieces(model, tokens, sizes, settings=F32) -> torch.Tensor:
    state, rows = model.new_state(len(tokens), settings), []
    for size in sizes:
        rows.append(model.extend(tokens[state.n_past :][:size], state, all_logits=True))
    assert state.n_past == len(tokens)
    return torch.cat(rows)
