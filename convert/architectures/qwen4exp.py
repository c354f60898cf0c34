"""Qwen3.8-Flash-Next, text only: the layers of Qwen3.5 with experts, whose attention sees blocks of
positions that an indexer chooses, between several residual streams with mixers of low rank, and one
layer that adds embeddings of n-grams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import RowRange, StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER
from .implied import GLOBAL, check_flag, check_name
from .layout_options import LayoutOptions
from .ngram_table import PLE, NgramTable
from .qwen35 import Qwen35Moe
from .registry import register
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

_INDEXED = "indexed_attention"  # what transformers calls layers with attention
_INDEXER = f"{LAYER}.self_attn.indexer"
_PROJECTION = f"{_INDEXER}.index_qk_proj.weight"
_NO_NORMS = {"attn_norm", "post_attention_norm", "output_norm"}  # streams have theirs


@register("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
class Qwen4Exp(NgramTable, Qwen35Moe):
    """Qwen3.8-Flash-Next; GGUF `qwen4exp`."""

    gguf_name = "qwen4exp"
    has_mtp = False
    class_defaults: ClassVar[dict[str, object]] = {
        **Qwen35Moe.class_defaults,
        "hc_count": 4,
        "hc_lowrank": 320,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        check_flag(config, name, "norm_topk_prob", True)
        check_flag(config, name, "attention_bias", False)
        gate = {"output_gate_type": config.string("output_gate_type", "hidden_act", default="silu")}
        check_name(Config(gate, config.file), name, "output_gate_type", ("sigmoid",))
        self.n_streams = config.integer("hc_count", minimum=2)
        self.stream_rank = config.integer("hc_lowrank")
        self.n_index_heads = config.integer("indexer_n_heads")
        self.index_size = config.integer("indexer_head_dim")
        self.block, self.budget = (
            config.integer("indexer_compress_ratio"),
            config.integer("indexer_budget"),
        )
        if config.integer("indexer_kv_heads", default=1) != 1:
            raise ConfigError(
                f"key 'indexer_kv_heads' is {config.integer('indexer_kv_heads')}; GGUF's {name}"
                " implies 1",
                file=config.file,
            )
        if self.budget % self.block:
            raise ConfigError(
                f"indexer_budget {self.budget} is not a multiple of indexer_compress_ratio"
                f" {self.block}",
                file=config.file,
            )
        if self.rope.rotated() > self.index_size:
            raise ConfigError(
                f"{self.rope.rotated()} elements of heads are rotated, but indexer_head_dim is"
                f" {self.index_size}",
                file=config.file,
            )
        if self.ngram_layer is not None and not self.is_recurrent(self.ngram_layer):
            raise ConfigError(
                f"key 'ple_layer_ids' is [{self.ngram_layer + 1}], a layer with attention; GGUF's"
                f" {name} implies one with a delta net",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = super().read_config(checkpoint)
        kinds = config.strings("layer_types", default=[])
        if _INDEXED not in kinds:
            return config
        kinds = [GLOBAL if kind == _INDEXED else kind for kind in kinds]
        return Config(config.values | {"layer_types": kinds}, config.file)

    def _count(self) -> int:
        return 0  # GGUF has no tensors for blocks that predict further tokens

    def text_name(self, name: str) -> str | None:
        if name.removeprefix("model.").startswith("mtp."):
            return None
        return super().text_name(name)

    # --- metadata

    def family_keys(self) -> dict[str, Value]:
        attends = [not self.is_recurrent(layer) for layer in range(self.n_layers)]
        keys = super().family_keys() | {
            "hyper_connection.count": u32(self.n_streams),
            "hyper_connection.low_rank": u32(self.stream_rank),
            "attention.indexer.head_count": u32(self.n_index_heads),
            "attention.indexer.key_length": u32(self.index_size),
            "attention.indexer.top_k": u32(self.budget),
            "attention.compress_ratios": array(
                ValueType.INT32, [self.block if attend else 0 for attend in attends]
            ),
            **self.ngram_keys(),
        }
        image = self.checkpoint.config.integer("image_token_id", minimum=0, default=None)
        if self.ngram_layer is not None and image is not None:
            keys["ple.image_token_id"] = u32(image)
        return keys

    # --- tensors

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern != _PROJECTION:
            yield from super().convert(name, tensor, table)
            return
        layer, size = self.layer_of(tensor, numbers), self.index_size
        queries, rows = self.n_index_heads * size, StoredRows(self.checkpoint, tensor)
        check_shape(tensor, self.attending((queries + size, self.n_embd))(layer))
        for part, first, n in (("q", 0, queries), ("k", queries, size)):
            info = TensorInfo(
                f"blk.{layer}.indexer.{part}_proj.weight",
                (n, self.n_embd),
                self.checkpoint.type_of(tensor),
            )
            yield ConvertedTensor(info, RowRange(rows, first, n), (tensor,))

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        if weight.stored == f"{_INDEXER}.index_qk_proj":
            return [
                (f"blk.{{}}.indexer.{part}_proj.weight", f"{weight.stored}.weight") for part in "qk"
            ]
        return super().required(weight)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if weight.stored != f"{PLE}.conv1d":
            return made
        shape = made.info.shape[0], made.info.shape[2]
        return replace(made, info=TensorInfo(made.info.name, shape, made.info.type))

    def weights(self) -> list[Weight]:
        d, size = self.n_embd, self.index_size
        all_streams, index_rows = self.n_streams * d, (self.n_index_heads + 1) * size
        usual = [w for w in super().weights() if w.gguf.rpartition(".")[2] not in _NO_NORMS]

        def mixer(stored: str, gguf: str) -> list[Weight]:
            """Return the lines of what mixes streams."""
            rank = self.stream_rank
            return [
                Weight(f"{stored}.hc_norm", f"{gguf}_norm", (all_streams,), plus_one=True),
                Weight(f"{stored}.input_mix_weight_down", f"{gguf}_down", (rank, all_streams)),
                Weight(f"{stored}.input_mix_weight_up", f"{gguf}_up", (all_streams, rank)),
            ]

        ngrams = [
            Weight(f"{PLE}.{stored}", f"blk.{{}}.ple_{gguf}", self._in_ngram_layer(shape))
            for stored, gguf, shape in (
                ("key_proj", "key", (all_streams, self.ngram_width)),
                ("value_proj", "value", (d, self.ngram_width)),
                ("conv1d", "conv1d", (all_streams, 1, self.ngram_taps)),
            )
        ]
        ngrams += [
            Weight(
                f"{PLE}.norm_{name}",
                f"blk.{{}}.ple_norm_{name}",
                self._in_ngram_layer((all_streams,)),
                plus_one=True,
            )
            for name in ("key", "query", "conv")
        ]
        halves = [
            line
            for half, gguf in (("attn", "attn"), ("mlp", "ffn"))
            for line in (
                *mixer(f"{LAYER}.{half}_hyper_connection", f"blk.{{}}.hc_{gguf}"),
                Weight(
                    f"{LAYER}.{half}_hyper_connection.block_inject_weight",
                    f"blk.{{}}.hc_{gguf}_inject",
                    (self.n_streams, all_streams),
                ),
            )
        ]
        return [
            *usual,
            *halves,
            *mixer("model.hyper_connection_mixer", "output_hc"),
            *ngrams,
            Weight(f"{_INDEXER}.index_qk_proj", "", self.attending((index_rows, d))),
            *(
                Weight(
                    f"{_INDEXER}.{part}_layernorm",
                    f"blk.{{}}.indexer.{part}_norm",
                    self.attending((size,)),
                    plus_one=True,
                )
                for part in "qk"
            ),
        ]

    def _in_ngram_layer(self, shape: tuple[int, ...]):
        """Return the shape per layer of a weight that only the layer with n-grams has."""
        return lambda layer: shape if layer == self.ngram_layer else None
