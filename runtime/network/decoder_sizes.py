"""The keys that every architecture reads: sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...errors import ConfigError
from ..weights.hyperparameters import Hyperparameters
from ..weights.weights import Weights

_LARGEST_HEAD = 65536  # far beyond any model, so that a hostile file cannot ask for huge tables


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder, and the keys and tensors that they come from.

    n_layers: blocks that run, without those that predict further tokens (`nextn_predict_layers`).
    kv_heads: of each layer; 0 for one without attention.
    """

    p: Hyperparameters
    w: Weights
    width: int
    n_layers: int
    eps: float
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    layer_norm: bool = False

    @classmethod
    def read(
        cls,
        p: Hyperparameters,
        w: Weights,
        *,
        layer_norm: bool | None = False,
        hybrid: bool = False,
    ) -> Self:
        """ConfigError for sizes that are missing, out of range or contradict each other.
        layer_norm: norms are LayerNorms, others RMS norms; None: the file has the epsilon of one of
        them, and that of RMS norms counts if it has both. hybrid: layers may have no attention.
        """
        width = p.integer("embedding_length")
        n_blocks = p.integer("block_count", most=len(w.source.tensors))
        n_layers = n_blocks - p.integer("nextn_predict_layers", 0, least=0, most=n_blocks - 1)
        if n_layers < n_blocks:
            w.skip_layers(n_layers)
        heads = p.per_layer("attention.head_count", n_blocks, least=0 if hybrid else 1)
        kv_heads = p.per_layer("attention.head_count_kv", n_blocks, heads, least=0 if hybrid else 1)
        for layer, (h, kv) in enumerate(zip(heads, kv_heads, strict=True)):
            if kv and (h % kv or not h):
                raise ConfigError(
                    f"layer {layer} has {h} heads for {kv} key/value heads, expected a multiple",
                    file=p.file,
                )
        if (
            heads[0]
            and width % heads[0]
            and not (p.has("attention.key_length") and p.has("attention.value_length"))
        ):
            raise ConfigError(
                f"embedding length {width} is not a multiple of {heads[0]} heads and no head size"
                " is given",
                file=p.file,
            )
        head_size = max(1, width // max(1, heads[0]))
        epsilon, of_rms = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
        if layer_norm is None:
            layer_norm = not p.has(of_rms)
        # Files of hybrids may have either key, or both, of which llama.cpp takes that of RMS norms.
        if not layer_norm and (p.has(of_rms) or not (hybrid and p.has(epsilon))):
            epsilon = of_rms
        return cls(
            p,
            w,
            width,
            n_layers,
            p.number(epsilon, least=0),
            heads[:n_layers],
            kv_heads[:n_layers],
            p.integer("attention.key_length", head_size, most=_LARGEST_HEAD),
            p.integer("attention.value_length", head_size, most=_LARGEST_HEAD),
            layer_norm,
        )
