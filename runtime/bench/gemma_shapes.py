"""Shapes of Gemma 1 to 4. Layers of Gemma 3n and 4 differ in more than other models' do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...formats.types import GGMLType
from ...formats.values import Value, ValueType, array, f32, string, u32
from .shape import Shape


@dataclass(frozen=True)
class Gemma4Shape(Shape):
    """Sizes of a Gemma 4 model. `head` and `n_kv_heads` are those of layers without a window: every
    `period`th.

    near_head, near_kv_heads: those of layers with a window. keys_are_values: layers without a
    window have no matrix of values. shared_kv: so many last layers use keys and values of others.
    wide_shared: their feed-forward layers are twice as wide. layer_input: elements of the inputs of
    each layer. With experts, `dense_hidden` is the size of the dense layer next to them.
    """

    period: int = 6
    near_head: int = 256
    near_kv_heads: int = 1
    window: int = 1024
    keys_are_values: bool = False
    shared_kv: int = 0
    wide_shared: bool = False
    layer_input: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        width, all_inputs = self.width, self.n_layers * self.layer_input
        yield "token_embd.weight", (self.n_vocab, width)
        yield "rope_freqs.weight", (self.head // 2,)
        if self.layer_input:
            yield "per_layer_token_embd.weight", (self.n_vocab, all_inputs)
            yield "per_layer_model_proj.weight", (all_inputs, width)
            yield "per_layer_proj_norm.weight", (self.layer_input,)
        for layer in range(self.n_layers):
            for name, shape in (*self._mixer_of(layer), *self._rows_of(layer)):
                yield f"blk.{layer}.{name}", shape
        yield "output_norm.weight", (width,)

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that `with_layers` takes: all of them where the last ones use
        keys and values of others.
        """
        return self.n_layers if self.shared_kv else self.period

    def is_near(self, layer: int) -> bool:
        """Return whether a layer has a sliding window."""
        return (layer + 1) % self.period != 0

    def is_shared(self, layer: int) -> bool:
        """Return whether a layer uses keys and values of an earlier one."""
        return layer >= self.n_layers - self.shared_kv

    def _hidden_of(self, layer: int) -> int:
        wide = self.wide_shared and self.is_shared(layer)
        return (self.dense_hidden or self.hidden) * (2 if wide else 1)

    def _mixer_of(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        near, width = self.is_near(layer), self.width
        head, kv = (self.near_head, self.near_kv_heads) if near else (self.head, self.n_kv_heads)
        yield "attn_norm.weight", (width,)
        yield "attn_q.weight", (self.n_heads * head, width)
        if not self.is_shared(layer):
            yield "attn_k.weight", (kv * head, width)
            if near or not self.keys_are_values:
                yield "attn_v.weight", (kv * head, width)
        yield "attn_output.weight", (width, self.n_heads * head)
        yield "attn_q_norm.weight", (head,)
        if not self.is_shared(layer):
            yield "attn_k_norm.weight", (head,)
        yield "post_attention_norm.weight", (width,)

    def _rows_of(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, hidden, n = self.width, self._hidden_of(layer), self.n_experts
        yield "ffn_norm.weight", (width,)
        yield "ffn_gate.weight", (hidden, width)
        yield "ffn_up.weight", (hidden, width)
        yield "ffn_down.weight", (width, hidden)
        if n:
            yield "ffn_gate_inp.weight", (n, width)
            yield "ffn_gate_inp.scale", (width,)
            yield "ffn_gate_up_exps.weight", (n, 2 * self.hidden, width)
            yield "ffn_down_exps.weight", (n, width, self.hidden)
            yield "ffn_down_exps.scale", (n,)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                yield f"{name}.weight", (width,)
        yield "post_ffw_norm.weight", (width,)
        if self.layer_input:
            yield "inp_gate.weight", (self.layer_input, width)
            yield "proj.weight", (width, self.layer_input)
            yield "post_norm.weight", (width,)
        yield "layer_output_scale.weight", (1,)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        layers = range(self.n_layers)
        near = [self.is_near(layer) for layer in layers]
        kv = [self.near_kv_heads if x else self.n_kv_heads for x in near]
        keys = {
            "attention.head_count_kv": array(ValueType.INT32, kv),
            "attention.sliding_window": u32(self.window),
            "attention.sliding_window_pattern": array(ValueType.BOOL, near),
            "attention.shared_kv_layers": u32(self.shared_kv),
            "attention.key_length_swa": u32(self.near_head),
            "attention.value_length_swa": u32(self.near_head),
            "rope.dimension_count_swa": u32(self.near_head),
            "rope.freq_base_swa": f32(10000.0),
            "embedding_length_per_layer_input": u32(self.layer_input),
            "final_logit_softcapping": f32(30.0),
        }
        if self.wide_shared:
            hidden = [self._hidden_of(layer) for layer in layers]
            keys["feed_forward_length"] = array(ValueType.INT32, hidden)
        own = {f"{self.architecture}.{key}": value for key, value in keys.items()}
        return super().metadata(type) | own


_SPARSE = 10, 1.6448536  # first layers, and how many deviations above the mean gates count there


@dataclass(frozen=True)
class Gemma3nShape(Shape):
    """Sizes of the text model of a Gemma 3n. Every `period`th layer has no window.

    shared_kv: so many last layers use keys and values of others, although they have matrices for
    own ones. layer_input: elements of the inputs of each layer. streams: of a token. low_rank: that
    of the second residual layer.
    """

    period: int = 5
    window: int = 512
    shared_kv: int = 0
    layer_input: int = 256
    streams: int = 4
    low_rank: int = 64

    @property
    def least_layers(self) -> int:
        """Return all layers: the last ones use keys and values of others."""
        return self.n_layers

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        width, all_inputs = self.width, self.n_layers * self.layer_input
        yield "altup_proj.weight", (self.streams - 1, width, width)
        yield "altup_unembd_proj.weight", (self.streams - 1, width, width)
        yield "per_layer_token_embd.weight", (self.n_vocab, all_inputs)
        yield "per_layer_model_proj.weight", (all_inputs, width)
        yield "per_layer_proj_norm.weight", (self.layer_input,)
        yield from super().tensors()

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        n, width = self.streams, self.width
        yield "altup_correct_scale.weight", (width,)
        yield "altup_correct_coef.weight", (n, n)
        yield "altup_predict_coef.weight", (n * n, n)
        yield "altup_router.weight", (n, width)
        yield "altup_router_norm.weight", (width,)
        yield "laurel_l.weight", (self.low_rank, width)
        yield "laurel_r.weight", (width, self.low_rank)
        yield "laurel_post_norm.weight", (width,)
        yield "inp_gate.weight", (self.layer_input, width)
        yield "proj.weight", (width, self.layer_input)
        yield "post_norm.weight", (width,)
        yield from super()._mixer(layer)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        layers, (n_sparse, above) = range(self.n_layers), _SPARSE
        cutoffs = [above if layer < n_sparse else float("-inf") for layer in layers]
        near = [(layer + 1) % self.period != 0 for layer in layers]
        keys = {
            "attention.sliding_window": u32(self.window),
            "attention.sliding_window_pattern": array(ValueType.BOOL, near),
            "attention.shared_kv_layers": u32(self.shared_kv),
            "activation_sparsity_scale": array(ValueType.FLOAT32, cutoffs),
            "altup.active_idx": u32(0),
            "altup.num_inputs": u32(self.streams),
            "embedding_length_per_layer_input": u32(self.layer_input),
            "rope.freq_base_swa": f32(10000.0),
            "final_logit_softcapping": f32(30.0),
        }
        own = {f"{self.architecture}.{key}": value for key, value in keys.items()}
        return super().metadata(type) | own


def _gemma3n(name: str, n_layers: int, hidden: int) -> Gemma3nShape:
    return Gemma3nShape(
        "gemma3n",
        name,
        *(n_layers, 2048, 8, 2, 256, hidden, 262400, 1000000.0, 32768, 1e-6),
        head_norms=True,
        post_norms=("post_attention_norm", "post_ffw_norm"),
        tied=True,
        scaled_by_norms=True,
        shared_kv=n_layers - 20,
    )


def _gemma4(name: str, sizes: tuple[int, int, int, int, int, int, int], **more: Any) -> Gemma4Shape:
    """Sizes: layers, width, heads, kv heads and head of global layers, hidden, vocabulary."""
    return Gemma4Shape(
        "gemma4", name, *sizes, 1000000.0, 262144, 1e-6, tied=True, scaled_by_norms=True, **more
    )


def _gemma(name: str, *sizes: int) -> Shape:
    """Sizes: layers, width, heads, kv heads, hidden."""
    layers, width, heads, kv_heads, hidden = sizes
    return Shape(
        "gemma",
        name,
        *(layers, width, heads, kv_heads, 256, hidden, 256000),
        10000.0,
        8192,
        1e-6,
        tied=True,
    )


GEMMA_SHAPES: dict[str, Shape] = {
    "gemma-2b": _gemma("2B", 18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma("7B", 28, 3072, 16, 16, 24576),
    "gemma2-9b": Shape(
        "gemma2",
        "9B",
        *(42, 3584, 16, 8, 256, 14336, 256000),
        10000.0,
        8192,
        1e-6,
        post_norms=("post_attention_norm", "post_ffw_norm"),
        tied=True,
        keys={
            "attention.sliding_window": u32(4096),
            "attn_logit_softcapping": f32(50.0),
            "final_logit_softcapping": f32(30.0),
        },
    ),
    "gemma3-27b": Shape(
        "gemma3",
        "27B",
        *(62, 5376, 32, 16, 128, 21504, 262208),
        1000000.0,
        131072,
        1e-6,
        head_norms=True,
        post_norms=("post_attention_norm", "post_ffw_norm"),
        tied=True,
        keys={
            "attention.sliding_window": u32(1024),
            "rope.scaling.type": string("linear"),
            "rope.scaling.factor": f32(8.0),
        },
    ),
    "gemma3n-e2b": _gemma3n("E2B", 30, 8192),
    "gemma3n-e4b": _gemma3n("E4B", 35, 16384),
    "gemma4-31b": _gemma4(
        "31B", (60, 5376, 32, 4, 512, 21504, 262144), near_kv_heads=16, keys_are_values=True
    ),
    "gemma4": _gemma4(
        "26B.A4B",
        (30, 2816, 16, 2, 512, 704, 262144),
        near_kv_heads=8,
        keys_are_values=True,
        dense_hidden=2112,
        n_experts=128,
        n_used=8,
    ),
    "gemma4-tiny": _gemma4(
        "tiny",
        (2, 256, 4, 2, 128, 256, 512),
        period=2,
        near_head=64,
        near_kv_heads=4,
        window=64,
        keys_are_values=True,
        dense_hidden=512,
        n_experts=8,
        n_used=2,
    ),
    "gemma4-e4b": _gemma4(
        "E4B",
        (42, 2560, 8, 2, 512, 10240, 262144),
        near_kv_heads=2,
        window=512,
        shared_kv=18,
        layer_input=256,
    ),
}
