"""The base class of all model families: it maps stored tensors to GGUF tensors through a table, and
writes the metadata keys that families share.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from ...errors import CheckpointError, ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from ..packed import unpacked
from ..tensors.decoded import factor_tensors
from ..tensors.rows import GeneratedRow, OneRow, PairedRotaryRows, PlusOneRows, StoredRows
from ..tensors.stored import StoredTensor, TensorRows
from ..vocabulary.metadata import vocabulary_metadata
from .implied import SILU, announce_window, check_activation
from .layout_options import LayoutOptions
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

# Buffers that old checkpoints store; runtimes compute them.
DROPPED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")

# Prefixes of tensors that do not belong to the text model of a multimodal checkpoint (one with a
# `text_config`), without a leading `model.`.
OTHER_MODALITIES = (
    "vision_tower.",
    "vision_model.",
    "vision_encoder.",
    "visual.",
    "vision_embed_tokenizer.",
    "multi_modal_projector.",
    "mm_projector.",
    "patch_merger.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "mm_soft_emb_norm.",
)


class Architecture(ABC):
    """Convert the checkpoints of one model family. Subclasses set `gguf_name`, implement
    `weights()` and add keys.

    Sizes are read from config.json on construction, so a config that lacks one fails before
    anything is written.
    """

    gguf_name: str
    tied_by_default = False
    has_experts = False
    has_mtp = False  # the model can have MTP blocks
    mla_layouts: tuple[str, ...] = ("mainline",)
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", SILU)  # the key, and what is implied
    has_window_key = False  # for a sliding window
    window_by_default = True  # without `use_sliding_window`
    ff_is_optional = False  # a class without dense layers may lack intermediate_size
    # defaults of the model class for keys that its published config.json files leave out
    class_defaults: ClassVar[dict[str, object]] = {}
    # the reference leaves key_length out where neither the class nor config.json has head_dim
    always_names_head_size = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        self.checkpoint, self.options = checkpoint, options
        self.config = checkpoint.config.of_text().with_defaults(self.class_defaults)
        self.merge_gate_up = options.merge_gate_up
        self.first_layer = 0  # earlier layers are not converted
        config = self.config
        self.n_layers = config.integer("num_hidden_layers")
        self.n_embd = config.integer("hidden_size")
        self.n_ff = (
            config.integer("intermediate_size", default=None)
            if self.ff_is_optional
            else config.integer("intermediate_size")
        )
        self.n_vocab = config.integer("vocab_size")
        self.n_heads = config.integer("num_attention_heads")
        # The default of the model classes: multi-head attention.
        self.n_kv_heads = config.integer("num_key_value_heads", default=self.n_heads)
        self.head_size = config.integer("head_dim", default=None) or self._derived_head_size()
        self.tied = config.boolean("tie_word_embeddings", default=self.tied_by_default)
        self.rope = self.make_rope()
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.n_heads} is not a multiple of num_key_value_heads"
                f" {self.n_kv_heads}",
                file=config.file,
            )
        check_activation(config, self.gguf_name, *self.activation)
        if not self.has_window_key:
            announce_window(config, self.gguf_name, self.window_by_default)

    def make_rope(self) -> RopeConfig:
        """Return the rotary settings of `config.json`."""
        return RopeConfig(self.config, self.head_size)

    def _derived_head_size(self) -> int:
        if self.n_embd % self.n_heads:
            raise ConfigError(
                f"hidden_size {self.n_embd} is not a multiple of num_attention_heads {self.n_heads}"
                " and head_dim is missing",
                file=self.config.file,
            )
        return self.n_embd // self.n_heads

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        """Return the keys `<architecture>.*` in the order of the reference, with a placeholder for
        `general.file_type` that the caller fills in.
        """
        config = self.config
        keys = {
            "block_count": u32(self.n_layers),
            "context_length": u32(config.integer("max_position_embeddings")),
            "embedding_length": u32(self.n_embd),
            **({} if self.n_ff is None else {"feed_forward_length": u32(self.n_ff)}),
            "attention.head_count": u32(self.n_heads),
            "attention.head_count_kv": u32(self.n_kv_heads),
            **self.rope_keys(),
            **self.norm_keys(),
            **self.expert_keys(),
            **self.head_size_keys(),
            "general.file_type": u32(0),
            **self.family_keys(),
        }
        return {
            key if key.startswith("general.") else f"{self.gguf_name}.{key}": value
            for key, value in keys.items()
        }

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        """Return all `tokenizer.*` keys. `pre` names the pre-tokenizer; by default it is
        derived.
        """
        return vocabulary_metadata(self.checkpoint, self.n_vocab, pre)

    def rope_keys(self) -> dict[str, Value]:
        """Return the keys of rotary scaling and base."""
        return {**self.rope.scaling_keys(), "rope.freq_base": f32(self.rope.base())}

    def norm_keys(self) -> dict[str, Value]:
        """Return the key of the norms' epsilon. Raise ConfigError if the config lacks it."""
        return {"attention.layer_norm_rms_epsilon": f32(self.config.number("rms_norm_eps"))}

    def head_size_keys(self) -> dict[str, Value]:
        """Return the keys of the head sizes; none for families that name them only where the config
        does.
        """
        if not self.always_names_head_size and "head_dim" not in self.config:
            return {}
        return {
            "attention.key_length": u32(self.head_size),
            "attention.value_length": u32(self.head_size),
        }

    def expert_keys(self) -> dict[str, Value]:
        """Return the keys that all families with experts have; none here."""
        return {}

    def family_keys(self) -> dict[str, Value]:
        """Return the keys that only this family has. Raise ConfigError for settings that it cannot
        express.
        """
        return {}

    # --- tensors

    @abstractmethod
    def weights(self) -> list[Weight]:
        """Return the table of this family, with sizes filled in."""

    def tensors(self) -> list[ConvertedTensor]:
        """Return all output tensors: generated ones first, then in the order of the files.

        Raise CheckpointError for a stored tensor that is not in the table, for one of another
        shape, and for one that is missing.
        """
        mapped: dict[str, ConvertedTensor] = {}
        for tensor in [*self.generated(), *self.stored()]:
            if tensor.info.name in mapped:
                raise CheckpointError(
                    f"two stored tensors make '{tensor.info.name}'", file=self.checkpoint.path
                )
            mapped[tensor.info.name] = tensor
            for info, row in factor_tensors(tensor.info, tensor.made_of):
                mapped[info.name] = ConvertedTensor(info, row)
        self._check_complete(mapped)
        return list(mapped.values())

    def generated(self) -> Iterator[ConvertedTensor]:
        """Yield the tensors that no weight is stored for, such as rotary factors."""
        if (factors := self.rope.factors()) is not None:
            yield ConvertedTensor(
                TensorInfo("rope_freqs.weight", factors.shape, TYPES["F32"]), GeneratedRow(factors)
            )

    def stored(self) -> Iterator[ConvertedTensor]:
        """Yield the tensors that stored weights become. Raise CheckpointError for one that is
        unknown or has a wrong shape.
        """
        table: dict[str, Weight] = {}
        for weight in self.weights():
            # One of the two options would have no effect.
            if table.setdefault(weight.stored, weight) is not weight:
                raise RuntimeError(
                    f"the table of {self.gguf_name} has two rows for '{weight.stored}'"
                )
        for tensor in unpacked(self.checkpoint).values():
            name = self.text_name(tensor.name)
            if (
                name is None
                or name.endswith(DROPPED_SUFFIXES)
                or (self.tied and name == "lm_head.weight")
            ):
                continue
            yield from self.convert(name, tensor, table)

    def text_name(self, name: str) -> str | None:
        """Return the name without the prefix of the text model in a multimodal one; None for
        tensors of other modalities.
        """
        if "text_config" not in self.checkpoint.config:
            return name
        if name.removeprefix("model.").startswith(OTHER_MODALITIES):
            return None
        return name.replace("language_model.", "", 1)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        """Yield the output tensors that are complete with `tensor`, which is `name` in the text
        model. Raise CheckpointError for a tensor that the table lacks.
        """
        pattern, numbers = split_numbers(name)
        if (weight := table.get(pattern)) is not None and weight.exact:
            suffix = ""
        else:
            stem, _, suffix = pattern.rpartition(".")
            weight = table.get(stem)
            if (
                weight is None
                or weight.exact
                or suffix not in ("weight", "bias")
                or (suffix == "bias" and not weight.bias)
            ):
                raise self.unknown(pattern, tensor, table)
        layer = self.layer_of(tensor, numbers) if weight.per_layer else None
        yield self.mapped(tensor, weight, suffix, layer)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        """Return the output tensor of a row of the table. `suffix`: weight, bias, or empty for an
        exact name. Raise CheckpointError for a layer that lacks it, or a wrong shape.
        """
        shape = weight.shape_of(layer)
        if shape is None:
            raise CheckpointError(
                f"{self.gguf_name} has no such tensor in layer {layer}",
                file=tensor.file,
                tensor=tensor.name,
            )
        shape = shape[:1] if suffix == "bias" else shape
        check_shape(tensor, shape)
        type = self.checkpoint.type_of(tensor)
        if weight.rotary_heads and len(shape) == 1:
            rows: TensorRows = OneRow(
                PairedRotaryRows(StoredRows(self.checkpoint, tensor, shape[0]), weight.rotary_heads)
            )
        elif weight.rotary_heads:
            rows = PairedRotaryRows(StoredRows(self.checkpoint, tensor), weight.rotary_heads)
        else:
            rows = StoredRows(self.checkpoint, tensor)
        if weight.plus_one:
            rows, type = PlusOneRows(rows, type, shape[-1]), TYPES["F32"]
        name = weight.gguf.format(layer)
        return ConvertedTensor(
            TensorInfo(f"{name}.{suffix}" if suffix else name, shape, type), rows, (tensor,)
        )

    def layer_of(self, tensor: StoredTensor, numbers: list[int]) -> int:
        """Return the layer in a tensor's name. Raise CheckpointError if the model has fewer
        layers.
        """
        if numbers[0] >= self.n_layers:
            raise CheckpointError(
                f"belongs to layer {numbers[0]}, but config.json has num_hidden_layers"
                f" {self.n_layers}",
                file=tensor.file,
                tensor=tensor.name,
            )
        return numbers[0]

    def unknown(
        self, pattern: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> CheckpointError:
        """Return the error for a tensor that the table lacks. It suggests a similar name."""
        stem, _, _ = pattern.rpartition(".")
        close = difflib.get_close_matches(stem, table, n=1, cutoff=0.6)
        hint = f"; the most similar known name is '{close[0]}'" if close else ""
        return CheckpointError(
            f"{self.gguf_name} has no such tensor{hint}", file=tensor.file, tensor=tensor.name
        )

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        """Return GGUF and stored names of the tensors that this row of the table must have yielded.
        `{}` is the layer.
        """
        if weight.optional:
            return []
        if weight.exact:
            return [(weight.gguf, weight.stored)]
        return [
            (f"{weight.gguf}.{suffix}", f"{weight.stored}.{suffix}")
            for suffix in (("weight", "bias") if weight.bias else ("weight",))
        ]

    def _check_complete(self, mapped: dict[str, ConvertedTensor]) -> None:
        wanted = [(weight, *names) for weight in self.weights() for names in self.required(weight)]
        # Stops at the first missing tensor, however many layers a config claims.
        for layer in range(self.first_layer, self.n_layers):
            for weight, name, stored in wanted:
                expected = (layer == self.first_layer or weight.per_layer) and weight.shape_of(
                    layer
                ) is not None
                if expected and name.format(layer) not in mapped:
                    raise CheckpointError(
                        "is missing from the checkpoint",
                        file=self.checkpoint.path,
                        tensor=stored.format(layer),
                    )
