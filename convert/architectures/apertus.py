"""Apertus: Llama's layers with norms of query and key heads, and a feed-forward of xIELU without a
gate, whose numbers are learned in every layer.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import CheckpointError
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..packed.scaled import float_values
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head
from .implied import check_flag
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight, split_numbers

log = logging.getLogger(__name__)

_ACTIVATION = f"{LAYER}.mlp.act_fn."
_SCALING = {  # of the class, where config.json has no key
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@register("ApertusForCausalLM")
class Apertus(Architecture):
    """Apertus 8B and 70B; GGUF `apertus`."""

    gguf_name = "apertus"
    activation = ("hidden_act", ("xielu",))
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5, "rope_theta": 1.2e7}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        for key, implied in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            check_flag(self.config, self.gguf_name, key, implied)
        if self.tied:
            log.warning(
                "llama.cpp refuses GGUF's %s with no output matrix of its own", self.gguf_name
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = super().read_config(checkpoint)
        if "rope_parameters" in config or "rope_scaling" in config:
            return config
        return Config(config.values | {"rope_scaling": _SCALING}, config.file)

    def text_name(self, name: str) -> str | None:
        text = super().text_name(name)
        is_number = text is not None and split_numbers(text)[0].startswith(_ACTIVATION)
        return None if is_number else text  # in the metadata

    def metadata(self) -> dict[str, Value]:
        if self.options.vocab_only:
            return super().metadata()
        return super().metadata() | {
            f"xielu.{name}": array(
                ValueType.FLOAT32, [self._number(layer, name) for layer in range(self.n_layers)]
            )
            for name in ("alpha_n", "alpha_p", "beta", "eps")
        }

    def _number(self, layer: int, name: str) -> float:
        """Return a number of the activation of a layer. Raise CheckpointError if it is missing, or
        no single finite float.
        """
        stored = _ACTIVATION.format(layer) + name
        tensor = self.checkpoint.tensors.get(stored)
        if tensor is None:
            raise CheckpointError(
                "is missing from the checkpoint", file=self.checkpoint.path, tensor=stored
            )
        if tensor.n_elements != 1:
            raise CheckpointError(
                f"has shape {list(tensor.shape)}, expected one number",
                file=tensor.file,
                tensor=stored,
            )
        value = float(float_values(self.checkpoint, tensor).item())
        if not abs(value) < float("inf"):
            raise CheckpointError(
                f"is {value}, expected a finite number", file=tensor.file, tensor=stored
            )
        return value

    def family_keys(self) -> dict[str, Value]:
        return {
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.head_size),
        }

    def weights(self) -> list[Weight]:
        d, ff = self.n_embd, self.n_ff
        biased = self.config.boolean("attention_bias", default=False)
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.attention_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.feedforward_layernorm", "blk.{}.ffn_norm", (d,)),
            *attention(self, bias=biased, output_bias=biased, head_norms=True),
            Weight(f"{LAYER}.mlp.up_proj", "blk.{}.ffn_up", (ff, d)),
            Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, ff)),
        ]
