"""Multi-head latent attention (MLA): keys and values are computed from a small latent vector, and
only that is cached.

Per head, `kv_b_proj` [heads * (nope + v), rank] computes the unrotated part of the key and the
value. GGUF splits it into `attn_k_b` [heads, rank, nope], transposed so that it maps queries into
the latent space, and `attn_v_b` [heads, v, rank].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import SelectedRows, TransposedHeads
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

_KV_B = f"{LAYER}.self_attn.kv_b_proj"
_GATING = {"softmax": 1, "sigmoid": 2}  # GGUF's numbers


class LatentAttention(RoutedExperts):
    """MLA with dense layers first and routed experts after them. In GGUF's keys this is attention
    with one key-value head of the latent's size.
    """

    default_scoring: str | None = (
        # scoring of the model class if config.json has no scoring_func; None: not written
        None
    )
    has_selection_bias = False
    least_rotated = 1  # elements of keys

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.q_rank = config.integer("q_lora_rank", default=None)
        self.kv_rank = config.integer("kv_lora_rank")
        self.n_nope, self.n_rot = (
            config.integer("qk_nope_head_dim"),
            config.integer("qk_rope_head_dim", minimum=self.least_rotated),
        )
        self.n_value = config.integer("v_head_dim")
        self.n_dense = self._count_dense_layers()
        self.n_shared = config.integer("n_shared_experts", minimum=0, default=0)
        if config.integer("moe_layer_freq", default=1) != 1:
            raise ConfigError(
                "key 'moe_layer_freq' is not 1; GGUF has experts in every layer after the dense"
                " ones",
                file=config.file,
            )
        if config.boolean("attention_bias", default=False):
            raise ConfigError(
                "key 'attention_bias' is true; GGUF's latent attention has no biases",
                file=config.file,
            )
        check_flag(config, self.gguf_name, "rope_interleave", True)
        self.n_kv_heads = self.n_heads if self._joined else 1

    def _count_dense_layers(self) -> int:
        """Return `first_k_dense_replace`, or how many layers `mlp_layer_types` calls dense, as
        newer configs do. Raise ConfigError if the two differ or a later layer is dense.
        """
        config, kinds = self.config, self.config.strings("mlp_layer_types", default=[])
        if not kinds:
            return config.integer("first_k_dense_replace", minimum=0, maximum=self.n_layers)
        counted = kinds.count("dense")
        if kinds != ["dense"] * counted + ["sparse"] * (self.n_layers - counted):
            raise ConfigError(
                f"key 'mlp_layer_types' must say dense for the first of {self.n_layers} layers and"
                " sparse for all others",
                file=config.file,
            )
        said = config.integer("first_k_dense_replace", minimum=0, default=counted)
        if said != counted:
            raise ConfigError(
                f"key 'first_k_dense_replace' is {said}, but 'mlp_layer_types' has {counted} dense"
                " layers",
                file=config.file,
            )
        return counted

    @property
    def _joined(self) -> bool:
        return self.options.mla_layout == "ik"

    def _derived_head_size(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    # --- metadata

    def head_size_keys(self) -> dict[str, Value]:
        if self._joined:
            sizes = (self.n_nope + self.n_rot, self.n_value)
        else:
            sizes = (self.kv_rank + self.n_rot, self.kv_rank)
        return {"attention.key_length": u32(sizes[0]), "attention.value_length": u32(sizes[1])}

    def expert_keys(self) -> dict[str, Value]:
        config, keys = self.config, super().expert_keys()
        if not self._joined and "n_group" in config and "topk_group" in config:
            groups = config.integer("n_group")
            keys |= {
                "expert_group_count": u32(groups),
                "expert_group_used_count": u32(config.integer("topk_group", maximum=groups)),
            }
        scoring = config.string("scoring_func", default=self.default_scoring)
        if scoring is not None:
            if scoring not in _GATING:
                raise ConfigError(
                    f"key 'scoring_func' is '{scoring}', expected one of {', '.join(_GATING)}",
                    file=config.file,
                )
            keys["expert_gating_func"] = u32(_GATING[scoring])
        return keys

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        keys = {"leading_dense_block_count": u32(self.n_dense), "vocab_size": u32(self.n_vocab)}
        if self.q_rank is not None:
            keys["attention.q_lora_rank"] = u32(self.q_rank)
        keys["attention.kv_lora_rank"] = u32(self.kv_rank)
        if not self._joined:
            keys |= {
                "attention.key_length_mla": u32(self.n_nope + self.n_rot),
                "attention.value_length_mla": u32(self.n_value),
            }
        keys["expert_feed_forward_length"] = u32(self.n_ff_expert)
        if self.n_shared:
            keys["expert_shared_count"] = u32(self.n_shared)
        keys["expert_weights_scale"] = f32(config.number("routed_scaling_factor"))
        if (normed := config.boolean("norm_topk_prob")) or self._joined:
            keys["expert_weights_norm"] = boolean(normed)
        return keys | {"rope.dimension_count": u32(self.n_rot), **self._yarn_keys()}

    def _yarn_keys(self) -> dict[str, Value]:
        """Runtimes multiply ln(scale) in the magnitude of attention by 0.1 times
        `mscale_all_dim`. Where that is not 0 they do not scale the rotation: that of a model is
        scaled if its `mscale` is another one, and `attention_factor` does not say by what.
        """
        section = self.config.section("rope_parameters", "rope_scaling")
        if self.rope.kind != "yarn" or section is None or "mscale_all_dim" not in section:
            return {}
        scale = section.number("mscale_all_dim", positive=False)
        # Without `mscale`, transformers scales the rotation as for 1.
        if scale and "attention_factor" not in section:
            if "mscale" not in section:
                raise ConfigError(
                    f"key 'mscale' is missing; GGUF's {self.gguf_name} implies {scale:g}",
                    file=self.config.file,
                )
            check_number(section, self.gguf_name, "mscale", scale)
        return {"rope.scaling.yarn_log_multiplier": f32(0.1 * scale)}

    # --- tensors

    def attention(self) -> list[Weight]:
        """Return the rows of latent attention."""
        d, heads, attn = self.n_embd, self.n_heads, f"{LAYER}.self_attn"
        query = heads * (self.n_nope + self.n_rot)
        if self.q_rank is None:
            queries = [Weight(f"{attn}.q_proj", "blk.{}.attn_q", (query, d))]
        else:
            queries = [
                Weight(f"{attn}.q_a_proj", "blk.{}.attn_q_a", (self.q_rank, d)),
                Weight(f"{attn}.q_a_layernorm", "blk.{}.attn_q_a_norm", (self.q_rank,)),
                Weight(f"{attn}.q_b_proj", "blk.{}.attn_q_b", (query, self.q_rank)),
            ]
        return [
            *queries,
            Weight(
                f"{attn}.kv_a_proj_with_mqa", "blk.{}.attn_kv_a_mqa", (self.kv_rank + self.n_rot, d)
            ),
            Weight(f"{attn}.kv_a_layernorm", "blk.{}.attn_kv_a_norm", (self.kv_rank,)),
            Weight(_KV_B, "blk.{}.attn_kv_b", (heads * (self.n_nope + self.n_value), self.kv_rank)),
            Weight(f"{attn}.o_proj", "blk.{}.attn_output", (d, heads * self.n_value)),
        ]

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *self.attention(),
            *dense_then_experts(
                self, self.n_dense, self.n_shared, choice_bias=self.has_selection_bias
            ),
        ]

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        if weight.stored == _KV_B:
            return [(f"blk.{{}}.attn_{part}.weight", f"{_KV_B}.weight") for part in ("k_b", "v_b")]
        return super().required(weight)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern == f"{_KV_B}.weight":
            layer = self.layer_of(tensor, numbers)
            check_shape(tensor, table[_KV_B].shape_of(layer))
            if self._joined:
                yield self.mapped(tensor, table[_KV_B], "weight", layer)
            yield from self._split_kv_b(tensor, layer)
        else:
            yield from super().convert(name, tensor, table)

    def _split_kv_b(self, tensor: StoredTensor, layer: int) -> Iterator[ConvertedTensor]:
        heads, rank, stride = self.n_heads, self.kv_rank, self.n_nope + self.n_value
        stored, type = StoredRows(self.checkpoint, tensor), self.checkpoint.type_of(tensor)
        of_values = (
            np.arange(heads)[:, None] * stride + self.n_nope + np.arange(self.n_value)
        ).ravel()
        k_shape, v_shape = (heads, rank, self.n_nope), (heads, self.n_value, rank)
        if self._joined:  # the same bytes with the heads in one matrix
            k_shape, v_shape = (heads * rank, self.n_nope), (heads * self.n_value, rank)
        yield ConvertedTensor(
            TensorInfo(f"blk.{layer}.attn_k_b.weight", k_shape, type),
            TransposedHeads(stored, heads, stride, self.n_nope, type),
        )
        yield ConvertedTensor(
            TensorInfo(f"blk.{layer}.attn_v_b.weight", v_shape, type),
            SelectedRows(stored, of_values),
        )
