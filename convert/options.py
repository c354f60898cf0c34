"""What a user may choose about the layout of a converted model."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

MTP_CHOICES = ("keep", "drop", "only")
MLA_LAYOUTS = ("mainline", "ik")


@dataclass(frozen=True)
class LayoutOptions:
    """merge_gate_up: gate and up of each expert in one tensor, `ffn_gate_up_exps`.

    mtp: what happens to the blocks that predict further tokens: "keep" as the last blocks, "drop",
    or "only" these with embeddings, final norm and head. mla_layout: how latent attention stores
    its up-projection: "mainline" as `attn_k_b` and `attn_v_b` per head, "ik" as `attn_kv_b` with
    both beside it, which older versions of ik_llama.cpp need. vocab_only: no tensors are converted,
    so there may be none.
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
