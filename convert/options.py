"""Options of conversion: output files and metadata. `architectures/layout_options.py` has those
that change tensors. Imports nothing heavy.
"""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from dataclasses import dataclass

from ..formats.options import Options, option
from ..formats.shared_options import devices_option, force_option, threads_option


@dataclass(frozen=True)
class ConvertOptions(Options):
    """Options for the files and the metadata of a conversion; see `iqforge.convert_model`."""

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
    threads: int = threads_option()
    device: str = devices_option("only presets are quantized there")
    force: bool = force_option()


@dataclass(frozen=True)
class LoraOptions(Options):
    """Options for converting an adapter; see `iqforge.convert_lora`."""

    base: str | os.PathLike | None = option(
        None,
        "--base",
        metavar="DIR",
        help="folder with the base model's config.json; its weights are not needed (default: what"
        " adapter_config.json names, if that is a folder)",
    )
    name: str | None = option(
        None, "--model-name", metavar="N", help="general.name (default: from the folder)"
    )
    threads: int = threads_option()
