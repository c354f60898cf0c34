"""What all model families read from config.json, and the metadata keys that they share."""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.pretokenizers import PRETOKENIZERS
from ...formats.tokenizer_hints import NFC_KEY
from ...formats.values import Value, boolean, f32, string, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from ..vocabulary.metadata import vocabulary_metadata
from .implied import SILU, announce_window, check_name
from .layout_options import LayoutOptions


class FamilyMetadata:
    """The settings of one model family: subclasses set `gguf_name` and add keys.

    Sizes are read from config.json on construction, so a config that lacks one fails before
    anything is written.
    """

    gguf_name: str
    other_names: ClassVar[tuple[str, ...]] = ()  # of GGUF, for some of its models
    tied_by_default = False
    has_experts = False
    has_gates = True  # experts multiply by the activation of a gate
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
    # what pre-tokenizers are derived as, and what the reference calls them in this family
    pre_names: ClassVar[dict[str, str]] = {}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        self.checkpoint, self.options = checkpoint, options
        self.config = self.read_config(checkpoint)
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
        check_name(config, self.gguf_name, *self.activation)
        if not self.has_window_key and self.has_window():
            announce_window(config, self.gguf_name)

    def read_config(self, checkpoint: Checkpoint) -> Config:
        """Return the settings of the text model, with the defaults of its class. Families whose
        configs say the usual things in other keys add them here.
        """
        return checkpoint.config.of_text().with_defaults(self.class_defaults)

    def make_rope(self) -> RopeConfig:
        """Return the rotary settings of `config.json`."""
        return RopeConfig(self.config, self.head_size)

    def has_window(self) -> bool:
        """Return whether some layer has the window of `sliding_window`, if config.json has one."""
        return self.config.boolean("use_sliding_window", default=self.window_by_default)

    def _derived_head_size(self) -> int:
        if self.n_embd % self.n_heads:
            raise ConfigError(
                f"hidden_size {self.n_embd} is not a multiple of num_attention_heads {self.n_heads}"
                " and head_dim is missing",
                file=self.config.file,
            )
        return self.n_embd // self.n_heads

    def metadata(self) -> dict[str, Value]:
        """Return the keys `<architecture>.*` in the order of the reference, with a placeholder for
        `general.file_type` that the caller fills in.
        """
        keys = {
            "block_count": u32(self.n_layers),
            "context_length": u32(self.rope.context()),
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
        keys = vocabulary_metadata(self.checkpoint, self.n_vocab, pre)
        name = keys.get("tokenizer.ggml.pre")
        if pre is None and name is not None and name.data in self.pre_names:
            own = self.pre_names[name.data]
            keys["tokenizer.ggml.pre"] = string(own)
            nfc = keys.setdefault(NFC_KEY, boolean(PRETOKENIZERS[name.data].nfc))
            if nfc.data == PRETOKENIZERS[own].nfc:
                del keys[NFC_KEY]  # implied
        return keys

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
