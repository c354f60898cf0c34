"""gemma3n: the text model of Gemma 3n. Tokens have several streams (AltUp), layers an input each
and a second residual layer (LAuReL); first layers use few of their hidden elements, and late ones
the keys and values of earlier ones.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ..layers.block import Block, Branch
from ..layers.layer_input import LayerInputs
from ..layers.rowwise.altup import AltUpCorrect, AltUpMerge, AltUpPredict, AltUpRouter, Laurel
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_SPEC = FFNSpec("gelu")
_PERIOD = 5  # of layers without a window, in files that do not say


@architecture("gemma3n")
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, n = d.p, d.n_layers
    default = tuple((layer + 1) % _PERIOD != 0 for layer in range(n))
    has_window = p.flags("attention.sliding_window_pattern", n, default)
    n_own = n - p.integer("attention.shared_kv_layers", 0, least=0, most=n - 1)
    n_inputs = p.integer("embedding_length_per_layer_input")
    n_streams = p.integer("altup.num_inputs", least=2)
    p.integer("altup.active_idx", 0, least=0, most=0)
    hidden = p.per_layer("feed_forward_length", n)
    above = p.numbers("activation_sparsity_scale", n, float("-inf"), least=None, may_be_all=True)
    ropes = {
        False: d.rope("neox"),
        True: d.rope("neox", base=p.number("rope.freq_base_swa", 10000.0, above=1)),
    }
    window = p.integer("attention.sliding_window")
    # The last layer of each kind that has own keys and values.
    sources = {has_window[layer]: layer for layer in range(n_own)}
    for layer in range(n_own, n):  # files have them, and nothing reads them
        if has_window[layer] not in sources:
            raise ConfigError(
                f"metadata key 'gemma3n.attention.shared_kv_layers' is {n - n_own}, but no layer"
                f" before has the keys and values that layer {layer} needs",
                file=p.file,
            )
        for name in ("attn_k.", "attn_v.", "attn_k_norm."):
            d.w.skip(f"blk.{layer}.{name}")

    def attention(layer: int) -> Any:
        near = has_window[layer]
        return d.attention(
            layer,
            ropes[near],
            head_norms=True,
            scale=1.0,
            window=window if near else 0,
            value_norm=True,
            value_eps=d.eps,
            kv_from=sources[near] if layer >= n_own else None,
            kv_shared=n_own < n and layer in sources.values(),
        )

    def block(layer: int) -> Block:
        parts = _Parts(d, layer, n_streams)
        spec = FFNSpec("gelu", cutoff=None if above[layer] == float("-inf") else above[layer])
        both = d.block(
            layer,
            attention(layer),
            d.ffn(layer, hidden[layer], spec),
            post_norms=("post_attention_norm", "post_ffw_norm"),
        )
        mixer, ffn = both.branches
        branches = [
            parts.branch(parts.predict()),
            mixer,
            parts.branch(parts.laurel()),
            ffn,
            parts.branch(parts.correct(n_inputs)),
        ]
        if layer == n - 1:
            branches.append(parts.branch(AltUpMerge(parts.of_streams("altup_unembd_proj"))))
        return Block(branches, both.device)

    name = "per_layer_model_proj"
    return d.network(
        block,
        embedding_scale=d.width**0.5,
        softcap=p.number("final_logit_softcapping", 30.0),
        n_streams=n_streams,
        inputs=LayerInputs(
            d.w.embedding("per_layer_token_embd", d.w.n_rows_of("token_embd.weight"), n * n_inputs),
            d.w.linear(name, d.width, n * n_inputs, role=name, split="replicated"),
            d.rms_norm("per_layer_proj_norm", n_inputs),
        ),
    )


class _Parts:
    """What a layer has besides attention and feed-forward."""

    def __init__(self, d: Decoder, layer: int, n_streams: int):
        self.d, self.layer, self.n, self.at = d, layer, n_streams, f"blk.{layer}"
        self.router = AltUpRouter(
            d.rms_norm(f"{self.at}.altup_router_norm"),
            self._linear("altup_router", d.width, n_streams),
        )

    def branch(self, module: Any) -> Branch:
        return Branch(None, module, takes_batch=True)

    def of_streams(self, name: str) -> Any:
        """Return the matrices of the streams but the first, which no layer has."""
        width = self.d.width
        return self.d.w.heads(name, self.n - 1, width, width, role=name, split="replicated")

    def predict(self) -> AltUpPredict:
        coefficients = self._linear("altup_predict_coef", self.n, self.n**2)
        expand = None if self.layer else self.of_streams("altup_proj")
        return AltUpPredict(self.router, coefficients, expand)

    def laurel(self) -> Laurel:
        d, at = self.d, self.at
        rank = d.w.n_rows_of(f"{at}.laurel_l.weight")
        left = self._linear("laurel_l", d.width, rank)
        right = self._linear("laurel_r", rank, d.width)
        norms = d.rms_norm(f"{at}.attn_norm"), d.rms_norm(f"{at}.laurel_post_norm")
        return Laurel(norms[0], left, right, norms[1])

    def correct(self, n_inputs: int) -> AltUpCorrect:
        d = self.d
        return AltUpCorrect(
            self.router,
            self._linear("altup_correct_coef", self.n, self.n),
            d.w.vector(f"{self.at}.altup_correct_scale.weight", d.width),
            self._linear("inp_gate", d.width, n_inputs),
            self._linear("proj", n_inputs, d.width),
            d.rms_norm(f"{self.at}.post_norm"),
            _SPEC,
        )

    def _linear(self, name: str, n_in: int, n_out: int) -> Any:
        return self.d.w.linear(f"{self.at}.{name}", n_in, n_out, role=name, split="replicated")
