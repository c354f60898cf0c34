"""Several GPUs by name, as in llama.cpp's `-dev CUDA0,CUDA1`. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, printable
from .modes import has_ranks, parse_shares

if TYPE_CHECKING:
    from ..options import LoadOptions

_LIST = re.compile(r"(?:cuda:|CUDA)\d{1,4}([,/](?:cuda:|CUDA)?\d{1,4})+")


def listed_gpus(device: object) -> tuple[int, ...]:
    """Return the numbers of a list such as `CUDA0,CUDA1` or `cuda:0,1`; empty for one device."""
    text = str(device)
    if not _LIST.fullmatch(text):
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text))


def chosen_by_shares(options: LoadOptions) -> dict[str, Any]:
    """Return the fields that choose the GPUs of a list: `-dev CUDA1,CUDA3 -ts 2,1` is `-ts 0,2,0,1
    -mg 1`. Empty for one device. UsageError for a list that these fields cannot say.
    """
    gpus = listed_gpus(options.device)
    if not gpus:
        return {}
    named = f"-dev {printable(str(options.device), 60)}"
    if len(set(gpus)) < len(gpus):
        raise UsageError(f"{named} names a GPU twice")
    if not has_ranks(options.split_mode):
        raise UsageError(
            f"{named} names {len(gpus)} GPUs, and a model is on one unless -sm graph gives each a"
            " part of every layer, -sm layer some layers, or -sm data other chunks of a text"
        )
    if options.main_gpu is not None:
        raise UsageError(f"{named} and -mg exclude each other: the first of a list comes first")
    if list(gpus[1:]) != sorted(gpus[1:]):
        right = ",".join(f"CUDA{gpu}" for gpu in (gpus[0], *sorted(gpus[1:])))
        raise UsageError(
            f"{named}: only the first can be chosen, the others are in order of their numbers:"
            f" -dev {right}"
        )
    given = options.tensor_split
    shares = (1.0,) * len(gpus) if given is None else parse_shares(given)
    if len(shares) != len(gpus):
        raise UsageError(f"-ts has {len(shares)} shares, {named} names {len(gpus)} GPUs")
    of_gpu = dict(zip(gpus, shares))
    split = ",".join(f"{of_gpu.get(gpu, 0):g}" for gpu in range(max(gpus) + 1))
    return {"device": "cuda", "tensor_split": split, "main_gpu": gpus[0]}
