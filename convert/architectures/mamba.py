"""Models of the first Mamba alone, as transformers stores them, and Falcon-Mamba."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .base import Architecture
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .mamba1 import Mamba1
from .registry import register
from .weight import ConvertedTensor, Weight

_LAYER = "backbone.layers.{}"
_LONGEST = 1 << 20  # what the reference writes as the length of texts, as there are no positions


@register("MambaForCausalLM")
class Mamba(Architecture):
    """The first Mamba in every layer and nothing else; GGUF `mamba`."""

    gguf_name = "mamba"
    tied_by_default = True
    ff_is_optional = True  # it is the number of channels
    norms_vectors = False  # steps and vectors are normed, without weights
    class_defaults: ClassVar[dict[str, object]] = {
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        # Of layers that it has not.
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": _LONGEST,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        unit = config.integer("pad_vocab_size_multiple", default=1)
        self.n_vocab = -(-self.n_vocab // unit) * unit  # as many rows has the embedding
        inner = self.n_ff or config.integer("expand") * self.n_embd
        self.mamba = Mamba1.read(f"{_LAYER}.mixer", config, name, inner)
        check_flag(config, name, "use_bias", False)
        check_flag(config, name, "use_conv_bias", True)

    def metadata(self) -> dict[str, Value]:
        """Return the keys `mamba.*` in the order of the reference, which has zeros for sizes of
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
            "ssm.dt_b_c_rms": boolean(self.norms_vectors),
        }
        own = {f"{self.gguf_name}.{key}": value for key, value in keys.items()}
        return {**own, "general.file_type": u32(0)}

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
        return self.mamba.shaped(self.checkpoint, tensor, weight, suffix, made)


@register("FalconMambaForCausalLM")
class FalconMamba(Mamba):
    """Falcon-Mamba, which norms steps and vectors; GGUF `mamba`."""

    norms_vectors = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_number(self.config, self.gguf_name, "mixer_rms_eps", 1e-6)
