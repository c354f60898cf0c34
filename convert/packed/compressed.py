"""`quant_method: compressed-tensors`: floats or integers with a scale per tensor, row, group or
block, or integers packed into int32.

A packed word holds 32/bits values of a row, lowest bits first, with an offset of 2^(bits-1). Zero
points are packed likewise, but along the rows of a column. The tensors next to a weight tell which
form it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ...errors import CheckpointError, ConfigError
from ...formats.types import TYPES
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.decoded import DecodedTensor, decoded
from ..tensors.stored import StoredTensor
from .nvfp4 import factor_of, nvfp4
from .scaled import CodeRows, ScaledRows, float_values, integers, scaled, unfit

_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
_BESIDE = (
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_global_scale",
)


def unpack(checkpoint: Checkpoint, section: Config) -> dict[str, StoredTensor]:
    """Return the tensors that the packed ones of a checkpoint decode to, by name; others stay as
    they are. section: `quantization_config`. Raise ConfigError for settings and CheckpointError for
    tensors that are not supported.
    """
    tensors, found = checkpoint.tensors, {}
    bits, blocks = _group_settings(section)
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if name.endswith(_OF_ACTIVATIONS) or (
            last in _BESIDE and (f"{stem}.weight" in tensors or f"{stem}.weight_packed" in tensors)
        ):
            continue
        companions = {
            part: tensors[f"{stem}.{part}"] for part in _BESIDE if f"{stem}.{part}" in tensors
        }
        if last == "weight_packed" and tensor.dtype == "U8":
            found[f"{stem}.weight"] = _nvfp4(checkpoint, tensor, f"{stem}.weight", companions)
        elif last == "weight_packed":
            found[f"{stem}.weight"] = _packed(
                checkpoint, tensor, f"{stem}.weight", companions, bits
            )
        elif last == "weight" and "weight_scale" in companions:
            found[name] = _scaled(checkpoint, tensor, companions, blocks)
        else:
            found[name] = tensor
    return found


def _group_settings(section: Config) -> tuple[set[int], list[tuple[int, int]]]:
    """Return the widths of packed integers and the block sizes that `config_groups` names."""
    bits, blocks = set(), []
    for group in _groups(section):
        if (weights := group.section("weights")) is None:
            continue
        bits.add(weights.integer("num_bits", maximum=32))
        structure = weights.values.get("block_structure")
        if structure is not None:
            sizes = (
                structure
                if isinstance(structure, list)
                else [int(n) for n in re.findall(r"\d+", str(structure)[:40])]
            )
            if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
                raise ConfigError(
                    f"block_structure {structure!r} is not two sizes", file=section.file
                )
            blocks.append((sizes[0], sizes[1]))
    return bits, blocks


def _groups(section: Config) -> Iterator[Config]:
    if (groups := section.section("config_groups")) is not None:
        for name in groups.values:
            if (group := groups.section(name)) is not None:
                yield group


def _scaled(
    checkpoint: Checkpoint,
    weight: StoredTensor,
    companions: dict[str, StoredTensor],
    blocks: list[tuple[int, int]],
) -> DecodedTensor:
    scale, zeros = companions["weight_scale"], companions.get("weight_zero_point")
    if zeros is not None:
        raise CheckpointError(
            "zero points with weights that are not packed are not supported",
            file=zeros.file,
            tensor=zeros.name,
        )
    block = None
    if len(weight.shape) == len(scale.shape) == 2 and scale.shape[1] > 1:
        (n_rows, n_cols), (down, across) = weight.shape, scale.shape
        fitting = [
            size
            for size in blocks
            if (-(-n_rows // size[0]), -(-n_cols // size[1])) == (down, across)
        ]
        if fitting:
            block = fitting[0]
        elif down == n_rows and n_cols % across == 0:
            block = (1, n_cols // across)
    elif (
        len(weight.shape) == len(scale.shape) == 2
        and scale.n_elements not in (1, weight.shape[0])
        and blocks
    ):
        block = blocks[0]
    return scaled(checkpoint, weight, scale, block)


def _packed(
    checkpoint: Checkpoint,
    packed: StoredTensor,
    name: str,
    companions: dict[str, StoredTensor],
    bits: set[int],
) -> DecodedTensor:
    scale = companions.get("weight_scale")
    if scale is None or packed.dtype != "I32" or len(packed.shape) != 2 or packed.n_elements == 0:
        raise CheckpointError(
            f"is packed as {packed.dtype} of shape {list(packed.shape)} "
            + (
                "without weight_scale"
                if scale is None
                else "; only words of int32 in two dimensions are read"
            ),
            file=packed.file,
            tensor=packed.name,
        )
    n_rows, words = packed.shape
    width = _width(checkpoint, packed, companions, bits)
    per_word = 32 // width
    n_cols = words * per_word
    if (
        len(scale.shape) != 2
        or scale.shape[0] not in (1, n_rows)
        or scale.shape[1] < 1
        or n_cols % scale.shape[1]
    ):
        raise unfit(scale, packed, f"[{n_rows}, groups] for {n_cols} columns")
    n_groups, order = scale.shape[1], companions.get("weight_g_idx")

    def column_blocks(order: StoredTensor) -> np.ndarray:
        listed = integers(checkpoint, order)
        if listed.shape == (n_cols,) and (listed == -1).all():  # not used
            return np.arange(n_cols) // (n_cols // n_groups)
        if listed.shape != (n_cols,) or listed.min() < 0 or listed.max() >= n_groups:
            raise CheckpointError(
                f"does not give each of {n_cols} columns one of {n_groups} groups",
                file=order.file,
                tensor=order.name,
            )
        return listed

    def scales() -> np.ndarray:
        return np.broadcast_to(float_values(checkpoint, scale), (n_rows, n_groups))

    zeros = _zeros(checkpoint, companions.get("weight_zero_point"), width, n_rows, n_groups)
    offset = 0 if zeros is not None else 1 << width - 1
    rows = ScaledRows(
        CodeRows(checkpoint, packed, n_rows),
        n_cols,
        lambda codes: _unpack_words(codes, width) - np.float32(offset),
        scales,
        matrix_rows=n_rows,
        block_rows=1,
        block_cols=n_cols // n_groups,
        zeros=zeros,
        column_blocks=None if order is None else partial(column_blocks, order),
    )
    return decoded(packed, name, (n_rows, n_cols), TYPES["F32"], rows)


def _nvfp4(
    checkpoint: Checkpoint, packed: StoredTensor, name: str, companions: dict[str, StoredTensor]
) -> DecodedTensor:
    """Convert NVFP4. Values are divided by the factor of the matrix here, so its reciprocal is
    stored.
    """
    for part in ("weight_scale", "weight_global_scale"):
        if part not in companions:
            raise CheckpointError(
                f"is stored as NVFP4 without {part}", file=packed.file, tensor=packed.name
            )
    matrices = math.prod(packed.shape[:-2])
    factors = {
        key: factor_of(checkpoint, companions[part], matrices, np.reciprocal)
        for key, part in (("scale", "weight_global_scale"), ("input_scale", "input_global_scale"))
        if part in companions
    }
    return nvfp4(checkpoint, packed, name, companions["weight_scale"], factors)


def _width(
    checkpoint: Checkpoint,
    packed: StoredTensor,
    companions: dict[str, StoredTensor],
    bits: set[int],
) -> int:
    """Return 4 or 8 bits: the width of all groups of the config or, where they differ, the one that
    the tensor's shape implies.
    """
    width = next(iter(bits)) if len(bits) == 1 else None
    if width is None and (shape := companions.get("weight_shape")) is not None:
        columns = integers(checkpoint, shape).ravel()
        width = next(
            (b for b in (4, 8) if len(columns) == 2 and columns[1] == packed.shape[1] * (32 // b)),
            None,
        )
    if width not in (4, 8):
        raise CheckpointError(
            f"is packed with {width or 'an unknown number of'} bits; 4 and 8 are read",
            file=packed.file,
            tensor=packed.name,
        )
    return width


def _unpack_words(codes: np.ndarray, width: int) -> np.ndarray:
    """Unpack little-endian words: uint8[rows, 4 * words] to float32[rows, values]."""
    if width == 8:
        return codes.astype(np.float32)
    values = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    values[:, 0::2], values[:, 1::2] = codes & 15, codes >> 4
    return values


def _zeros(
    checkpoint: Checkpoint, stored: StoredTensor | None, width: int, n_rows: int, n_groups: int
) -> Callable[[], np.ndarray] | None:
    if stored is None:
        return None
    per_word = 32 // width
    wanted = (-(-n_rows // per_word), n_groups)
    if stored.dtype != "I32" or stored.shape != wanted:
        raise CheckpointError(
            f"is {stored.dtype} of shape {list(stored.shape)}, expected I32 of shape"
            f" {list(wanted)}",
            file=stored.file,
            tensor=stored.name,
        )

    def zeros() -> np.ndarray:
        words = checkpoint.data(stored).view("<u4").reshape(wanted)
        row = np.arange(n_rows)
        return (
            words[row // per_word] >> (width * (row % per_word)).astype(np.uint32)[:, None]
            & (1 << width) - 1
        ).astype(np.float32)

    return zeros
