"""Options for the layout of a converted model."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

MTP_CHOICES = ("keep", "drop", "only")
MLA_LAYOUTS = ("mainline", "ik")


@dataclass(frozen=True)
class LayoutOptions:
    """merge_gate_up: store gate and up of each expert as one tensor, `ffn_gate_up_exps`.

    mtp: "keep" the blocks for multi-token prediction as the last blocks, "drop" them, or convert
    "only" them, with embeddings, final norm and head. mla_layout: the up-projection of latent
    attention is stored as `attn_k_b` and `attn_v_b` per head ("mainline"), or as `attn_kv_b` as
    well ("ik"), which older versions of ik_llama.cpp need. vocab_only: convert no tensors, so that
    none need to exist.
    """

    merge_gate_up: bool = False
    mtp: str = "keep"
    mla_layout: str = "mainline"
    vocab_only: bool = False

    def __post_init__(self):
        for name, choices in (("mtp", MTP_CHOICES), ("mla_layout", MLA_LAYOUTS)):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} is '{getattr(self, name)}', expected one of {', '.join(choices)}"
                )
