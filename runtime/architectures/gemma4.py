"""gemma4: Gemma 4. Layers with a sliding window and without one have heads of different sizes; late
layers of the E models use keys and values of earlier ones; other models have experts next to the
dense feed-forward layer.
"""

from __future__ import annotations

from typing import Any

from ..layers.block import Block, Branch
from ..layers.dense_and_experts import DenseAndExperts
from ..layers.layer_input import LayerInput, LayerInputs
from ..layers.moe import MoE
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture

_SPEC = FFNSpec("gelu")


@architecture("gemma4", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, w, n = d.p, d.w, d.n_layers
    has_window = p.flags("attention.sliding_window_pattern", n)
    n_own = n - p.integer("attention.shared_kv_layers", 0, least=0, most=n - 1)
    n_inputs = p.integer("embedding_length_per_layer_input", 0, least=0)
    hidden = p.per_layer("feed_forward_length", n)
    sizes = {
        False: (d.key_length, d.value_length),
        True: (
            p.integer("attention.key_length_swa", d.key_length),
            p.integer("attention.value_length_swa", d.value_length),
        ),
    }
    near_rot = p.integer("rope.dimension_count_swa", sizes[True][0], most=sizes[True][0])
    ropes = {
        False: d.rope("neox"),
        True: d.rope(
            "neox",
            head=sizes[True][0],
            n_rot=near_rot,
            base=p.number("rope.freq_base_swa", 10000.0, above=1),
            own_factors=False,
        ),
    }
    window = p.integer("attention.sliding_window")

    # The last layer of each kind that has own keys and values.
    sources = {has_window[layer]: layer for layer in range(n_own)}

    def attention(layer: int) -> Any:
        near = has_window[layer]
        return d.attention(
            layer,
            ropes[near],
            head_norms=True,
            key_length=sizes[near][0],
            value_length=sizes[near][1],
            scale=1.0,
            window=window if near else 0,
            value_norm=True,
            value_eps=d.eps,
            kv_from=sources.get(near) if layer >= n_own else None,
            kv_shared=n_own < n and layer in sources.values(),
        )

    def block(layer: int) -> Block:
        ffn = _feed_forward(d, layer, hidden[layer])
        return d.block(
            layer,
            attention(layer),
            ffn,
            norms=("attn_norm", None if isinstance(ffn, DenseAndExperts) else "ffn_norm"),
            post_norms=("post_attention_norm", "post_ffw_norm"),
            more=_layer_input(d, layer, n_inputs) if n_inputs else (),
            output_scale=w.optional_vector(f"blk.{layer}.layer_output_scale.weight", 1),
        )

    return d.network(
        block,
        embedding_scale=d.width**0.5,
        softcap=p.number("final_logit_softcapping", 0.0),
        inputs=_layer_inputs(d, n_inputs) if n_inputs else None,
    )


def _feed_forward(d: Decoder, layer: int, hidden: int) -> Any:
    """Return the dense feed-forward layer, or that and experts."""
    at, dense = f"blk.{layer}", d.ffn(layer, hidden, _SPEC)
    if not d.w.has(f"{at}.ffn_gate_inp.weight"):
        return dense
    experts = moe(
        d,
        layer,
        d.p.integer("expert_feed_forward_length"),
        router_spec(d),
        ffn=_SPEC,
        scaled_router=False,
    )
    return DenseAndExperts(
        dense,
        experts if isinstance(experts, MoE) else None,
        d.w.vector(f"{at}.ffn_gate_inp.scale", d.width) * d.width**-0.5,
        (d.norm(f"{at}.ffn_norm"), d.norm(f"{at}.pre_ffw_norm_2")),
        (d.norm(f"{at}.post_ffw_norm_1"), d.norm(f"{at}.post_ffw_norm_2")),
        d.eps,
        None if d.w.share is None else d.w.share.meeting.sum,
    )


def _layer_input(d: Decoder, layer: int, n_inputs: int) -> tuple[Branch, ...]:
    """Return the branch that adds a layer's own input, of n_inputs elements."""
    at = f"blk.{layer}"
    gate = d.w.linear(f"{at}.inp_gate", d.width, n_inputs, role="inp_gate", split="replicated")
    back = d.w.linear(f"{at}.proj", n_inputs, d.width, role="proj", split="replicated")
    module = LayerInput(gate, back, _SPEC)
    return (Branch(None, module, d.norm(f"{at}.post_norm"), takes_batch=True),)


def _layer_inputs(d: Decoder, n_inputs: int) -> LayerInputs:
    """Return what makes the inputs of all layers, of n_inputs elements each."""
    n, name = d.n_layers * n_inputs, "per_layer_model_proj"
    return LayerInputs(
        d.w.embedding("per_layer_token_embd", d.w.n_rows_of("token_embd.weight"), n),
        d.w.linear(name, d.width, n, role=name, split="replicated"),
        d.rms_norm("per_layer_proj_norm", n_inputs),
    )
