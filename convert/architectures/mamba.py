"""Models of the first Mamba alone, as transformers stores them, and Falcon-Mamba."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import ComputedRows
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .base import Architecture
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Weight

_LAYER = "backbone.layers.{}"
_MIXER = f"{_LAYER}.mixer"
_LONGEST = 1 << 20  # what the reference writes as the length of texts, as there are no positions
_RANKS = 16  # elements of the width for each of the low-rank steps, where config.json does not say


@register("MambaForCausalLM")
class Mamba(Architecture):
    """The first Mamba in every layer and nothing else; GGUF `mamba`."""

    gguf_name = "mamba"
    tied_by_default = True
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
    ff_is_optional = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, d = self.config, self.n_embd
        unit = config.integer("pad_vocab_size_multiple", default=1)
        self.n_vocab = -(-self.n_vocab // unit) * unit  # as many rows has the embedding
        self.inner = config.integer("intermediate_size", default=config.integer("expand") * d)
        if self.inner != 2 * d:
            raise ConfigError(
                f"layers have {self.inner} channels; GGUF's {self.gguf_name} implies twice"
                f" hidden_size {d}",
                file=config.file,
            )
        self.state, self.taps = config.integer("state_size"), config.integer("conv_kernel")
        automatic = config.values.get("time_step_rank", "auto") == "auto"
        self.rank = -(-d // _RANKS) if automatic else config.integer("time_step_rank")
        check_flag(config, self.gguf_name, "use_bias", False)
        check_flag(config, self.gguf_name, "use_conv_bias", True)

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
            "ssm.conv_kernel": u32(self.taps),
            "ssm.inner_size": u32(self.inner),
            "ssm.state_size": u32(self.state),
            "ssm.time_step_rank": u32(self.rank),
            "attention.layer_norm_rms_epsilon": f32(self.config.number("layer_norm_epsilon")),
            "ssm.dt_b_c_rms": boolean(self.norms_vectors),
        }
        own = {f"{self.gguf_name}.{key}": value for key, value in keys.items()}
        return {**own, "general.file_type": u32(0)}

    def weights(self) -> list[Weight]:
        d, n, state = self.n_embd, self.inner, self.state
        return [
            Weight("backbone.embeddings", "token_embd", (self.n_vocab, d)),
            Weight("backbone.norm_f", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{_LAYER}.norm", "blk.{}.attn_norm", (d,)),
            Weight(f"{_MIXER}.in_proj", "blk.{}.ssm_in", (2 * n, d)),
            Weight(f"{_MIXER}.conv1d", "blk.{}.ssm_conv1d", (n, 1, self.taps), bias=True),
            Weight(f"{_MIXER}.x_proj", "blk.{}.ssm_x", (self.rank + 2 * state, n)),
            Weight(f"{_MIXER}.dt_proj", "blk.{}.ssm_dt", (n, self.rank), bias=True),
            Weight(f"{_MIXER}.A_log", "blk.{}.ssm_a", (n, state), exact=True),
            Weight(f"{_MIXER}.D", "blk.{}.ssm_d", (n,), exact=True),
            Weight(f"{_MIXER}.out_proj", "blk.{}.ssm_out", (d, n)),
        ]

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        """Return the convolution without its dimension of 1, and -exp of what is stored for A."""
        made, part = super().mapped(tensor, weight, suffix, layer), weight.stored
        info = made.info
        if part == f"{_MIXER}.conv1d" and suffix == "weight":
            shape = (self.inner, self.taps)
            return ConvertedTensor(TensorInfo(info.name, shape, info.type), made.rows)
        if part != f"{_MIXER}.A_log":
            return made
        rows, n = StoredRows(self.checkpoint, tensor), self.state
        # In double precision, so that the last bit is that of the exact value.
        computed = ComputedRows(rows, info.type, n, lambda x: -np.exp(x.astype(np.float64)))
        return ConvertedTensor(info.with_type(TYPES["F32"]), computed)


@register("FalconMambaForCausalLM")
class FalconMamba(Mamba):
    """Falcon-Mamba, which norms steps and vectors; GGUF `mamba`."""

    norms_vectors = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_number(self.config, self.gguf_name, "mixer_rms_eps", 1e-6)
