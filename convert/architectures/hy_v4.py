"""Hy4: several residual streams that keep what they are, latent attention with sinks and a gate for
each element, to positions that an indexer chooses; a dense layer first, then experts with a shared
one.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, f32, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER
from .implied import check_flag, check_name
from .layout_options import LayoutOptions
from .registry import register
from .sparse_latent import SparseAttention
from .weight import Weight

_PERIOD = 4  # of layers with an indexer, from the second on, in configs that do not say
_PARTS = ("fn", "base", "scale")
# What transformers 5.23 saves under other names, and reads under both.
_SAVED = (
    (re.compile(r"\.hc_pre\.hc_(attn|mlp)_layer\."), r".hc_\1_layer.hc_pre."),
    (re.compile(r"\.hc_head\.hc_pre\."), ".hc_head."),
    (re.compile(r"(\.mlp\.(?:.*\.)?)linear_gate\."), r"\1gate_proj."),
)


@register("HYV4ForCausalLM")
class HyV4(SparseAttention):
    """Hy4; GGUF `hy_v4`."""

    gguf_name = "hy_v4"
    has_mtp = False
    class_defaults: ClassVar[dict[str, object]] = {
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 16,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        for key in ("enable_ihc", "gated_mla", "learnable_sink", "use_dsa", "use_mla"):
            check_flag(config, name, key, True)
        check_flag(config, name, "tie_word_embeddings", False)
        check_name(config, name, "gating_type", ("elementwise",))
        self.n_streams = config.integer("hc_mult", minimum=2)
        self.selects = self.indexers(
            [
                "full" if not layer or layer % _PERIOD == 1 else "shared"
                for layer in range(self.n_layers)
            ]
        )

        if self.q_rank is None:
            raise ConfigError("key 'q_lora_rank' is missing", file=config.file)
        if not self.selects[0]:
            raise ConfigError(
                "key 'indexer_types' says that the first layer has no indexer, and no layer is"
                " before it",
                file=config.file,
            )

    def _count(self) -> int:
        return 0  # GGUF has no tensors for blocks that predict further tokens

    def text_name(self, name: str) -> str | None:
        if name.startswith("model.mtp_layers."):
            return None
        for saved, published in _SAVED:
            name = saved.sub(published, name)
        return super().text_name(name)

    # --- metadata

    def expert_keys(self) -> dict[str, Value]:
        keys = super().expert_keys()
        if self.config.integer("n_group") == 1:  # no groups
            keys = {key: value for key, value in keys.items() if "group" not in key}
        return keys

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        keys = super().family_keys() | {
            "attention.indexer.types": array(ValueType.BOOL, self.selects),
            "hyper_connection.count": u32(self.n_streams),
            "hyper_connection.epsilon": f32(config.number("hc_eps")),
            "hyper_connection.magnitude": f32(config.number("hc_magnitude")),
        }
        if (limit := config.number("swiglu_limit", positive=False)) > 0:
            keys["swiglu_clamp_exp"] = array(ValueType.FLOAT32, [limit] * self.n_layers)
        return keys

    # --- tensors

    def weights(self) -> list[Weight]:
        d, n, heads = self.n_embd, self.n_streams, self.n_heads
        attn = f"{LAYER}.self_attn"
        around, after = ((2 * n, n * d), (2 * n,), (2,)), ((n, n * d), (n,), (1,))
        return [
            *super().weights(),
            Weight(f"{attn}.linear_gate", "blk.{}.attn_gate", (heads * self.n_value, d)),
            Weight(
                f"{attn}.learnable_sink_param", "blk.{}.attn_sinks.weight", (heads,), exact=True
            ),
            *(
                Weight(
                    f"{LAYER}.hc_{half}_layer.hc_pre.hc_{part}",
                    f"blk.{{}}.hc_{gguf}_{part}.weight",
                    shape,
                    exact=True,
                )
                for half, gguf in (("attn", "attn"), ("mlp", "ffn"))
                for part, shape in zip(_PARTS, around, strict=True)
            ),
            *(
                Weight(
                    f"model.hc_head.hc_head_{part}", f"output_hc_{part}.weight", shape, exact=True
                )
                for part, shape in zip(_PARTS, after, strict=True)
            ),
        ]
