"""InternLM2: Llama's layers under names of their own. Query, key and value are one matrix, with the
queries of a head of keys first, then its keys and its values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...formats.source import TensorInfo
from ...formats.values import Value, boolean, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import FixedRopeConfig, RopeConfig
from ..tensors.reorder import SelectedRows
from ..tensors.rows import PairedRotaryRows, StoredRows
from ..tensors.stored import StoredTensor, TensorRows
from ..vocabulary.tokens import NORMAL, UNUSED, USER_DEFINED
from .base import Architecture
from .blocks import LAYER
from .implied import check_flag
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

log = logging.getLogger(__name__)

_JOINED = f"{LAYER}.attention.wqkv"
_END = "<|im_end|>"  # of a turn of a chat, and of a text where the vocabulary has it
_NULL, _FOR_NULL = "\0", "\N{DRAGON}"  # runtimes take a text of a zero byte for an empty one


@register("InternLM2ForCausalLM")
class InternLM2(Architecture):
    """InternLM2 and 2.5; GGUF `internlm2`."""

    gguf_name = "internlm2"
    always_names_head_size = False

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        for key in ("bias", "attention_bias"):
            check_flag(self.config, self.gguf_name, key, False)
        if self.tied:
            log.warning(
                "llama.cpp refuses GGUF's %s with no output matrix of its own", self.gguf_name
            )

    def make_rope(self) -> RopeConfig:
        rope = FixedRopeConfig(self.config, self.head_size)
        if rope.kind == "dynamic":
            log.warning(
                "in texts of more than %d tokens the model changes the frequencies of its rotation;"
                " GGUF's %s does not",
                rope.context(),
                self.gguf_name,
            )
        return rope

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        """Return the keys of the tokenizer. As in the reference's files, pieces that are kept for
        later use are marked as unused, a zero byte has another text, and the token that ends a turn
        ends texts.
        """
        keys = super().vocabulary(pre)
        texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
        kept = [
            UNUSED if text.startswith("[UNUSED") and kind in (NORMAL, USER_DEFINED) else kind
            for text, kind in zip(texts.data, types.data, strict=True)
        ]
        named = [_FOR_NULL if text == _NULL else text for text in texts.data]
        keys["tokenizer.ggml.tokens"] = replace(texts, data=named)
        keys["tokenizer.ggml.token_type"] = replace(types, data=kept)
        if keys["tokenizer.ggml.model"].data == "llama":
            keys.setdefault("tokenizer.ggml.add_space_prefix", boolean(True))
        if _END in named:
            keys["tokenizer.ggml.eos_token_id"] = u32(named.index(_END))
        return keys

    def weights(self) -> list[Weight]:
        d, ff, vocabulary = self.n_embd, self.n_ff, (self.n_vocab, self.n_embd)
        layer, heads = f"{LAYER}.feed_forward", self.n_heads * self.head_size
        return [
            Weight("model.tok_embeddings", "token_embd", vocabulary),
            Weight("model.norm", "output_norm", (d,)),
            Weight("output", "output", vocabulary, optional=self.tied),
            Weight(f"{LAYER}.attention_norm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.ffn_norm", "blk.{}.ffn_norm", (d,)),
            Weight(_JOINED, "blk.{}.attn_q", self._joined_shape),
            Weight(f"{LAYER}.attention.wo", "blk.{}.attn_output", (d, heads)),
            Weight(f"{layer}.w1", "blk.{}.ffn_gate", (ff, d)),
            Weight(f"{layer}.w3", "blk.{}.ffn_up", (ff, d)),
            Weight(f"{layer}.w2", "blk.{}.ffn_down", (d, ff)),
        ]

    @property
    def _joined_shape(self) -> tuple[int, int]:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_size, self.n_embd

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern != f"{_JOINED}.weight":
            yield from super().convert(name, tensor, table)
            return
        layer = self.layer_of(tensor, numbers)
        check_shape(tensor, self._joined_shape)
        base, type = StoredRows(self.checkpoint, tensor), self.checkpoint.type_of(tensor)
        group = self.n_heads // self.n_kv_heads
        row = np.arange(self._joined_shape[0])
        place = row // self.head_size % (group + 2)  # of the head among those of its key head
        for part, chosen, heads in (
            ("q", place < group, self.n_heads),
            ("k", place == group, self.n_kv_heads),
            ("v", place > group, 0),
        ):
            rows: TensorRows = SelectedRows(base, np.flatnonzero(chosen))
            n = rows.n_rows
            if heads:
                rows = PairedRotaryRows(rows, heads)
            info = TensorInfo(f"blk.{layer}.attn_{part}.weight", (n, self.n_embd), type)
            yield ConvertedTensor(info, rows, (tensor,))
