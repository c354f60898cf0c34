"""What tests of all families check of the conversion of a checkpoint (`family_checkpoint.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import CheckpointError

from .family_checkpoint import EXPERTS, Names, Shape, convert, write

Stacks = dict[str, dict[str, Shape]]  # GGUF name -> {stored name: shape} of every expert


def expert_stacks(
    stored: str,
    parts: Mapping[str, Shape],
    layers: Iterable[int],
    called: Mapping[str, str] | None = None,
    n_experts: int = EXPERTS,
) -> Stacks:
    """Return the matrices of experts that become one tensor for each part of a layer.

    stored: a name with {layer}, {expert} and {part} in it. parts: shape of one matrix of "gate",
    "up" and "down". called: what the checkpoint calls the parts, where that is something else.
    """
    called = called or {}
    return {
        f"blk.{layer}.ffn_{part}_exps.weight": {
            stored.format(layer=layer, expert=expert, part=called.get(part, part)): shape
            for expert in range(n_experts)
        }
        for layer in layers
        for part, shape in parts.items()
    }


def dense_rows(width: int, hidden: int, prefix: str = "mlp.", suffix: str = "") -> Names:
    """The three matrices of a feed-forward layer within a block."""
    return {
        f"{prefix}{x}_proj.weight": (
            (width, hidden) if x == "down" else (hidden, width),
            f"ffn_{x}{suffix}.weight",
        )
        for x in ("gate", "up", "down")
    }


def further_rows(width: int, norm: str, gguf: str) -> Names:
    """What a block has that predicts further tokens, with the norm at its end."""
    return {
        "eh_proj.weight": ((width, 2 * width), "nextn.eh_proj.weight"),
        "enorm.weight": ((width,), "nextn.enorm.weight"),
        "hnorm.weight": ((width,), "nextn.hnorm.weight"),
        f"{norm}.weight": ((width,), f"{gguf}.weight"),
    }


def shapes_of(names: Names, stacks: Stacks | None = None) -> dict[str, Shape]:
    """Return {stored name: shape} of all that a checkpoint stores."""
    shapes = {name: shape for name, (shape, _) in names.items()}
    for experts in (stacks or {}).values():
        shapes |= experts
    return shapes


def check_tensors(
    made: dict[str, np.ndarray],
    stored: dict[str, np.ndarray],
    names: Names,
    stacks: Stacks | None = None,
    moved: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values,
) -> None:
    """Check that a converted model has these tensors and no other, with all values.

    moved: returns what becomes of a stored tensor that is not in a stack.
    """
    expected = {gguf: moved(name, stored[name]) for name, (_, gguf) in names.items()}
    for gguf, experts in (stacks or {}).items():
        expected[gguf] = np.stack([stored[name] for name in experts])
    assert set(made) == set(expected)
    for gguf, values in expected.items():
        assert np.array_equal(made[gguf], values), gguf


def check_missing(
    folder: Path,
    hf_class: str,
    config: dict,
    shapes: dict[str, Shape],
    name: str,
    words: str | None = None,
) -> None:
    """Check that a checkpoint without one of its tensors is refused. words: regex of the error, if
    it is not that this name is missing.
    """
    assert name in shapes
    write(folder, hf_class, config, {other: shapes[other] for other in shapes if other != name})
    with pytest.raises(CheckpointError, match=words or re.escape(f"'{name}': is missing")):
        convert(folder)


def keys_of(metadata: dict, architecture: str) -> dict:
    """Return the keys of an architecture without their prefix."""
    prefix = f"{architecture}."
    return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
