"""Models of Mamba-2 alone, as transformers stores them (Codestral Mamba) and as the code that was
published with the paper does (mamba2-130m to mamba2-2.7b).
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ConfigError
from ...formats.values import Value, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .base import Architecture
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .mamba2 import Mamba2
from .registry import register
from .weight import ConvertedTensor, Weight

_LAYER = "backbone.layers.{}"
_LONGEST = 1 << 20  # what the reference writes as the length of texts, as there are no positions
# Key of the published code -> that of transformers, outside of `ssm_cfg` and in it.
_OUTER = {"d_model": "hidden_size", "n_layer": "num_hidden_layers"}
_OUTER |= {"tie_embeddings": "tie_word_embeddings"}
_INNER = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand"}
_INNER |= {"headdim": "head_dim", "ngroups": "n_groups", "conv_bias": "use_conv_bias"}
_INNER |= {"bias": "use_bias", "dt_limit": "time_step_limit"}
# What that code assumes where transformers assumes something else.
_PUBLISHED = {"n_groups": 1, "tie_word_embeddings": True, "pad_vocab_size_multiple": 8}


@register("Mamba2ForCausalLM")
class Mamba2Model(Architecture):
    """Mamba-2 in every layer and nothing else; GGUF `mamba2`."""

    gguf_name = "mamba2"
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        # Of layers that it has not.
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": _LONGEST,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        unit = config.integer("pad_vocab_size_multiple", default=1)
        self.n_vocab = -(-self.n_vocab // unit) * unit  # as many rows has the embedding
        inner, size = config.integer("expand") * self.n_embd, config.integer("head_dim")
        heads = config.integer("num_heads", default=inner // size)
        if heads * size != inner:
            raise ConfigError(
                f"{heads} heads of Mamba layers with {size} elements are not {inner} elements,"
                f" {config.integer('expand')} times hidden_size",
                file=config.file,
            )
        self.mamba = Mamba2(
            f"{_LAYER}.mixer",
            heads,
            size,
            config.integer("state_size"),
            config.integer("n_groups"),
            config.integer("conv_kernel"),
            config.boolean("use_conv_bias", default=True),
        )
        self.mamba.check(config)
        check_flag(config, self.gguf_name, "use_bias", False)
        check_flag(config, self.gguf_name, "rms_norm", True)

    def read_config(self, checkpoint: Checkpoint) -> Config:
        outer = checkpoint.config
        inner = outer.section("ssm_cfg")
        if inner is None:
            return super().read_config(checkpoint)
        check_number(outer, self.gguf_name, "d_intermediate", 0)
        for key in ("rmsnorm", "D_has_hdim", "norm_before_gate"):
            check_flag(inner, self.gguf_name, key, key == "rmsnorm")
        if outer.integers("attn_layer_idx", default=[]):
            raise ConfigError(
                f"key 'attn_layer_idx' names layers with attention; GGUF's {self.gguf_name} has"
                " none",
                file=outer.file,
            )
        found: dict[str, Any] = dict(_PUBLISHED)
        for config, names in ((outer, _OUTER), (inner, _INNER)):
            found |= {new: config.values[old] for old, new in names.items() if old in config}
        return outer.with_defaults(found).with_defaults(self.class_defaults)

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        """Return the keys `mamba2.*` in the order of the reference, which has zeros for sizes of
        layers that the model has not.
        """
        keys = {
            "context_length": u32(_LONGEST),
            "embedding_length": u32(self.n_embd),
            "feed_forward_length": u32(0),
            "attention.head_count": u32(0),
            "block_count": u32(self.n_layers),
            **self.mamba.keys,
            "attention.layer_norm_rms_epsilon": f32(self.config.number("layer_norm_epsilon")),
        }
        own = {f"{self.gguf_name}.{key}": value for key, value in keys.items()}
        return {**own, "general.file_type": u32(0)}

    # --- tensors

    def text_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")  # of Codestral Mamba's first files
        return name.replace("backbone.embedding.", "backbone.embeddings.", 1)

    def weights(self) -> list[Weight]:
        d = self.n_embd
        return [
            Weight("backbone.embeddings", "token_embd", (self.n_vocab, d)),
            Weight("backbone.norm_f", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{_LAYER}.norm", "blk.{}.attn_norm", (d,)),
            *self.mamba.weights(d, lambda shape: lambda layer: shape),
        ]

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if suffix == "bias":
            return made
        return self.mamba.shaped(self.checkpoint, tensor, weight, made)
