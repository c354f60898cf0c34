"""MiniMax-M2 to M2.7: norms of queries and keys over all heads, half of each head rotated, and
experts that sigmoid scores with a bias choose.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import DOWN, GATE, UP, RoutedExperts
from .implied import check_flag, check_name, check_number
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight, split_numbers

log = logging.getLogger(__name__)


@register("MiniMaxM2ForCausalLM")
class MiniMaxM2(RoutedExperts):
    """MiniMax-M2 to M2.7; GGUF `minimax-m2`, which has no blocks that predict further
    tokens: they are left out.
    """

    gguf_name = "minimax-m2"
    pre_names: ClassVar[dict[str, str]] = {"gpt-4o": "minimax-m2"}
    expert_stem = f"{LAYER}.block_sparse_moe.experts"
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w2": DOWN, "w3": UP}
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        for key in ("use_qk_norm", "use_routing_bias"):
            check_flag(config, name, key, True)
        check_name(config, name, "qk_norm_type", ("per_layer",))
        check_name(config, name, "scoring_func", ("sigmoid",))
        check_number(config, name, "shared_intermediate_size", 0)
        kinds = config.integers("attn_type_list", default=[])
        if (linear := next((i for i, kind in enumerate(kinds) if kind != 1), None)) is not None:
            raise ConfigError(
                f"key 'attn_type_list' has {kinds[linear]} for layer {linear}; GGUF's {name}"
                " implies 1, softmax attention",
                file=config.file,
            )
        # The reference writes such files without a word. No released model is one.
        if self.tied:
            log.warning("llama.cpp refuses GGUF's %s with no output matrix of its own", name)

    def text_name(self, name: str) -> str | None:
        text = super().text_name(name)
        pattern, numbers = split_numbers(text or "")
        further = self.config.integer("num_mtp_modules", minimum=0, default=0)
        further *= self.config.integer("mtp_transformer_layers", minimum=0, default=1)
        layers = range(self.n_layers, self.n_layers + further)
        return None if pattern.startswith(f"{LAYER}.") and numbers[0] in layers else text

    def expert_width(self) -> int:
        return self.n_ff

    def rotated(self) -> int:
        """Return how many elements of a head are rotated. Raise ConfigError for more than it has,
        an odd number, or where another key says another number.
        """
        whole, share = self.head_size, self.rope.rotated()
        found = self.config.integer("rotary_dim", default=share)
        if found % 2 or found > whole or share not in (found, whole):
            raise ConfigError(
                f"rotary_dim is {found}: of heads of {whole} elements an even number is rotated,"
                f" and partial_rotary_factor says {share}",
                file=self.config.file,
            )
        return found

    def expert_keys(self) -> dict[str, Value]:
        return super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid

    def family_keys(self) -> dict[str, Value]:
        return {
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "rope.dimension_count": u32(self.rotated()),
        }

    def weights(self) -> list[Weight]:
        router = f"{LAYER}.block_sparse_moe"
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, joined_norms=True),
            Weight(f"{router}.gate", "blk.{}.ffn_gate_inp", (self.n_experts, self.n_embd)),
            Weight(
                f"{router}.e_score_correction_bias",
                "blk.{}.exp_probs_b.bias",
                (self.n_experts,),
                exact=True,
            ),
        ]
