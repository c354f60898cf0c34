"""Hunyuan V1, dense and with experts: norms of query and key heads that follow the rotation, whose
base a fixed `alpha` stretches.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import AlphaRopeConfig, RopeConfig
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward, norms
from .experts import RoutedExperts
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .leading_dense import gated_rows
from .registry import register
from .weight import Weight

# What published configs can say and runtimes imply.
_FLAGS = {
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_cla": False,
    "use_mla": False,
    "position_embedding_xdrope": False,
}
_IDS = "tokenizer.ggml.{}_token_id"


class Hunyuan(Architecture):
    """What Hunyuan V1 has with experts and without."""

    # The smaller models split texts as DeepSeek V3 does.
    pre_names: ClassVar[dict[str, str]] = {"deepseek-v3": "hunyuan-dense"}

    def make_rope(self) -> RopeConfig:
        return AlphaRopeConfig(self.config, self.head_size)

    def _derived_head_size(self) -> int:
        found = self.config.integer("attention_head_dim", default=None)
        return found or super()._derived_head_size()

    def head_size_keys(self) -> dict[str, Value]:
        derived = self.head_size * self.n_heads == self.n_embd
        return {} if derived and "head_dim" not in self.config else super().head_size_keys()

    def family_keys(self) -> dict[str, Value]:
        for key, implied in _FLAGS.items():
            check_flag(self.config, self.gguf_name, key, implied)
        return {}

    def begin_with(self, keys: dict[str, Value], token: str) -> None:
        """Name the token that begins texts, where the vocabulary is `hy.tiktoken`: the ids in
        config.json are those of another vocabulary.
        """
        tokens = keys["tokenizer.ggml.tokens"].data
        if token in tokens and not (self.checkpoint.path / "tokenizer.json").exists():
            keys[_IDS.format("bos")] = u32(tokens.index(token))

    def shared_rows(self) -> list[Weight]:
        """Return the rows of everything but the feed-forward."""
        attn = f"{LAYER}.self_attn"
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False),
            Weight(f"{attn}.query_layernorm", "blk.{}.attn_q_norm", (self.head_size,)),
            Weight(f"{attn}.key_layernorm", "blk.{}.attn_k_norm", (self.head_size,)),
        ]


@register("HunYuanDenseV1ForCausalLM")
class HunyuanDense(Hunyuan):
    """Hunyuan 0.5B to 7B, Hunyuan-MT; GGUF `hunyuan-dense`."""

    gguf_name = "hunyuan-dense"

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        """Return all `tokenizer.*` keys, with the end of texts from `eod_token_id` and the end of
        turns from the first of several `eos_token_id` of generation_config.json.
        """
        keys = super().vocabulary(pre)
        if self.n_embd == 4096:  # 7B
            self.begin_with(keys, "<|startoftext|>")
        ends = self._token("eod_token_id", self.config.values.get("eod_token_id"))
        if ends is not None:
            keys[_IDS.format("eos")] = u32(ends)
        generation = self.checkpoint.json("generation_config.json") or {}
        of_turn = generation.get("eos_token_id")
        if isinstance(of_turn, list) and len(of_turn) > 1:
            turn = self._token("eos_token_id of generation_config.json", of_turn[0])
            if turn is not None:
                keys[_IDS.format("eot")] = u32(turn)
        return keys

    def _token(self, key: str, value: Any) -> int | None:
        """Return the id of a token, None for none. Raise ConfigError for what is no id."""
        if value is None or (type(value) is int and value < 0):
            return None
        if type(value) is not int or value >= self.n_vocab:
            raise ConfigError(
                f"key {printable(key)} is {printable(value)}, expected an id below {self.n_vocab}",
                file=self.config.file,
            )
        return value

    def weights(self) -> list[Weight]:
        return [*self.shared_rows(), *gated_feed_forward(self)]


@register("HunYuanMoEV1ForCausalLM")
class HunyuanMoe(Hunyuan, RoutedExperts):
    """Hunyuan-A13B: experts in every layer, next to a shared one; GGUF `hunyuan-moe`."""

    gguf_name = "hunyuan-moe"

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        check_flag(config, name, "use_mixed_mlp_moe", True)  # the shared expert
        check_flag(config, name, "group_limited_greedy", False)
        check_number(config, name, "moe_layer_num_skipped", 0)
        if (shared := self._of_all_layers("num_shared_expert", 1)) != 1:
            raise ConfigError(
                f"key 'num_shared_expert' is {shared}; GGUF's {name} implies 1", file=config.file
            )

    def read_expert_sizes(self) -> None:
        self.n_experts = self._of_all_layers("num_experts")
        self.n_experts_used = self._of_all_layers("moe_topk")
        if self.n_experts_used > self.n_experts:
            raise ConfigError(
                f"key 'moe_topk' is {self.n_experts_used}, expected at most {self.n_experts}",
                file=self.config.file,
            )
        self.n_ff_expert = self._of_all_layers("moe_intermediate_size", self.n_ff)

    def _of_all_layers(self, key: str, default: int | None = None) -> int:
        """Return a positive number that may stand there once for each layer. Raise ConfigError if
        layers differ.
        """
        if not isinstance(self.config.values.get(key), list):
            return (
                self.config.integer(key)
                if default is None
                else self.config.integer(key, default=default)
            )
        found = self.config.integers(key)
        if len(set(found[: self.n_layers])) != 1 or len(found) < self.n_layers or found[0] < 1:
            raise ConfigError(
                f"key '{key}' must be one positive number for all {self.n_layers} layers: GGUF's"
                f" {self.gguf_name} has no others",
                file=self.config.file,
            )
        return found[0]

    def family_keys(self) -> dict[str, Value]:
        return {
            **super().family_keys(),
            "expert_shared_feed_forward_length": u32(self.n_ff or 0),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(1),
        }

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        keys = super().vocabulary(pre)
        self.begin_with(keys, "<|bos|>")
        return keys

    def weights(self) -> list[Weight]:
        shared = f"{LAYER}.mlp.shared_mlp"
        return [
            *self.shared_rows(),
            *gated_rows(
                shared, "blk.{{}}.ffn_{}_shexp", self.n_embd, self.n_ff or 0, range(self.n_layers)
            ),
            Weight(f"{LAYER}.mlp.gate.wg", "blk.{}.ffn_gate_inp", (self.n_experts, self.n_embd)),
        ]
