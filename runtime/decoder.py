"""What decoder-only transformers share: the keys that every architecture reads, embedding,
attention and expert tensors.

Architecture files describe only what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .hyperparameters import Hyperparameters
from .layers.attention import Attention
from .layers.ffn import GatedFFN
from .layers.moe import Experts, MoE
from .layers.norm import RMSNorm
from .layers.rope import Rope, Scaling
from .network import Network
from .weights import Weights

_LARGEST_HEAD = 65536  # far beyond any model, so that a hostile file cannot ask for huge tables


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, and builders of its standard parts from the tensors of a block."""

    p: Hyperparameters
    w: Weights
    width: int
    n_layers: int
    eps: float
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int

    @classmethod
    def read(cls, p: Hyperparameters, w: Weights) -> Decoder:
        """ConfigError for sizes that are missing, out of range or contradict each other."""
        width = p.integer("embedding_length")
        n_layers = p.integer("block_count", most=len(w.source.tensors))
        heads = p.per_layer("attention.head_count", n_layers)
        kv_heads = p.per_layer("attention.head_count_kv", n_layers, heads)
        for layer, (h, kv) in enumerate(zip(heads, kv_heads, strict=True)):
            if h % kv:
                raise ConfigError(
                    f"layer {layer} has {h} heads for {kv} key/value heads, expected a multiple",
                    file=p.file,
                )
        if width % heads[0] and not (
            p.has("attention.key_length") and p.has("attention.value_length")
        ):
            raise ConfigError(
                f"embedding length {width} is not a multiple of {heads[0]} heads and no head size"
                " is given",
                file=p.file,
            )
        head_size = max(1, width // heads[0])
        return cls(
            p,
            w,
            width,
            n_layers,
            p.number("attention.layer_norm_rms_epsilon"),
            heads,
            kv_heads,
            p.integer("attention.key_length", head_size, most=_LARGEST_HEAD),
            p.integer("attention.value_length", head_size, most=_LARGEST_HEAD),
        )

    def network(self, blocks: list) -> Network:
        """Return a network of these blocks. Its output matrix is the embedding if the file has no
        output tensor.
        """
        n_vocab = self.p.integer("vocab_size", self.w.n_rows_of("token_embd.weight"))
        output = "output" if self.w.has("output.weight") else "token_embd"
        return Network(
            self.w.embedding("token_embd", n_vocab, self.width),
            blocks,
            self.norm("output_norm"),
            self.w.linear(output, self.width, n_vocab, role="output", split="column"),
            n_vocab,
        )

    def norm(self, name: str, n: int | None = None) -> RMSNorm:
        """Return the norm `<name>.weight` over `n` elements (default: the width)."""
        return RMSNorm(self.w.vector(f"{name}.weight", n or self.width), self.eps)

    def rope(self, style: str) -> Rope:
        """Read the rotation, with the frequency factors of `rope_freqs.weight` if the file has
        them.
        """
        n_rot = self.p.integer("rope.dimension_count", self.key_length, most=self.key_length)
        if n_rot % 2:
            raise ConfigError(
                f"metadata key '{self.p.architecture}.rope.dimension_count' is {n_rot}, expected an"
                " even number",
                file=self.p.file,
            )
        factors = self.w.optional_vector("rope_freqs.weight", n_rot // 2)
        return Rope(
            style,
            n_rot,
            self.p.number("rope.freq_base", 10000.0, above=1),
            factors,
            Scaling.read(self.p),
        )

    def attention(self, layer: int, rope: Rope, *, head_norms: bool = False) -> Attention:
        """`attn_q`, `attn_k`, `attn_v`, `attn_output` of a block; with `head_norms` also
        `attn_q_norm` and `attn_k_norm`.
        """
        at, heads, kv = f"blk.{layer}", self.heads[layer], self.kv_heads[layer]
        q = self.w.linear(
            f"{at}.attn_q", self.width, heads * self.key_length, role="attn_q", split="column"
        )
        k = self.w.linear(
            f"{at}.attn_k", self.width, kv * self.key_length, role="attn_k", split="column"
        )
        v = self.w.linear(
            f"{at}.attn_v", self.width, kv * self.value_length, role="attn_v", split="column"
        )
        output = self.w.linear(
            f"{at}.attn_output",
            heads * self.value_length,
            self.width,
            role="attn_output",
            split="row",
        )
        q_norm, k_norm = (
            self.norm(f"{at}.attn_{x}_norm", self.key_length) if head_norms else None for x in "qk"
        )
        return Attention(
            q,
            k,
            v,
            output,
            n_heads=heads,
            n_kv_heads=kv,
            key_length=self.key_length,
            value_length=self.value_length,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            switches=self.w.switches,
        )

    def ffn(self, layer: int, hidden: int) -> GatedFFN:
        """`ffn_gate`, `ffn_up`, `ffn_down` of a block."""
        at = f"blk.{layer}"
        return GatedFFN(
            self.w.linear(f"{at}.ffn_gate", self.width, hidden, role="ffn_gate", split="column"),
            self.w.linear(f"{at}.ffn_up", self.width, hidden, role="ffn_up", split="column"),
            self.w.linear(f"{at}.ffn_down", hidden, self.width, role="ffn_down", split="row"),
        )

    def moe(self, layer: int, hidden: int) -> MoE:
        """`ffn_gate_inp` and the expert tensors of a block, with gate and up split or merged."""
        at, w, n = f"blk.{layer}", self.w, self.p.integer("expert_count")
        n_used = self.p.integer("expert_used_count", most=n)
        router = w.linear(
            f"{at}.ffn_gate_inp", self.width, n, role="ffn_gate_inp", split="replicated"
        )
        down = w.experts(f"{at}.ffn_down", n, hidden, self.width, role="ffn_down_exps", split="row")
        if w.has(f"{at}.ffn_gate_up_exps.weight"):
            merged = w.experts(
                f"{at}.ffn_gate_up",
                n,
                self.width,
                2 * hidden,
                role="ffn_gate_up_exps",
                split="gate_up",
            )
            experts = Experts(down, gate_up=merged)
        elif w.switches.merge_gate_up and w.can_merge(f"{at}.ffn_gate", f"{at}.ffn_up"):
            merged = w.merged_experts(
                f"{at}.ffn_gate_up",
                (f"{at}.ffn_gate", f"{at}.ffn_up"),
                n,
                self.width,
                hidden,
                role="ffn_gate_up_exps",
                split="gate_up",
            )
            experts = Experts(down, gate_up=merged)
        else:
            experts = Experts(
                down,
                w.experts(
                    f"{at}.ffn_gate", n, self.width, hidden, role="ffn_gate_exps", split="column"
                ),
                w.experts(
                    f"{at}.ffn_up", n, self.width, hidden, role="ffn_up_exps", split="column"
                ),
            )
        return MoE(router, experts, n, n_used, w.switches.ser)

    def refuse_unknown_routing(self) -> None:
        """ConfigError for any routing but softmax over all experts with renormalized weights,
        without groups and shared experts.
        """
        self.p.refuse("expert_gating_func", harmless=(0, 1))
        self.p.refuse("expert_weights_scale", harmless=(0.0, 1.0))
        self.p.refuse("expert_weights_norm", harmless=(True,))
        self.p.refuse("expert_shared_count", harmless=(0,))
        self.p.refuse("expert_group_count", harmless=(0, 1))
