"""DeepSeek V4: keys and values that are compressed along the sequence, several residual streams,
and experts that the token chooses in the first layers. Tensors have the names of DeepSeek's own
code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.compressed_rope import CompressedRope
from ..tensors.expert_numbers import ExpertNumbers
from ..tensors.stored import StoredTensor
from .experts import DOWN, GATE, UP, RoutedExperts
from .implied import check_flag, check_name
from .layout_options import LayoutOptions
from .registry import register
from .streams import stream_keys, stream_weights
from .weight import ConvertedTensor, Shape, Weight, check_shape, split_numbers

LAYER = "layers.{}"
_TABLE = f"{LAYER}.ffn.gate.tid2eid"
_OVERLAPPING = 4  # the ratio of layers whose entries overlap, and which have an indexer
_SQRT_SOFTPLUS = 4  # GGUF's number of the score
_RATIOS = {
    "sliding_attention": None,
    "compressed_sparse_attention": ("compress_rate_csa", 4),
    "heavily_compressed_attention": ("compress_rate_hca", 128),
}
# transformers saves the names of DeepSeek's code, but for some.
_OTHER_NAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\."), "hc_head_"),
    (re.compile(r"^hc_head_hc_"), "hc_head_"),
    (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
)
# Blocks that predict further tokens, and the parts that read images.
_OTHER_PARTS = ("mtp.", "vision.", "aligner.", "image_")


@register("DeepseekV4ForCausalLM")
class DeepseekV4(RoutedExperts):
    """DeepSeek V4; GGUF `deepseek4`."""

    gguf_name = "deepseek4"
    ff_is_optional = True
    has_window_key = True
    expert_stem = f"{LAYER}.ffn.experts"
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w3": UP, "w2": DOWN}
    rope: CompressedRope

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.q_rank = config.integer("q_lora_rank")
        self.n_groups, self.o_rank = config.integer("o_groups"), config.integer("o_lora_rank")
        self.n_index_heads = config.integer("index_n_heads")
        self.index_size = config.integer("index_head_dim")
        self.n_streams = config.integer("hc_mult")
        self.n_shared = config.integer("n_shared_experts")
        self.ratios = self._read_ratios()
        self.n_hash = self._read_hash_layers()
        check_name(config, name, "scoring_func", ("sqrtsoftplus",))
        for flag in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            check_flag(config, name, flag, False)
        if self.n_kv_heads != 1:
            raise ConfigError(
                f"key 'num_key_value_heads' is {self.n_kv_heads}; GGUF's {name} implies 1",
                file=config.file,
            )
        if self.n_heads % self.n_groups:
            raise ConfigError(
                f"num_attention_heads {self.n_heads} is not a multiple of o_groups {self.n_groups}",
                file=config.file,
            )

    def make_rope(self) -> CompressedRope:
        return CompressedRope(self.config, self.head_size)

    def _read_ratios(self) -> list[int]:
        """Return how many positions an entry of each layer is for, 0 in layers with a window only:
        `compress_ratios`, which may go on for blocks that predict further tokens, or what
        `layer_types` and `compress_rates` say. Raise ConfigError for fewer than the layers, and
        for a kind of layer that has another ratio than GGUF's form implies.
        """
        config = self.config
        if (found := config.integers("compress_ratios", default=None)) is None:
            rates = config.section("compress_rates")
            found = []
            for kind in config.strings("layer_types"):
                if kind not in _RATIOS:
                    raise ConfigError(
                        f"key 'layer_types' has '{kind}', expected one of {', '.join(_RATIOS)}",
                        file=config.file,
                    )
                ratio = 0
                if (older := _RATIOS[kind]) is not None:
                    section, key = (config, older[0]) if rates is None else (rates, kind)
                    ratio = section.integer(key, default=older[1])
                    if (ratio == _OVERLAPPING) != (older[1] == _OVERLAPPING):
                        raise ConfigError(
                            f"the ratio of '{kind}' is {ratio}; GGUF's {self.gguf_name} knows such"
                            f" layers by a ratio of {_OVERLAPPING}",
                            file=config.file,
                        )
                found.append(ratio)
        if len(found) < self.n_layers or min(found) < 0:
            raise ConfigError(
                f"compression ratios are {found}, expected one of 0 or more for each of"
                f" {self.n_layers} layers",
                file=config.file,
            )
        return found

    def _read_hash_layers(self) -> int:
        """Return in how many layers, the first ones, the token chooses experts. Raise ConfigError
        if it does so in others.
        """
        config = self.config
        if "mlp_layer_types" not in config:
            return config.integer("num_hash_layers", minimum=0)
        kinds = config.strings("mlp_layer_types")
        count = kinds.count("hash_moe")
        if kinds != ["hash_moe"] * count + ["moe"] * (self.n_layers - count):
            raise ConfigError(
                f"key 'mlp_layer_types' must say hash_moe for the first of {self.n_layers} layers"
                " and moe for all others",
                file=config.file,
            )
        return count

    # --- metadata

    def expert_keys(self) -> dict[str, Value]:
        return {**super().expert_keys(), "expert_gating_func": u32(_SQRT_SOFTPLUS)}

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        limit = config.number("swiglu_limit")
        limits = array(ValueType.FLOAT32, [limit] * self.n_layers)
        return {
            "rope.dimension_count": u32(self.rope.rotated()),
            "attention.q_lora_rank": u32(self.q_rank),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(self.n_shared),
            "expert_weights_scale": f32(config.number("routed_scaling_factor")),
            "expert_weights_norm": boolean(config.boolean("norm_topk_prob")),
            "swiglu_clamp_exp": limits,
            "swiglu_clamp_shexp": limits,
            "attention.indexer.head_count": u32(self.n_index_heads),
            "attention.indexer.key_length": u32(self.index_size),
            "attention.indexer.top_k": u32(config.integer("index_topk")),
            "attention.output_group_count": u32(self.n_groups),
            "attention.output_lora_rank": u32(self.o_rank),
            "attention.compress_ratios": array(ValueType.INT32, self.ratios),
            "attention.compress_rope_freq_base": f32(self.rope.compressed_base()),
            **stream_keys(config),
            "hash_layer_count": u32(self.n_hash),
            "embedding_length_out": u32(self.n_embd * self.n_streams),
        }

    # --- tensors

    def text_name(self, name: str) -> str | None:
        for pattern, own in _OTHER_NAMES:
            name = pattern.sub(own, name)
        if name.startswith(_OTHER_PARTS) or name.endswith(".ffn.gate.bias_vl"):
            return None
        # Some checkpoints have a bias in every layer. Where the token chooses, nothing uses it.
        found = re.fullmatch(r"layers\.(\d{1,9})\.ffn\.gate\.bias", name)
        return None if found is not None and int(found[1]) < self.n_hash else name

    def weights(self) -> list[Weight]:
        d, streams = self.n_embd, self.n_streams
        attn, ffn, heads = f"{LAYER}.attn", f"{LAYER}.ffn", self.n_heads * self.head_size
        width, out = self.n_ff_expert * self.n_shared, self.n_groups * self.o_rank
        exact = [
            Weight("hc_head_fn", "output_hc_fn.weight", (streams, streams * d), exact=True),
            Weight("hc_head_base", "output_hc_base.weight", (streams,), exact=True),
            Weight("hc_head_scale", "output_hc_scale.weight", (1,), exact=True),
            Weight(f"{attn}.attn_sink", "blk.{}.attn_sinks.weight", (self.n_heads,), exact=True),
            Weight(
                f"{ffn}.gate.bias",
                "blk.{}.exp_probs_b.bias",
                lambda layer: (self.n_experts,) if layer >= self.n_hash else None,
                exact=True,
            ),
            Weight(
                _TABLE,
                "blk.{}.ffn_gate_tid2eid.weight",
                lambda layer: (self.n_vocab, self.n_experts_used) if layer < self.n_hash else None,
                exact=True,
            ),
        ]
        return [
            Weight("embed", "token_embd", (self.n_vocab, d)),
            Weight("norm", "output_norm", (d,)),
            Weight("head", "output", (self.n_vocab, d)),
            *exact,
            *stream_weights(LAYER, streams, d, self.n_layers),
            Weight(f"{LAYER}.attn_norm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.ffn_norm", "blk.{}.ffn_norm", (d,)),
            Weight(f"{attn}.wq_a", "blk.{}.attn_q_a", (self.q_rank, d)),
            Weight(f"{attn}.q_norm", "blk.{}.attn_q_a_norm", (self.q_rank,)),
            Weight(f"{attn}.wq_b", "blk.{}.attn_q_b", (heads, self.q_rank)),
            Weight(f"{attn}.wkv", "blk.{}.attn_kv", (self.head_size, d)),
            Weight(f"{attn}.kv_norm", "blk.{}.attn_kv_a_norm", (self.head_size,)),
            Weight(f"{attn}.wo_a", "blk.{}.attn_output_a", (out, heads // self.n_groups)),
            Weight(f"{attn}.wo_b", "blk.{}.attn_output_b", (d, out)),
            *self._compressor(f"{attn}.compressor", "attn_compressor", self.head_size, False),
            *self._compressor(
                f"{attn}.indexer.compressor", "indexer_compressor", self.index_size, True
            ),
            Weight(
                f"{attn}.indexer.wq_b",
                "blk.{}.indexer.attn_q_b",
                self._indexed(self.n_index_heads * self.index_size, self.q_rank),
            ),
            Weight(
                f"{attn}.indexer.weights_proj",
                "blk.{}.indexer.proj",
                self._indexed(self.n_index_heads, d),
            ),
            Weight(f"{ffn}.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
            Weight(f"{ffn}.shared_experts.w1", "blk.{}.ffn_gate_shexp", (width, d)),
            Weight(f"{ffn}.shared_experts.w3", "blk.{}.ffn_up_shexp", (width, d)),
            Weight(f"{ffn}.shared_experts.w2", "blk.{}.ffn_down_shexp", (d, width)),
        ]

    def _indexed(self, *shape: int):
        """Return a shape for `Weight` that only layers with an indexer have."""
        return lambda layer: shape if self.ratios[layer] == _OVERLAPPING else None

    def _compressor(self, stored: str, gguf: str, size: int, indexer: bool) -> list[Weight]:
        """Return the rows of a compressor whose entries have `size` elements. indexer: it is that
        of the indexer.
        """

        def of(shape):
            def shape_in(layer: int) -> Shape | None:
                ratio = self.ratios[layer]
                overlaps = ratio == _OVERLAPPING
                if not ratio or (indexer and not overlaps):
                    return None
                return shape(ratio, 2 * size if overlaps else size)

            return shape_in

        projection = of(lambda ratio, n: (n, self.n_embd))
        return [
            Weight(f"{stored}.wkv", f"blk.{{}}.{gguf}_kv", projection),
            Weight(f"{stored}.wgate", f"blk.{{}}.{gguf}_gate", projection),
            Weight(
                f"{stored}.ape",
                f"blk.{{}}.{gguf}_ape.weight",
                of(lambda ratio, n: (ratio, n)),
                exact=True,
            ),
            Weight(f"{stored}.norm", f"blk.{{}}.{gguf}_norm", of(lambda ratio, n: (size,))),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern != _TABLE:
            yield from super().convert(name, tensor, table)
            return
        layer = self.layer_of(tensor, numbers)
        check_shape(tensor, table[_TABLE].shape_of(layer))
        info = TensorInfo(table[_TABLE].gguf.format(layer), tensor.shape, TYPES["I32"])
        yield ConvertedTensor(info, ExpertNumbers(self.checkpoint, tensor, self.n_experts))
