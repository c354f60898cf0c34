"""Options of conversion: what is written, into which files, and the layout of the model. Imports
nothing heavy.
"""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from dataclasses import dataclass

from ..formats.options import Constant, Options, option

MTP_CHOICES = ("keep", "drop", "only")
MLA_LAYOUTS = ("mainline", "ik")


@dataclass(frozen=True)
class ConvertOptions(Options):
    """What a conversion writes besides tensors, and into which files; see
    `iqforge.convert_model`.
    """

    split_max_tensors: int | None = option(
        None,
        "--split-max-tensors",
        kind=int,
        metavar="N",
        help="write shards of at most N tensors",
    )
    split_max_size: str | int | None = option(
        None,
        "--split-max-size",
        metavar="N(K|M|G)",
        help="write shards with at most this much tensor data",
    )
    no_tensor_first_split: bool = option(
        False, "--no-tensor-first-split", help="write a first shard with metadata only"
    )
    metadata: str | os.PathLike | None = option(
        None,
        "--metadata",
        metavar="FILE",
        help='JSON file with general.* keys to set, such as {"general.author": "N"}',
    )
    name: str | None = option(
        None,
        "--model-name",
        metavar="N",
        help="general.name (default: from the model card or the folder)",
    )
    pre: str | None = option(
        None,
        "--pre",
        metavar="NAME",
        help="name of the pre-tokenizer (default: derived from its regexes)",
    )
    threads: int = option(
        0, "-t", "--threads", metavar="N", help="number of threads (default: all)"
    )
    force: bool = option(
        False, "--force", help="use an importance matrix that seems to belong to another model"
    )


@dataclass(frozen=True)
class LayoutOptions(Options):
    """merge_gate_up: store gate and up of each expert as one tensor, `ffn_gate_up_exps`.

    mtp: "keep" the blocks for multi-token prediction as the last blocks, "drop" them, or convert
    "only" them, with embeddings, final norm and head. mla_layout: the up-projection of latent
    attention is stored as `attn_k_b` and `attn_v_b` per head ("mainline"), or as `attn_kv_b` as
    well ("ik"), which older versions of ik_llama.cpp need. vocab_only: convert no tensors, so that
    none need to exist.
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
