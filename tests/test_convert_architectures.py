"""Every architecture: its converted checkpoint equals the reference converter's file, tensor by
tensor and key by key.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.convert.architectures import registry
from iqforge.convert.architectures.registry import architecture_class, register
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import ArchitectureError
from iqforge.formats.gguf.reader import open_gguf

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, write_safetensors

# Keys that depend on the checkpoint's folder and the command line, not on its contents.
ENVIRONMENT = {"general.name", "general.basename", "general.finetune", "general.version"}

# case -> keys that differ from the reference on purpose: ours (None: absent), and why
EXCEPTIONS: dict[str, dict[str, tuple[object, str]]] = {
    "gemma3": {
        "tokenizer.ggml.eos_token_id": (
            1,
            (
                "config.json lists several; the reference then writes none, and runtimes stop at"
                " their default, 2, which is <bos> here"
            ),
        )
    },
}


def check_equal(made: Path, expected: Path, exceptions: dict[str, tuple[object, str]]) -> None:
    with open_gguf(made) as ours, open_gguf(expected) as theirs:
        leave = ENVIRONMENT | set(exceptions)
        mine, wanted = (
            {key: value for key, value in file.metadata.items() if key not in leave}
            for file in (ours, theirs)
        )
        assert mine == wanted
        for key, (value, why) in exceptions.items():
            found = ours.metadata[key].data if key in ours.metadata else None
            assert (
                why
                and found == value
                and (key not in theirs.metadata or theirs.metadata[key].data != value)
            ), f"{key} needs no exception"
        assert {t.name: (t.shape, t.type.name) for t in ours.tensors} == {
            t.name: (t.shape, t.type.name) for t in theirs.tensors
        }
        for tensor in theirs.tensors:
            rows = ours.read_rows(ours.tensor(tensor.name), 0, tensor.n_rows)
            assert np.array_equal(rows, theirs.read_rows(tensor, 0, tensor.n_rows)), tensor.name


@pytest.mark.parametrize(
    "case",
    [
        "qwen2",
        "qwen3",
        "ministral3",
        "tok_spm",
        "mixtral",
        "phi3",
        "gemma3",
        "gpt_oss_bf16",
        "gpt_oss_mxfp4",
        "gemma4_e",
        "gemma4_moe",
    ],
)
def test_file_equals_the_reference(tmp_path: Path, case: str):
    expected = shared(f"golden/convert/{case}/expected-f32.gguf")
    made = iqforge.convert_model(shared(f"golden/convert/{case}/hf"), tmp_path / "made.gguf", "f32")
    check_equal(made, expected, EXCEPTIONS.get(case, {}))


def test_packed_experts_stay_packed_beside_other_types(tmp_path: Path):
    """expected-bf16.json lists names, types and hashes; only the floats around the experts follow
    --outtype.
    """
    listing = json.loads(shared("golden/convert/gpt_oss_mxfp4/expected-bf16.json").read_text())
    made = iqforge.convert_model(shared("golden/convert/gpt_oss_mxfp4/hf"), tmp_path, "bf16")
    assert made.name.endswith("-MXFP4_MOE.gguf")
    with open_gguf(made) as file:
        found = {
            t.name: (
                t.type.name,
                list(reversed(t.shape)),
                hashlib.sha256(file.read_rows(t, 0, t.n_rows).tobytes()).hexdigest(),
            )
            for t in file.tensors
        }
        assert file.metadata["general.file_type"].data == 38
    assert found == {t["name"]: (t["type"], t["shape"], t["sha256"]) for t in listing["tensors"]}
    made = iqforge.convert_model(
        shared("golden/convert/gpt_oss_mxfp4/hf"), tmp_path / "q8_0.gguf", "q8_0"
    )
    with open_gguf(made) as file:
        assert (
            file.metadata["general.file_type"].data == 7
            and file.tensor("output.weight").type.name == "Q8_0"
        )
        assert file.tensor("blk.0.ffn_up_exps.weight").type.name == "MXFP4"


def test_classes_are_chosen_by_text_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register("SomethingForConditionalGeneration", model_type="this")(object)
    assert architecture_class("SomethingForConditionalGeneration", "this") is object
    with pytest.raises(ArchitectureError, match="text model 'that'.*; this is"):
        architecture_class("SomethingForConditionalGeneration", "that")
    assert architecture_class("LlamaForCausalLM", "whatever").gguf_name == "llama"


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path):
    """The same weights with the names and the config of a wrapper give the same tensors."""
    folder = make_tiny_llama(
        tmp_path / "m", n_layers=1, dtype="f32", config={"model_type": "mistral"}
    )
    with open_checkpoint(folder) as checkpoint:
        config = dict(checkpoint.config.values)
        tensors = {
            name: checkpoint.data(t).view(np.float32).reshape(t.shape).copy()
            for name, t in checkpoint.tensors.items()
        }
    with CheckpointSource(open_checkpoint(folder)) as source:
        plain = {t.name: source.read_rows(t, 0, t.n_rows).copy() for t in source.tensors}
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    for marked in ("language_model.{}", "model.language_model.{}"):
        names = {
            name: marked.format(name if marked[0] == "l" else name.removeprefix("model."))
            for name in tensors
        }
        if marked[0] == "m":
            names["lm_head.weight"] = "lm_head.weight"
        vision = {
            "model.vision_tower.patch_conv.weight": np.zeros((2, 2), np.float32),
            "multi_modal_projector.norm.weight": np.zeros(2),
        }
        write_safetensors(
            folder / "model.safetensors",
            {names[name]: values for name, values in tensors.items()} | vision,
        )
        with CheckpointSource(open_checkpoint(folder)) as source:
            assert source.metadata["general.architecture"].data == "mistral3"
            assert {t.name for t in source.tensors} == set(plain)
            for tensor in source.tensors:
                assert np.array_equal(
                    source.read_rows(tensor, 0, tensor.n_rows), plain[tensor.name]
                )
