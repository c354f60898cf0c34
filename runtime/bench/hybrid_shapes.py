"""Shapes of models with recurrent layers, among others or beside attention: state-space layers of
Mamba-2, short convolutions or Kimi delta attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from ...formats.types import GGMLType
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from .mixer_sizes import ConvSizes, KimiDeltaSizes, LatentSizes, SelectiveSizes, StateSpaceSizes
from .shape import Shape

_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


@dataclass(frozen=True)
class NemotronShape(Shape):
    """The shape of a model whose layers are each of one kind.

    pattern: `M` for a state-space layer, `*` for attention, `-` for a feed-forward layer without a
    gate, `E` for one with experts. latent_experts: length of what experts read and write (0: the
    width).
    """

    pattern: str = ""
    recurrent: StateSpaceSizes | SelectiveSizes | None = None
    latent_experts: int = 0

    @property
    def _states(self) -> StateSpaceSizes | SelectiveSizes:
        return cast(StateSpaceSizes | SelectiveSizes, self.recurrent)

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that have all kinds."""
        return max(self.pattern.index(kind) for kind in set(self.pattern)) + 1

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._norm("attn_norm")
        if self.pattern[layer] == "M":
            yield from self._states.tensors(self.width)
        elif self.pattern[layer] == "*":
            yield from self._attention()

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.pattern[layer] == "-":
            yield from self._gated("", (), self.hidden)
        if self.pattern[layer] != "E":
            return
        width = self.latent_experts or self.width
        yield "ffn_gate_inp.weight", (self.n_experts, self.width)
        yield "exp_probs_b.bias", (self.n_experts,)
        yield "ffn_up_exps.weight", (self.n_experts, self.hidden, width)
        yield "ffn_down_exps.weight", (self.n_experts, width, self.hidden)
        if self.latent_experts:
            yield "ffn_latent_down.weight", (width, self.width)
            yield "ffn_latent_up.weight", (self.width, width)
        yield from self._gated("_shexp", (), self.shared)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        kinds = self.pattern[: self.n_layers]
        own = {
            "feed_forward_length": array(
                ValueType.INT32, [self.hidden if kind in "-E" else 0 for kind in kinds]
            ),
            "attention.head_count_kv": array(
                ValueType.INT32, [self.n_kv_heads if kind == "*" else 0 for kind in kinds]
            ),
            "rope.scaling.finetuned": boolean(False),
            **self._states.keys,
        }
        if self.latent_experts:
            own["moe_latent_size"] = u32(self.latent_experts)
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


