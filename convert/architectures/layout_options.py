"""Options of the layout of a converted model. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.flags import Constant
from ...formats.options import Options, option

MTP_CHOICES = ("keep", "drop", "only")
MLA_LAYOUTS = ("mainline", "ik")


@dataclass(frozen=True)
class LayoutOptions(Options):
    """Choose how the tensors of a model are laid out, where its architecture leaves a choice.

    merge_gate_up: store gate and up of each expert as one tensor, `ffn_gate_up_exps`.

    mtp: "keep" the blocks for multi-token prediction as the last blocks, "drop" them, or convert
    "only" them, with embeddings, final norm and head. mla_layout: store the up-projection of
    latent attention as `attn_k_b` and `attn_v_b` per head ("mainline"), or also as `attn_kv_b`
    ("ik"), which older versions of ik_llama.cpp need. vocab_only: convert no tensors; the
    checkpoint needs none.
    """

    merge_gate_up: bool = option(
        False,
        "--merge-gate-up",
        "--fuse-gate-up-exps",
        help="merge gate and up of each expert into one tensor, ffn_gate_up_exps",
    )
    mtp: str = option(
        "keep",
        choices=MTP_CHOICES,
        constants=(
            Constant(
                ("--no-mtp", "--no-nextn"),
                "drop",
                "leave out the blocks for multi-token prediction",
            ),
            Constant(
                ("--mtp",),
                "only",
                "convert only these blocks, with embeddings, final norm and head",
            ),
        ),
    )
    mla_layout: str = option(
        "mainline",
        "--mla-layout",
        choices=MLA_LAYOUTS,
        help="latent attention (deepseek2): attn_k_b and attn_v_b per head (mainline, the default),"
        " or attn_kv_b as well, like the converter of ik_llama.cpp (ik)",
    )
    vocab_only: bool = option(
        False, "--vocab-only", help="write metadata and vocabulary, no tensors"
    )
