"""StableLM: LayerNorms with biases, and a rotation of a part of each head. StableLM 2 12B has norms
of heads with weights for each head, and attention and feed-forward side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import ClassVar

from ...formats.source import TensorInfo
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import DefaultRopeConfig
from ..tensors.rows import ConcatenatedRows, StoredRows
from ..tensors.stored import StoredTensor
from .base import Architecture
from .blocks import LAYER, attention, gated_feed_forward
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

log = logging.getLogger(__name__)

_NORMS = {part: f"{LAYER}.self_attn.{part}_layernorm" for part in "qk"}


@register("StableLmForCausalLM", "StableLMEpochForCausalLM")
class StableLM(Architecture):
    """StableLM 3B, Zephyr and Code 3B, StableLM 2 1.6B and 12B; GGUF `stablelm`."""

    gguf_name = "stablelm"
    always_names_head_size = False
    pre_names: ClassVar[dict[str, str]] = {"qwen2": "stablelm2"}
    class_defaults: ClassVar[dict[str, object]] = {"layer_norm_eps": 1e-5}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.parallel = config.boolean("use_parallel_residual", default=False)
        self.normed_heads = {"q": self.n_heads, "k": self.n_kv_heads}
        if not config.boolean("qk_layernorm", default=False):
            self.normed_heads = {}
        self._norms: dict[tuple[str, int], dict[int, StoredTensor]] = {}
        if self.tied:
            log.warning(
                "llama.cpp refuses GGUF's %s with no output matrix of its own", self.gguf_name
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        """Return the settings, of which the first code of StableLM has two in other keys."""
        config = checkpoint.config.of_text()
        older = (("layer_norm_eps", "norm_eps"), ("partial_rotary_factor", "rope_pct"))
        said = {key: config.number(old) for key, old in older if old in config}
        # A factor in `rope_parameters` comes before this one.
        return config.with_defaults({"partial_rotary_factor": 0.25} | said).with_defaults(
            self.class_defaults
        )

    def make_rope(self) -> DefaultRopeConfig:
        rope = DefaultRopeConfig(self.config, self.head_size)
        self.n_rotated = rope.rotated()
        return rope

    def rope_keys(self) -> dict[str, Value]:
        """Return the key of a base that is not the usual one: llama.cpp's converter writes none."""
        return super().rope_keys() if self.rope.base() != 10000.0 else {}

    def norm_keys(self) -> dict[str, Value]:
        return {"attention.layer_norm_epsilon": f32(self.config.number("layer_norm_eps"))}

    def family_keys(self) -> dict[str, Value]:
        return {
            "rope.dimension_count": u32(self.n_rotated),
            "use_parallel_residual": boolean(self.parallel),
        }

    def weights(self) -> list[Weight]:
        d, size = self.n_embd, self.head_size
        biased = self.config.boolean("use_qkv_bias", default=False)
        table = [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.norm", "output_norm", (d,), bias=True),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), bias=True),
            *attention(self, bias=biased, output_bias=False),
            *gated_feed_forward(self),
        ]
        if not self.parallel:
            name = f"{LAYER}.post_attention_layernorm"
            table.append(Weight(name, "blk.{}.ffn_norm", (d,), bias=True))
        return table + [
            Weight(_NORMS[part], f"blk.{{}}.attn_{part}_norm", (heads, size))
            for part, heads in self.normed_heads.items()
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        for part, heads in self.normed_heads.items():
            if pattern == f"{_NORMS[part]}.norms.{{}}.weight":
                layer, head = self.layer_of(tensor, numbers), numbers[1]
                if head >= heads:
                    break
                check_shape(tensor, (self.head_size,))
                found = self._norms.setdefault((part, layer), {})
                found[head] = tensor
                if len(found) == heads:
                    yield self._stacked(part, layer, [found[number] for number in range(heads)])
                return
        yield from super().convert(name, tensor, table)

    def _stacked(self, part: str, layer: int, norms: list[StoredTensor]) -> ConvertedTensor:
        """Return the norms of the heads of a layer as one tensor, [heads, head size]."""
        shape = len(norms), self.head_size
        info = TensorInfo(
            f"blk.{layer}.attn_{part}_norm.weight", shape, self.checkpoint.type_of(norms[0])
        )
        rows = [StoredRows(self.checkpoint, norm) for norm in norms]
        return ConvertedTensor(info, ConcatenatedRows(rows), tuple(norms))
