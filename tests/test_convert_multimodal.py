"""Classes that share the text model of a case in `tiny_cases` are converted to the same file."""

from __future__ import annotations

import json
from pathlib import Path

import iqforge
import pytest
import torch
from iqforge.convert.architectures.registry import supported
from iqforge.formats.gguf.reader import open_gguf
from safetensors.torch import load_file, save_file

from .tiny_cases import CASES, SMALL
from .tiny_checkpoint import write_tokenizer
from .tiny_models import make_tiny_model

# Multimodal classes by the case of their text model.
MULTIMODAL = {
    "Cohere2VisionForConditionalGeneration": "command_a_plus",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4_moe",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen4ExpForConditionalGeneration": "qwen4exp",
    "Step3p7ForConditionalGeneration": "step35",
}
OTHER_NAMES = (
    "BailingMoeV3ForCausalLM",
    "Ernie4_5_ForCausalLM",
    "ExaoneMoEForCausalLM",
    "HyV3ForCausalLM",
    "LFM2ForCausalLM",
    "PhiMoEForCausalLM",
    "StableLMEpochForCausalLM",
)  # of classes that have a case
ALONE = "Mistral4ForCausalLM"  # the text model of the case mistral4
PLACES = {
    "older": lambda name: f"language_model.{name}",
    "newer": lambda name: name.replace("model.", "model.language_model.", 1),
}


def contents(checkpoint: Path) -> tuple[dict[str, bytes], dict]:
    """Convert to f32; return the bytes of tensors, and the keys other than general ones."""
    path = iqforge.convert_model(checkpoint, checkpoint / "f32.gguf", "f32")
    with open_gguf(path) as file:
        tensors = {t.name: file.read_rows(t, 0, t.n_rows).tobytes() for t in file.tensors}
        keys = {k: v for k, v in file.metadata.items() if not k.startswith("general.")}
    return tensors, keys


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def test_every_class_that_is_converted_has_a_case():
    cases = {case.hf_class for case in CASES.values()}
    assert set(supported()) == cases | {*MULTIMODAL, ALONE, *OTHER_NAMES}


@pytest.mark.parametrize("hf_class", MULTIMODAL)
def test_a_text_model_inside_another(tmp_path, hf_class):
    """The tensors of the text model have another prefix, and those of other models are left out."""
    made = make_tiny_model(CASES[MULTIMODAL[hf_class]], SMALL, tmp_path / "alone").folder
    expected = contents(made)
    config = {
        "architectures": [hf_class],
        "text_config": json.loads((made / "config.json").read_text()),
        "vision_config": {},
    }
    others = {"vision_tower.patch.weight": torch.ones(4), "model.visual.norm.bias": torch.ones(4)}
    for place, renamed in PLACES.items():
        tensors = load_file(made / "model.safetensors")
        inside = {renamed(name): tensor for name, tensor in tensors.items()}
        assert contents(write(tmp_path / place, config, inside | others)) == expected


def test_a_text_model_alone(tmp_path):
    made = make_tiny_model(CASES["mistral4"], SMALL, tmp_path / "inside").folder
    config = json.loads((made / "config.json").read_text())["text_config"]
    tensors = {
        name.replace("language_model.", "", 1): tensor
        for name, tensor in load_file(made / "model.safetensors").items()
        if "language_model." in name or name.startswith("lm_head")
    }
    alone = write(tmp_path / "alone", config | {"architectures": [ALONE]}, tensors)
    assert contents(alone) == contents(made)
