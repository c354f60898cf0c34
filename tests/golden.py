"""Compare converted files with the reference converter's, tensor by tensor and key by key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import iqforge
from iqforge.formats.gguf.reader import open_gguf

from .shared import shared

# The checkpoints of golden/convert that have logits.
CASES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "gemma3",
    "gemma4_e",
    "gemma4_moe",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss_bf16",
    "gpt_oss_mxfp4",
    "llama",
    "llama31",
    "ministral3",
    "mistral",
    "mistral4",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)
WITHOUT_LOGITS = ("tok_bpe_added", "tok_bpe_pairs", "tok_spm")


def assert_like_reference(
    tmp_path: Path,
    case: str,
    variant: str = "f32",
    *,
    outtype: str = "f32",
    bytes_too: bool = True,
    **layout,
) -> None:
    """Check that the conversion of golden/convert/`case` has all keys of `expected-<variant>.gguf`
    with type and value and all tensors with shape, type and bytes; with `bytes_too` also the order
    of both.
    """
    expected = shared(f"golden/convert/{case}/expected-{variant}.gguf")
    made = iqforge.convert_model(
        shared(f"golden/convert/{case}/hf"),
        tmp_path / "made.gguf",
        outtype,
        name=f"Golden {case}",
        **layout,
    )
    with open_gguf(made) as ours, open_gguf(expected) as theirs:
        assert ours.metadata == theirs.metadata
        found = {t.name: t for t in ours.tensors}
        assert {(t.name, t.shape, t.type.name) for t in ours.tensors} == {
            (t.name, t.shape, t.type.name) for t in theirs.tensors
        }
        for tensor in theirs.tensors:
            same = (
                ours.read_rows(found[tensor.name], 0, tensor.n_rows).tobytes()
                == theirs.read_rows(tensor, 0, tensor.n_rows).tobytes()
            )
            assert same, tensor.name
    assert not bytes_too or made.read_bytes() == expected.read_bytes()


def assert_like_listing(
    tmp_path: Path,
    case: str,
    variant: str,
    *,
    outtype: str = "f32",
    free_keys: tuple[str, ...] = (),
    **layout,
) -> None:
    """Check the same against `expected-<variant>.json`, which has no tokenizer keys and hashes
    instead of bytes; `free_keys` need not match.
    """
    listing = json.loads(shared(f"golden/convert/{case}/expected-{variant}.json").read_text())
    made = iqforge.convert_model(
        shared(f"golden/convert/{case}/hf"),
        tmp_path / "made.gguf",
        outtype,
        name=f"Golden {case}",
        **layout,
    )
    with open_gguf(made) as file:
        keys = {
            key: value.data
            for key, value in file.metadata.items()
            if not key.startswith("tokenizer.") and key not in free_keys
        }
        found = {
            t.name: (
                t.type.name,
                list(reversed(t.shape)),
                hashlib.sha256(file.read_rows(t, 0, t.n_rows).tobytes()).hexdigest(),
            )
            for t in file.tensors
        }
    assert keys == {key: value for key, value in listing["kv"].items() if key not in free_keys}
    assert found == {t["name"]: (t["type"], t["shape"], t["sha256"]) for t in listing["tensors"]}


# Small random models of golden/convert: one of every kind of layer.
GOLDEN = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma3",
    "gemma4_e",
    "gemma4_moe",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss_bf16",
    "gpt_oss_mxfp4",
    "llama",
    "llama31",
    "ministral3",
    "mistral",
    "mistral4",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)
