"""Gemma 3n: streams (AltUp), inputs of layers, a residual layer of low rank (LAuReL), hidden
elements that are mostly zero, and keys and values that the last layers share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.deviations import deviations
from ..metadata.rope import RopeConfig
from ..tensors.rows import PaddedRows, StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER, attention, embedding_and_head
from .gemma2 import sandwich_norms
from .implied import GLOBAL, LOCAL, TANH_GELU, check_flag, check_number
from .layout_options import LayoutOptions
from .numbered_matrices import NumberedMatrices
from .registry import register
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

_PERIOD = 5  # of layers with full attention, in configs that do not say
_SPARSE = 10, 0.95  # first layers, and the share of their hidden elements that is zero
_STREAMS = 4  # llama.cpp knows no other number
_SHARED = {f"{LAYER}.self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm")}
_INPUTS = "model.embed_tokens_per_layer.weight"


@register("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
class Gemma3n(NumberedMatrices):
    """Gemma 3n, text models; GGUF `gemma3n`."""

    gguf_name = "gemma3n"
    activation = ("hidden_activation", TANH_GELU)
    has_window_key = True
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 262400,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        matrix = self.n_embd, self.n_embd
        self.numbered = {
            "model.altup_projections.{}.weight": ("altup_proj.weight", matrix),
            "model.altup_unembed_projections.{}.weight": ("altup_unembd_proj.weight", matrix),
        }
        self.n_numbered = _STREAMS - 1

    def read_config(self, checkpoint: Checkpoint) -> Config:
        """Return the settings, with one `intermediate_size` where there is a list of `widths`."""
        text = checkpoint.config.of_text()
        if text.values.get("final_logit_softcapping", 0.0) is None:
            raise ConfigError(
                f"key 'final_logit_softcapping' is null; GGUF's {self.gguf_name} has a limit",
                file=text.file,
            )
        config = super().read_config(checkpoint)
        found = config.values.get("intermediate_size")
        self.widths: list[int] | None = None
        if not isinstance(found, list):
            return config
        self.widths, n_layers = config.integers("intermediate_size"), len(found)
        if n_layers != config.integer("num_hidden_layers") or min(self.widths) < 1:
            raise ConfigError(
                "key 'intermediate_size' must have a positive width for each of"
                f" {config.integer('num_hidden_layers')} layers",
                file=config.file,
            )
        return Config({**config.values, "intermediate_size": max(self.widths)}, config.file)

    def make_rope(self) -> RopeConfig:
        """Read all settings that keys and shapes depend on, and return those of rotary embedding.
        Raise ConfigError for layer types that are not known, and for layers that cannot share keys.
        """
        config = self.config
        default = [LOCAL if (layer + 1) % _PERIOD else GLOBAL for layer in range(self.n_layers)]
        self.kinds = config.strings("layer_types", default=default)
        if len(self.kinds) != self.n_layers or not {*self.kinds} <= {LOCAL, GLOBAL}:
            raise ConfigError(
                f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {self.n_layers}"
                " layers",
                file=config.file,
            )
        most = self.n_layers - 1
        self.n_shared = config.integer("num_kv_shared_layers", minimum=0, maximum=most)
        if not {*self.kinds} <= {*self.kinds[: self.n_layers - self.n_shared]}:
            raise ConfigError(
                f"key 'num_kv_shared_layers' is {self.n_shared}, which leaves no layer of some kind"
                " to take keys and values from",
                file=config.file,
            )
        self.n_inputs = config.integer("hidden_size_per_layer_input")
        return RopeConfig(config, self.head_size, GLOBAL)

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        keys = super().metadata()
        if self.widths is not None:
            keys["gemma3n.feed_forward_length"] = array(ValueType.INT32, self.widths)
        return keys

    def family_keys(self) -> dict[str, Value]:
        config, name = self.config, self.gguf_name
        check_number(config, name, "altup_num_inputs", _STREAMS)
        check_number(config, name, "altup_active_idx", 0)
        check_flag(config, name, "altup_correct_scale", True)
        by_layers = config.section("rope_parameters")
        near = (
            RopeConfig(config, self.head_size, LOCAL).base()
            if by_layers is not None and LOCAL in by_layers
            else config.number("rope_local_base_freq", default=10000.0)
        )
        return {
            "rope.freq_base_swa": f32(near),
            "final_logit_softcapping": f32(config.number("final_logit_softcapping")),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "altup.active_idx": u32(0),
            "altup.num_inputs": u32(_STREAMS),
            "embedding_length_per_layer_input": u32(self.n_inputs),
            "attention.shared_kv_layers": u32(self.n_shared),
            "activation_sparsity_scale": array(
                ValueType.FLOAT32, [deviations(share) for share in self._sparsity()]
            ),
            "attention.sliding_window_pattern": array(
                ValueType.BOOL, [kind == LOCAL for kind in self.kinds]
            ),
        }

    def _sparsity(self) -> list[float]:
        """Return which share of its hidden elements each layer sets to zero. ConfigError for
        something else than as many numbers from 0 to below 1.
        """
        n, (n_first, share) = self.n_layers, _SPARSE
        found = self.config.values.get("activation_sparsity_pattern")
        if found is None:
            return [share if layer < n_first < n else 0.0 for layer in range(n)]
        if (
            not isinstance(found, list)
            or len(found) != n
            or not all(type(x) in (int, float) and 0 <= x < 1 and np.float32(x) < 1 for x in found)
        ):
            raise ConfigError(
                "key 'activation_sparsity_pattern' must have a number from 0 to below 1 for each"
                f" of {n} layers",
                file=self.config.file,
            )
        return found

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        keys = super().vocabulary(pre)
        if (self.checkpoint.path / "tokenizer.model").exists():
            keys["tokenizer.ggml.add_space_prefix"] = boolean(False)
        return keys

    # --- tensors

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if name == _INPUTS:
            yield self._padded(tensor)
            return
        pattern, numbers = split_numbers(name)
        stem, _, suffix = pattern.rpartition(".")
        if stem in _SHARED and (layer := self.layer_of(tensor, numbers)) >= self._n_own:
            # Nothing reads them. Published checkpoints have them, and llama.cpp wants them.
            weight = table[stem]
            yield self.mapped(
                tensor, replace(weight, shape=weight.shape_of(self._n_own - 1)), suffix, layer
            )
            return
        yield from super().convert(name, tensor, table)

    @property
    def _n_own(self) -> int:
        """Layers that compute keys and values; the last ones use those of earlier ones."""
        return self.n_layers - self.n_shared

    def _padded(self, tensor: StoredTensor) -> ConvertedTensor:
        """Return the table of inputs of layers, with a row for every token: those of images and
        sounds, which come last, are zeros.
        """
        n_cols = self.n_layers * self.n_inputs
        n_rows = self.config.integer("vocab_size_per_layer_input", maximum=self.n_vocab)
        check_shape(tensor, (n_rows, n_cols))
        type = self.checkpoint.type_of(tensor)
        info = TensorInfo("per_layer_token_embd.weight", (self.n_vocab, n_cols), type)
        rows = PaddedRows(StoredRows(self.checkpoint, tensor), self.n_vocab)
        return ConvertedTensor(info, rows, (tensor,))

    def weights(self) -> list[Weight]:
        d, n, vocabulary = self.n_embd, self.n_inputs, self.n_vocab
        all_inputs = self.n_layers * n
        rank, streams = self.config.integer("laurel_rank"), _STREAMS
        biased = self.config.boolean("attention_bias", default=False)
        widths = self.widths or [self.n_ff] * self.n_layers
        heads = [
            replace(weight, shape=self._only_own(weight)) if weight.stored in _SHARED else weight
            for weight in attention(self, bias=biased, output_bias=biased, head_norms=True)
        ]
        altup, laurel, mlp = (f"{LAYER}.{name}" for name in ("altup", "laurel", "mlp"))
        return [
            *embedding_and_head(self),
            *sandwich_norms(self),
            *heads,
            Weight(
                "model.embed_tokens_per_layer", "per_layer_token_embd", (vocabulary, all_inputs)
            ),
            Weight("model.per_layer_model_projection", "per_layer_model_proj", (all_inputs, d)),
            Weight("model.per_layer_projection_norm", "per_layer_proj_norm", (n,)),
            Weight(f"{mlp}.gate_proj", "blk.{}.ffn_gate", lambda layer: (widths[layer], d)),
            Weight(f"{mlp}.up_proj", "blk.{}.ffn_up", lambda layer: (widths[layer], d)),
            Weight(f"{mlp}.down_proj", "blk.{}.ffn_down", lambda layer: (d, widths[layer])),
            Weight(f"{LAYER}.per_layer_input_gate", "blk.{}.inp_gate", (n, d)),
            Weight(f"{LAYER}.per_layer_projection", "blk.{}.proj", (d, n)),
            Weight(f"{LAYER}.post_per_layer_input_norm", "blk.{}.post_norm", (d,)),
            Weight(
                f"{altup}.correct_output_scale",
                "blk.{}.altup_correct_scale.weight",
                (d,),
                exact=True,
            ),
            Weight(f"{altup}.correction_coefs", "blk.{}.altup_correct_coef", (streams, streams)),
            Weight(f"{altup}.prediction_coefs", "blk.{}.altup_predict_coef", (streams**2, streams)),
            Weight(f"{altup}.modality_router", "blk.{}.altup_router", (streams, d)),
            Weight(f"{altup}.router_norm", "blk.{}.altup_router_norm", (d,)),
            Weight(f"{laurel}.linear_left", "blk.{}.laurel_l", (rank, d)),
            Weight(f"{laurel}.linear_right", "blk.{}.laurel_r", (d, rank)),
            Weight(f"{laurel}.post_laurel_norm", "blk.{}.laurel_post_norm", (d,)),
        ]

    def _only_own(self, weight: Weight):
        """Return the shape of a weight that layers with shared keys and values may lack."""
        return lambda layer: weight.shape_of(layer) if layer < self._n_own else None
