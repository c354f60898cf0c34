"""Qwen3 MoE: attention with per-head norms, and routed experts in every layer."""

from __future__ import annotations

from typing import Iterator

from ...errors import CheckpointError, ConfigError
from ...formats.gguf.values import Value, u32
from ..checkpoint import Checkpoint
from ..safetensors import StoredTensor
from . import register
from .base import Architecture, Mapped, Weight, split_numbers
from .experts import DOWN, GATE, UP, ExpertStack

_LAYER = "model.layers.{}"
_EXPERT_PARTS = {f"{_LAYER}.mlp.experts.{{}}.{part}_proj.weight": part for part in (GATE, UP, DOWN)}


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(Architecture):
    gguf_name = "qwen3moe"
    has_experts = True

    def __init__(self, checkpoint: Checkpoint, merge_gate_up: bool = False):
        super().__init__(checkpoint, merge_gate_up)
        config = self.config
        self.n_experts = config.integer("num_experts", "num_local_experts")
        self.n_experts_used = config.integer("num_experts_per_tok", maximum=self.n_experts)
        self.n_ff_expert = config.integer("moe_intermediate_size")
        if config.integers("mlp_only_layers", default=[]) or config.integer("decoder_sparse_step", default=1) != 1:
            raise ConfigError("layers without experts (mlp_only_layers, decoder_sparse_step) do not exist in GGUF's qwen3moe",
                              file=config.file)
        self._stacks: dict[int, ExpertStack] = {}

    def expert_keys(self) -> dict[str, Value]:
        return {"expert_count": u32(self.n_experts), "expert_used_count": u32(self.n_experts_used)}

    def family_keys(self) -> dict[str, Value]:
        return {"expert_feed_forward_length": u32(self.n_ff_expert)}

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        biased = self.config.boolean("attention_bias", default=False)
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight(f"{_LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{_LAYER}.self_attn.q_proj", "blk.{}.attn_q", (q, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.k_proj", "blk.{}.attn_k", (kv, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.v_proj", "blk.{}.attn_v", (kv, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.o_proj", "blk.{}.attn_output", (d, q), bias=biased),
            Weight(f"{_LAYER}.self_attn.q_norm", "blk.{}.attn_q_norm", (self.head_size,)),
            Weight(f"{_LAYER}.self_attn.k_norm", "blk.{}.attn_k_norm", (self.head_size,)),
            Weight(f"{_LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,)),
            Weight(f"{_LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
            Weight("model.norm", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
        ]

    def tensors(self) -> list[Mapped]:
        self._stacks = {}
        mapped = super().tensors()
        names = {tensor.info.name for tensor in mapped}
        halves = ("gate_up", "down") if self.merge_gate_up else ("gate", "up", "down")
        for layer in range(self.n_layers):
            for part in halves:
                if f"blk.{layer}.ffn_{part}_exps.weight" not in names:
                    problem = self._stack(layer).missing() or f"no {part} projection"
                    raise CheckpointError(f"layer {layer} lacks experts: {problem}", file=self.checkpoint.path)
        return mapped

    def convert(self, tensor: StoredTensor, table: dict[str, Weight]) -> Iterator[Mapped]:
        name, numbers = split_numbers(tensor.name)
        if part := _EXPERT_PARTS.get(name):
            yield from self._stack(self.layer_of(tensor, numbers)).add(part, numbers[1], tensor)
        elif name == f"{_LAYER}.mlp.experts.gate_up_proj":
            yield from self._stack(self.layer_of(tensor, numbers)).stacked_gate_up(tensor)
        elif name == f"{_LAYER}.mlp.experts.down_proj":
            yield from self._stack(self.layer_of(tensor, numbers)).stacked_down(tensor)
        else:
            yield from super().convert(tensor, table)

    def _stack(self, layer: int) -> ExpertStack:
        if layer not in self._stacks:
            self._stacks[layer] = ExpertStack(self.checkpoint, layer, self.n_experts, self.n_ff_expert, self.n_embd, self.merge_gate_up)
        return self._stacks[layer]
