"""The `general.*` keys that describe a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...formats.source import TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.values import Value, f32, i32, string
from ..checkpoint.folder import Checkpoint
from .model_card import Card, model_card_metadata, read_model_card

# generation_config.json -> general.sampling.*, in the order of the reference
_SAMPLING = (
    ("top_k", "top_k", i32),
    ("top_p", "top_p", f32),
    ("min_p", "min_p", f32),
    ("temperature", "temp", f32),
    ("repetition_penalty", "penalty_repeat", f32),
)


def general_metadata(
    checkpoint: Checkpoint, gguf_name: str, tensors: Sequence[TensorInfo], name: str | None
) -> dict[str, Value]:
    """Return the `general.*` keys in the order of the reference. `name` overrides the model card's
    and the folder's.
    """
    card = read_model_card(checkpoint)
    return {
        "general.architecture": string(gguf_name),
        "general.type": string("model"),
        **_sampling(checkpoint.json("generation_config.json") or {}),
        "general.name": string(
            name or _card_name(card) or title(_folder_name(checkpoint.path.resolve()))
        ),
        **({"general.size_label": string(size_label(tensors))} if tensors else {}),
        **model_card_metadata(card),
    }


def _sampling(config: dict[str, Any]) -> dict[str, Value]:
    keys = {}
    for stored, key, value in _SAMPLING:
        number = config.get(stored)
        if (
            isinstance(number, int | float)
            and not isinstance(number, bool)
            and (value is f32 or isinstance(number, int))
            and abs(number) < 2**31
        ):
            keys[f"general.sampling.{key}"] = (
                i32(number) if value is i32 and isinstance(number, int) else f32(number)
            )
    return keys


def _card_name(card: Card) -> str | None:
    found = card.get("model_name")
    return found if isinstance(found, str) else None


def _folder_name(path: Path) -> str:
    """Return the folder's name; in a download cache (`models--<owner>--<name>/snapshots/<commit>`)
    the model's.
    """
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def title(identifier: str) -> str:
    """Return a title: `tiny-llama-3-8B-v1.5` -> `Tiny Llama 3 8B v1.5`. Words are separated,
    lower-case ones capitalized, versions kept.
    """
    words = identifier.strip().replace("-", " ").split()
    return " ".join(
        w.title() if w.islower() and not re.fullmatch(r"v\d+(\.\d+)*|\d.*", w) else w for w in words
    )


def size_label(tensors: Sequence[TensorInfo]) -> str:
    """Return `8.0B` for a dense model, `128x1.5B` for experts: their number and the parameters of
    the shared part with one expert.
    """
    experts = [
        tensor
        for tensor in tensors
        if (name := TensorName.parse(tensor.name)).is_stacked
        and name.suffix == "weight"
        and len(tensor.shape) == 3
    ]
    total = sum(tensor.n_elements for tensor in tensors)
    if not experts:
        return _rounded(total)
    routed, count = sum(tensor.n_elements for tensor in experts), experts[0].shape[0]
    return f"{count}x{_rounded(total - routed + routed // count)}"


def _rounded(count: int) -> str:
    """Return at least two significant digits and a unit: 86336 -> `86K`, 1540000000 -> `1.5B`."""
    scale, unit = next(
        ((10**power, unit) for power, unit in ((12, "T"), (9, "B"), (6, "M")) if count > 10**power),
        (1000, "K"),
    )
    whole = str(round(count / scale)).lstrip("0")
    return f"{count / scale:.{max(2 - len(whole), 0)}f}{unit}"
