"""Tensors and metadata of models that recipes are planned for."""

from __future__ import annotations

from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES
from iqforge.formats.values import Value, ValueType, string, u32

INNER = ("attn_k", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_up")


def model(
    n_layers: int = 16,
    heads: int = 8,
    kv_heads: int = 8,
    experts: int = 0,
    arch: str = "llama",
    n_cols: int = 256,
    tied: bool = False,
    extra: tuple[str, ...] = (),
    inner: tuple[str, ...] = INNER,
) -> tuple[list[TensorInfo], dict[str, Value]]:
    """Return a model in the reverse of llama.cpp's order."""
    names = [
        f"blk.{i}.{part}{'_exps' if experts and part.startswith('ffn') else ''}"
        for i in range(n_layers)
        for part in inner
    ]
    names = [*([] if tied else ["output"]), "token_embd", *names, *extra]
    tensors = [
        TensorInfo(
            f"{name}.weight",
            (experts, 16, n_cols) if "_exps" in name else (16, n_cols),
            TYPES["F32"],
        )
        for name in names
    ]
    metadata = {
        "general.architecture": string(arch),
        f"{arch}.block_count": u32(n_layers),
        f"{arch}.attention.head_count": u32(heads),
        f"{arch}.attention.head_count_kv": u32(kv_heads),
        f"{arch}.expert_count": u32(experts),
    }
    return tensors[::-1], metadata


def model_of(meta: dict) -> tuple[list[TensorInfo], dict[str, Value]]:
    arch = meta["arch"]
    metadata = {
        "general.architecture": string(arch),
        f"{arch}.block_count": u32(meta["n_layer"]),
        f"{arch}.expert_count": u32(meta["n_expert"]),
        f"{arch}.attention.head_count": u32(meta["n_head"]),
        f"{arch}.attention.head_count_kv": u32(meta["n_head_kv"]),
        f"{arch}.vocab_size": u32(meta["n_vocab"]),
    }
    return [
        TensorInfo(name, tuple(reversed(dims)), TYPES["F32"]) for name, dims in meta["tensors"]
    ], metadata


def expected(tensors: list[TensorInfo], wanted: dict) -> list[str]:
    """Return type names by tensor, `kept` for tensors that are not converted."""
    exceptions = {
        index: name for name, indices in wanted.get("except", {}).items() for index in indices
    }
    return [exceptions.get(index, wanted["default"] or "kept") for index in range(len(tensors))]


def llama(
    n_layers: int = 16,
    heads: int = 8,
    kv_heads: int = 8,
    experts: int = 0,
    arch: str = "llama",
    n_cols: int = 256,
    tied: bool = False,
    vocabulary: int = 1000,
) -> tuple[list[TensorInfo], dict[str, Value]]:
    """Return the tensors of a model with only matrices, and its metadata."""
    inner = [f"ffn_{part}{'_exps' if experts else ''}" for part in ("gate", "up", "down")]
    names = ["token_embd"] + [
        f"blk.{i}.{part}"
        for i in range(n_layers)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", *inner)
    ]
    shapes = {
        name: (experts, 16, n_cols) if name.endswith("_exps") else (16, n_cols)
        for name in names + ([] if tied else ["output"])
    }
    tokens = Value(ValueType.ARRAY, ["x"] * vocabulary, ValueType.STRING)
    kv = Value(ValueType.ARRAY, [kv_heads] * n_layers, ValueType.INT32)
    metadata = {
        "general.architecture": string(arch),
        f"{arch}.block_count": u32(n_layers),
        f"{arch}.attention.head_count": u32(heads),
        f"{arch}.attention.head_count_kv": kv,
        f"{arch}.expert_count": u32(experts),
        "tokenizer.ggml.tokens": tokens,
    }
    return [
        TensorInfo(f"{name}.weight", shape, TYPES["F16"]) for name, shape in shapes.items()
    ], metadata