@dataclass(frozen=True)
class HybridShape(Shape):
    """The shape of a model with attention in the layers `attending`, and in others a recurrent
    mixer, `recurrent`: state-space layers, short convolutions or Kimi delta attention.
    """

    attending: tuple[int, ...] = ()
    recurrent: StateSpaceSizes | SelectiveSizes | ConvSizes | KimiDeltaSizes | None = None

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that have both kinds, and one after the dense ones."""
        return max(min(self.attending) + 1, super().least_layers)

    @property
    def _other(self) -> StateSpaceSizes | SelectiveSizes | ConvSizes | KimiDeltaSizes:
        return cast(StateSpaceSizes | SelectiveSizes | ConvSizes | KimiDeltaSizes, self.recurrent)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if layer in self.attending:
            yield from super()._mixer(layer)
            return
        yield from self._norm(self.attn_norm)
        yield from self._other.tensors(self.width)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        heads = [self.n_kv_heads if i in self.attending else 0 for i in range(self.n_layers)]
        own = {"attention.head_count_kv": array(ValueType.INT32, heads), **self._other.keys}
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


@dataclass(frozen=True)
class BesideShape(Shape):
    """The shape of a model with attention and a state-space layer side by side in every layer."""

    recurrent: StateSpaceSizes | None = None

    def _norm(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        # The only one without a suffix.
        yield name if name == "ffn_norm" else f"{name}.weight", (self.width,)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from super()._mixer(layer)
        yield from cast(StateSpaceSizes, self.recurrent).tensors(self.width)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        own = cast(StateSpaceSizes, self.recurrent).keys
        found = {f"{self.architecture}.{key}": value for key, value in own.items()}
        return super().metadata(type) | found


def _experts(shared: int) -> dict[str, Value]:
    return {
        "expert_shared_feed_forward_length": u32(shared),
        "expert_shared_count": u32(1),
        "expert_weights_norm": boolean(True),
    }


def _ling_3(
    name: str,
    sizes: tuple[int, int, int, int, int],
    n_experts: int,
    dense: tuple[int, int],
    period: int,
    q_rank: int = 0,
) -> Shape:
    """Ling 3.0. sizes: layers, width, heads, hidden size of an expert, context. dense: layers and
    their hidden size. period: of layers with latent attention.
    """
    n_layers, width, heads, hidden, context = sizes
    return HybridShape(
        *("bailingmoe3", name, n_layers, width, heads, 1, 192, hidden, 157184),
        *(6000000.0, context, 1e-6, n_experts, 8),
        n_dense=dense[0],
        dense_hidden=dense[1],
        shared=hidden,
        rotated=64,
        choice_bias=True,
        head_gates=True,
        latent=LatentSizes(q_rank, 512, 128, 64, 128),
        attending=tuple(range(period - 1, n_layers, period)),
        recurrent=KimiDeltaSizes(heads, 128, bound=-5.0, low_rank=False),
        keys={
            "expert_gating_func": u32(2),
            "expert_group_count": u32(8),
            "expert_group_used_count": u32(4),
            "expert_shared_count": u32(1),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(2.5),
        },
    )


HYBRID_SHAPES: dict[str, Shape] = {
    "nemotron-h-8b": NemotronShape(
        "nemotron_h",
        "8B",
        52,
        4096,
        32,
        8,
        128,
        21504,
        131072,
        10000.0,
        8192,
        1e-5,
        gated=False,
        pattern=_8B,
        recurrent=StateSpaceSizes(128, 64, 128, 8),
    ),
    "nemotron-3-nano-30b-a3b": NemotronShape(
        "nemotron_h_moe",
        "30B.A3B",
        52,
        2688,
        32,
        2,
        128,
        1856,
        131072,
        10000.0,
        262144,
        1e-5,
        128,
        6,
        shared=3712,
        gated=False,
        pattern=_NANO,
        recurrent=StateSpaceSizes(64, 64, 128, 8),
        keys=_experts(3712),
    ),
    "granite-4.0-h-7b": HybridShape(
        "granitehybrid",
        "7B.A1B",
        40,
        1536,
        12,
        4,
        128,
        512,
        100352,
        10000.0,
        131072,
        1e-5,
        64,
        6,
        shared=1024,
        tied=True,
        attending=(5, 15, 25, 35),
        recurrent=StateSpaceSizes(48, 64, 128, 1),
        keys={
            "expert_shared_feed_forward_length": u32(1024),
            "rope.scaling.finetuned": boolean(False),
            "attention.scale": f32(0.0078125),
            "embedding_scale": f32(12.0),
            "residual_scale": f32(0.22),
            "logit_scale": f32(6.0),
        },
    ),
    "codestral-mamba-7b": NemotronShape(
        *("mamba2", "7B", 64, 4096, 0, 0, 64, 0, 32768),
        *(10000.0, 1 << 20, 1e-5),
        pattern="M" * 64,
        recurrent=StateSpaceSizes(128, 64, 128, 8),
    ),
    "mamba-2.8b": NemotronShape(
        *("mamba", "2.8B", 64, 2560, 0, 0, 64, 0, 50280),
        *(10000.0, 1 << 20, 1e-5),
        tied=True,
        pattern="M" * 64,
        recurrent=SelectiveSizes(5120, 16, 160),
    ),
    "falcon-mamba-7b": NemotronShape(
        *("mamba", "7B", 64, 4096, 0, 0, 64, 0, 65024),
        *(10000.0, 1 << 20, 1e-5),
        pattern="M" * 64,
        recurrent=SelectiveSizes(8192, 16, 256, normed=True),
    ),
    "jamba-v0.1": HybridShape(
        *("jamba", "52B.A12B", 32, 4096, 32, 8, 128, 14336, 65536),
        *(10000.0, 262144, 1e-6),
        *(16, 2),
        interval=2,
        attending=(4, 12, 20, 28),
        recurrent=SelectiveSizes(8192, 16, 256, weighted=True),
    ),
    "mamba2-2.7b": NemotronShape(
        *("mamba2", "2.7B", 64, 2560, 0, 0, 64, 0, 50288),
        *(10000.0, 1 << 20, 1e-5),
        tied=True,
        pattern="M" * 64,
        recurrent=StateSpaceSizes(80, 64, 128, 1),
    ),
    "falcon-h1-7b": BesideShape(
        *("falcon-h1", "7B", 44, 3072, 12, 2, 128, 12288, 130048),
        *(1e11, 262144, 1e-5),
        recurrent=StateSpaceSizes(24, 128, 256, 1, normed=False),
    ),
    "falcon-h1-34b": BesideShape(
        *("falcon-h1", "34B", 72, 5120, 20, 4, 128, 21504, 261120),
        *(1e11, 262144, 1e-5),
        recurrent=StateSpaceSizes(32, 128, 256, 2, normed=False),
    ),
    "kimi-linear-48b-a3b": HybridShape(
        *("kimi-linear", "48B.A3B", 27, 2304, 32, 1, 192, 1024, 163840),
        *(10000.0, 1 << 20, 1e-5, 256, 8),
        n_dense=1,
        dense_hidden=9216,
        shared=1024,
        rotated=64,
        choice_bias=True,
        latent=LatentSizes(0, 512, 128, 64, 128),
        attending=(3, 7, 11, 15, 19, 23, 26),
        recurrent=KimiDeltaSizes(32, 128),
        keys={
            "expert_gating_func": u32(2),
            "expert_shared_count": u32(1),
            "expert_weights_scale": f32(2.446),
        },
    ),
    "ling-3.0-8b": _ling_3(
        "7.9B.A1.3B", (24, 1536, 16, 512, 131072), 128, (1, 4608), 4, q_rank=256
    ),
    "ling-3.0-flash": _ling_3("124B.A5.1B", (42, 2560, 32, 768, 262144), 512, (2, 6144), 6),
    "lfm2-1.2b": HybridShape(
        "lfm2",
        "1.2B",
        *(16, 2048, 32, 8, 64, 8192, 65536),
        1000000.0,
        128000,
        1e-5,
        head_norms=True,
        last_norm="token_embd_norm",
        tied=True,
        attending=(2, 5, 8, 10, 12, 14),
        recurrent=ConvSizes(),
    ),
    "lfm2-8b-a1b": HybridShape(
        "lfm2moe",
        "8B.A1B",
        *(24, 2048, 32, 8, 64, 1792, 65536),
        1000000.0,
        128000,
        1e-5,
        32,
        4,
        n_dense=2,
        dense_hidden=7168,
        choice_bias=True,
        head_norms=True,
        last_norm="token_embd_norm",
        tied=True,
        attending=(2, 6, 10, 14, 18, 21),
        recurrent=ConvSizes(),
        keys={"expert_gating_func": u32(2)},
    ),
}
