"""Llama 4: names and keys of a checkpoint made here, and chunks of attention, which are shorter
here than those of the released models.
"""

from __future__ import annotations

from dataclasses import replace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.convert.architectures import llama4 as conversion
from iqforge.errors import CheckpointError, ConfigError
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.architectures import llama4
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from . import prompt_on_cpu, step_on_cpu
from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, keys_of, shapes_of
from .prompt_models import normed
from .step_graphs_on_cpu import CPU
from .step_on_cpu import in_pieces
from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model

CLASS, DENSE = "Llama4ForCausalLM", 40
CONFIG = {  # as in published files of text models
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "intermediate_size_mlp": DENSE,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": 4,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "use_qk_norm": True,
    "no_rope_layers": [1, 1],
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.1.feed_forward.router.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
}
for _layer, _stored, _gguf, _width in ((0, "", "", DENSE), (1, "shared_expert.", "_shexp", FF)):
    for _name, _shape, _to in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        (f"feed_forward.{_stored}gate_proj", (_width, D), f"ffn_gate{_gguf}"),
        (f"feed_forward.{_stored}up_proj", (_width, D), f"ffn_up{_gguf}"),
        (f"feed_forward.{_stored}down_proj", (D, _width), f"ffn_down{_gguf}"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
GATE_UP, DOWN = (f"model.layers.1.feed_forward.experts.{part}_proj" for part in ("gate_up", "down"))
SHAPES = shapes_of(NAMES) | {
    GATE_UP: (EXPERTS, D, 2 * FF),
    DOWN: (EXPERTS, FF, D),
}


@pytest.mark.parametrize("merged", [False, True])
def test_names_values_and_keys(tmp_path, merged):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path, merge_gate_up=merged)
    gate_up = stored[GATE_UP].transpose(0, 2, 1)
    parts = {"down": stored[DOWN].transpose(0, 2, 1)}
    parts |= {"gate_up": gate_up} if merged else {"gate": gate_up[:, :FF], "up": gate_up[:, FF:]}
    for part, values in parts.items():
        assert np.array_equal(made.pop(f"blk.1.ffn_{part}_exps.weight"), values), part
    check_tensors(made, stored, NAMES)
    assert keys_of(metadata, "llama4") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": DENSE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
        "expert_count": EXPERTS,
        "expert_used_count": 1,
        "expert_feed_forward_length": FF,
        "interleave_moe_layer_step": 2,
    }


def test_missing_and_foreign_tensors_are_named(tmp_path):
    for name in ("model.layers.1.feed_forward.router.weight", GATE_UP, DOWN):
        words = "lacks experts" if "experts" in name else None
        check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, words)
    write(tmp_path, CLASS, CONFIG, SHAPES | {DOWN.replace("1", "0"): (EXPERTS, FF, D)})
    with pytest.raises(CheckpointError, match="layer 0 has no experts"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_chunk_size": 4096}, "llama4 implies 8192"),
        ({"floor_scale": 4096}, "llama4 implies 8192"),
        ({"attn_scale": 0.2}, "llama4 implies 0.1"),
        ({"attn_temperature_tuning": False}, "'attn_temperature_tuning' is off"),
        ({"use_qk_norm": False}, "'use_qk_norm' is false"),
        ({"num_local_experts": 128}, "'use_qk_norm' is true"),
        ({"no_rope_layers": [1, 0]}, r"'no_rope_layers' is \[1, 0\]"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, "llama4 implies 4"),
        ({"layer_types": ["full_attention"] * 2}, "'layer_types' must be chunked_attention"),
        ({"moe_layers": [0, 1]}, r"'moe_layers' is \[0, 1\]"),
        ({"attention_bias": True}, "llama4 implies false"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """(f32 file, token ids, transformers' logits) of a model with chunks of 16 tokens."""
    tmp_path = tmp_path_factory.mktemp("short")
    case = replace(
        CASES["llama4"],
        name="llama4_short",
        config=lambda s: (
            CASES["llama4"].config(s)
            | {
                "num_hidden_layers": 4,
                "num_local_experts": 2,
                "attention_chunk_size": 16,
                "floor_scale": 16,
            }
        ),
    )
    tiny = make_tiny_model(case, WIDE, tmp_path / "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_CHUNK", 16)
        iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    return tmp_path / "f32.gguf", torch.tensor(tiny.tokens), torch.from_numpy(tiny.logits)


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr(llama4, "CHUNK", 16)


@pytest.mark.usefixtures("chunks")
def test_chunks_are_those_of_transformers(short):
    """At once, in pieces, and one by one, by the programs of steps."""
    file, tokens, expected = short
    with load_model(file) as model:
        assert (model.forward(tokens.tolist()) - expected).abs().max() < 1e-4
        for sizes in ([13, 10, 17], [*[1] * 40]):
            state = model.new_state(64, CacheSettings("f32", "f32"))
            rows = [model.extend(x, state, all_logits=True) for x in tokens.split(sizes)]
            assert (torch.cat(rows) - expected).abs().max() < 1e-4


@pytest.mark.usefixtures("chunks")
def test_chunks_on_the_fast_paths(short, tmp_path, monkeypatch):
    file, tokens, _ = short
    path, settings = tmp_path / "q8_0.gguf", CacheSettings("f32", "f32")
    iqforge.quantize_model(file, path, Recipe("Q8_0", pure=True))
    step_on_cpu.install(monkeypatch)
    prompt_on_cpu.install(monkeypatch)
    with load_model(path) as model:
        steps = StepPath(model.network, Context(CPU))
        expected = model.extend(tokens, model.new_state(64, settings), all_logits=True)
        found = in_pieces(steps, tokens, model.new_state(64, settings))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        prompts = PromptPath(model.network, Context(CPU, torch.float16, None, ubatch=64))
        expected = model.hidden(tokens[None])[0]
        every = normed(model, prompts.run(tokens[None], 0)).clone()
        last = normed(model, prompts.run(tokens[None], 0, last=True)).clone()
        state, rows = model.new_state(64, CacheSettings()), []
        for first, end in ((0, 13), (13, 14), (14, 40)):
            state.reserve(end - first)
            rows.append(normed(model, prompts.run(tokens[None, first:end], first, state)).clone())
            state.advance(end - first)
        for values, wanted in (
            (every, expected),
            (last, expected[-1:]),
            (torch.cat(rows), expected),
        ):
            assert (values - wanted).abs().max() < 0.05 * expected.abs().max()
