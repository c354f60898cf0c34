"""Checkpoints of single families, made of random float32 tensors whose names a test writes out, and
their conversion.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.formats.codecs.codec import decode
from iqforge.formats.pretokenizers import BYTE_LEVEL_REGEX, PRETOKENIZERS

from .tiny_checkpoint import write_safetensors, write_tokenizer

Shape = tuple[int, ...]
Names = dict[str, tuple[Shape, str]]  # stored name -> (shape, GGUF name)

D, HEADS, KV_HEADS, HEAD, FF, VOCAB, EXPERTS = 32, 4, 2, 16, 48, 320, 3
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
LAYER = "model.layers.0."
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": FF,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}

EMBEDDING = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd"),
    "model.norm.weight": ((D,), "output_norm"),
}
SANDWICH = {
    "input_layernorm.weight": ((D,), "attn_norm"),
    "post_attention_layernorm.weight": ((D,), "post_attention_norm"),
    "pre_feedforward_layernorm.weight": ((D,), "ffn_norm"),
    "post_feedforward_layernorm.weight": ((D,), "post_ffw_norm"),
}


def write(
    folder: Path, hf_class: str, config: dict, shapes: dict[str, Shape], seed: int = 0
) -> dict[str, np.ndarray]:
    """Write a checkpoint of random float32 tensors into `folder`. Return the tensors."""
    folder.mkdir(exist_ok=True)
    settings = SIZES | {"architectures": [hf_class], "model_type": "x"} | config
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if value is not None})
    )
    write_tokenizer(folder)
    random = np.random.default_rng(seed)
    tensors = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def convert(folder: Path, **options) -> tuple[dict[str, np.ndarray], dict]:
    """Convert a checkpoint. Return {GGUF name: float32 values, or blocks as bytes}, and
    metadata.
    """
    with CheckpointSource(open_checkpoint(folder), **options) as source:
        made = {}
        for tensor in source.tensors:
            rows = [
                source.read_rows(tensor, start, min(start + 7, tensor.n_rows)).copy()
                for start in range(0, tensor.n_rows, 7)
            ]
            values = np.concatenate(rows)
            made[tensor.name] = (
                values
                if tensor.type.is_quantized
                else decode(tensor.type, values, tensor.n_cols).reshape(tensor.shape)
            )
        return made, {key: value.data for key, value in source.metadata.items()}


def split_as(folder: Path, pre: str, *, nfc: bool = False) -> None:
    """Make the tokenizer of a checkpoint split texts by the regexes that a pre-tokenizer has."""
    file = folder / "tokenizer.json"
    tokenizer, regexes = json.loads(file.read_text()), PRETOKENIZERS[pre].regexes
    by_itself = regexes == (BYTE_LEVEL_REGEX,)
    tokenizer["model"]["ignore_merges"] = False
    tokenizer["normalizer"] = {"type": "NFC"} if nfc else None
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            *(
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
                for regex in (() if by_itself else regexes)
            ),
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": by_itself},
        ],
    }
    file.write_text(json.dumps(tokenizer))


def full_names(tensors: dict[str, tuple]) -> Names:
    """Return {whole stored name: (shape, whole GGUF name)}."""
    layers = {
        LAYER + name: (shape, f"blk.0.{gguf}.{name.rpartition('.')[2]}")
        for name, (shape, gguf) in tensors.items()
    }
    return {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()} | layers
