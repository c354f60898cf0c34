"""Merge gate and up of stacked experts of a GGUF file into `ffn_gate_up_exps`, or split them again.

Inside each expert of the merged tensor the gate rows come first, then the up rows: [n_experts, 2
n_ff, n_embd]. Rows are whole in every type, and so are the row groups of interleaved types as long
as n_ff is a multiple of the group. So nothing is decoded: bytes move, and the inverse gives every
byte back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import MalformedFileError, ShapeError, UnsupportedTypeError, UsageError
from ..gguf.reader import GGUFFile, open_gguf
from ..gguf.shards import KEY_COUNT, KEY_NO, KEY_TENSORS
from ..gguf.writer import GGUFWriter
from ..options import from_keywords
from ..output import refuse_same_file
from ..source import Sink, Source, TensorInfo
from ..tensor_names import TensorName
from .options import GateUpOptions

_MERGED = "ffn_gate_up_exps"
_HALVES = ("ffn_gate_exps", "ffn_up_exps")
# A scale per expert, as NVFP4 has next to its weights, belongs to one half alone.
_MERGED_PARTS = (
    "weight",
    "bias",
)
_PIECE = 16 << 20
OnBytesCopied = Callable[[int], None]  # called with the number of bytes copied since the last call


@dataclass(frozen=True)
class ByteSpan:
    """Bytes [start, start + size) of each expert of `tensor`."""

    tensor: TensorInfo
    start: int
    size: int


@dataclass(frozen=True)
class PlannedMerge:
    """A tensor of the output. For each of `n_units` experts it has the bytes of every span in turn;
    a copied tensor is one unit.
    """

    target: TensorInfo
    spans: tuple[ByteSpan, ...]
    n_units: int
    changed: bool = True


def merge_gate_up(
    src: str | os.PathLike,
    out: str | os.PathLike | None,
    *,
    options: GateUpOptions | None = None,
    progress: OnBytesCopied | None = None,
    **keywords: Any,
) -> list[PlannedMerge]:
    """Write the GGUF model `src` to `out` with gate and up of all experts merged, or with `undo`
    split again. Return the plan.

    src: a file, or the first shard of a split model. keywords: fields of
    `formats.tools.options.GateUpOptions`, which win over `options`. dry_run: only plan; `out` may
    be None.

    Keys are kept except those of a split model, as the output is one file. A merged tensor takes
    the place of its second half, as converters write it. Gate and up of a split one take its place.
    Raise UnsupportedTypeError if the halves have two types or one whose tensors are not made of
    rows alone, ShapeError, UsageError if the model has nothing to change.
    """
    [o] = from_keywords(merge_gate_up, keywords, (GateUpOptions, options))
    with open_gguf(src) as source:
        plan = plan_gate_up(source, o.undo)
        if o.dry_run:
            return plan
        if out is None:
            raise UsageError("an output file is needed")
        refuse_same_file(out, source.files)
        metadata = {
            key: value
            for key, value in source.metadata.items()
            if key not in (KEY_NO, KEY_COUNT, KEY_TENSORS)
        }
        with GGUFWriter(out, metadata, [planned.target for planned in plan]) as sink:
            for planned in plan:
                _copy(source, planned, sink, progress)
    return plan


def plan_gate_up(source: Source, undo: bool = False) -> list[PlannedMerge]:
    """Return what every tensor of the output is made of. Nothing is read. Raise the errors of
    `merge_gate_up`.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    plan: list[PlannedMerge] = []
    seen: set[str] = set()
    for tensor in source.tensors:
        name = TensorName.parse(tensor.name)
        wanted = (_MERGED,) if undo else _HALVES
        if name.layer is None or not name.suffix or name.role not in wanted:
            plan.append(
                PlannedMerge(tensor, (ByteSpan(tensor, 0, tensor.n_bytes),), 1, changed=False)
            )
        elif undo:
            plan += _halves(source, tensor, name, tensors)
        else:
            is_gate = name.role == _HALVES[0]
            other = tensors.get(name.sibling(f"{_HALVES[is_gate]}.{name.suffix}"))
            if other is None:
                raise MalformedFileError(
                    "its other half is missing", file=source.path, tensor=tensor.name
                )
            if other.name in seen:
                gate, up = (tensor, other) if is_gate else (other, tensor)
                merged = name.sibling(f"{_MERGED}.{name.suffix}")
                plan.append(_merged(source, gate, up, merged, tensors))
            seen.add(tensor.name)
    if not any(planned.changed for planned in plan):
        raise UsageError(_nothing_to_do(source, undo), file=source.path)
    return plan


def _nothing_to_do(source: Source, undo: bool) -> str:
    if undo:
        return "has no merged gate and up"
    roles = {TensorName.parse(tensor.name).role for tensor in source.tensors}
    if _MERGED in roles:
        return "gate and up of its experts are merged already"
    return "has no experts whose gate and up could be merged"


def _merged(
    source: Source, gate: TensorInfo, up: TensorInfo, name: str, tensors: dict[str, TensorInfo]
) -> PlannedMerge:
    if name in tensors:
        raise MalformedFileError(
            "exists together with its unmerged halves", file=source.path, tensor=name
        )
    if gate.type is not up.type:
        raise UnsupportedTypeError(
            f"is {gate.type}, '{up.name}' is {up.type}; only halves of one type can be merged",
            file=source.path,
            tensor=gate.name,
        )
    if gate.shape != up.shape:
        raise ShapeError(
            f"has shape {list(gate.shape)}, '{up.name}' has {list(up.shape)}",
            file=source.path,
            tensor=gate.name,
        )
    _check_layout(source, gate)
    shape = (gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
    size = gate.n_bytes // gate.shape[0]
    return PlannedMerge(
        replace(gate, name=name, shape=shape),
        (ByteSpan(gate, 0, size), ByteSpan(up, 0, size)),
        gate.shape[0],
    )


def _halves(
    source: Source, tensor: TensorInfo, merged: TensorName, names: Collection[str]
) -> list[PlannedMerge]:
    _check_layout(source, tensor)
    rows, group = tensor.shape[1], tensor.type.group_rows
    if rows % (2 * group):
        raise ShapeError(
            f"{rows} rows per expert cannot be halved"
            + (f" in row groups of {group}" if group > 1 else ""),
            file=source.path,
            tensor=tensor.name,
        )
    shape = (tensor.shape[0], rows // 2, *tensor.shape[2:])
    size = tensor.n_bytes // tensor.shape[0] // 2
    planned = []
    for index, half in enumerate(_HALVES):
        name = merged.sibling(f"{half}.{merged.suffix}")
        if name in names:
            raise MalformedFileError(
                "already exists next to the merged tensor", file=source.path, tensor=name
            )
        planned.append(
            PlannedMerge(
                replace(tensor, name=name, shape=shape),
                (ByteSpan(tensor, index * size, size),),
                tensor.shape[0],
            )
        )
    return planned


def _check_layout(source: Source, tensor: TensorInfo) -> None:
    """Check that gate and up can follow one another along axis 1: rows of weights [experts, rows,
    columns], elements of biases [experts, n].
    """
    part = TensorName.parse(tensor.name).suffix
    if part not in _MERGED_PARTS:
        raise UnsupportedTypeError(
            f"'{part}' of experts cannot be merged or split; {' and '.join(_MERGED_PARTS)} can",
            file=source.path,
            tensor=tensor.name,
        )
    if tensor.type.tail_bytes:
        raise UnsupportedTypeError(
            f"{tensor.type} has one scale after all rows of a tensor",
            file=source.path,
            tensor=tensor.name,
        )
    wanted = 3 if part == "weight" else 2
    if len(tensor.shape) != wanted:
        raise ShapeError(
            f"has shape {list(tensor.shape)}; the {part} of stacked experts has {wanted}"
            " dimensions",
            file=source.path,
            tensor=tensor.name,
        )
    if part == "bias" and (tensor.type.block_size > 1 or tensor.type.is_interleaved):
        raise UnsupportedTypeError(
            f"is {tensor.type}; a bias is made of floats", file=source.path, tensor=tensor.name
        )


def _copy(
    source: GGUFFile, planned: PlannedMerge, sink: Sink, progress: OnBytesCopied | None
) -> None:
    for unit in range(planned.n_units):
        for span in planned.spans:
            stride = span.tensor.n_bytes // planned.n_units
            begin = unit * stride + span.start
            for start in range(begin, begin + span.size, _PIECE):
                piece = source.read_bytes(
                    span.tensor, start, min(start + _PIECE, begin + span.size)
                )
                sink.write(planned.target, piece)
                if progress is not None:
                    progress(piece.nbytes)


def changed_tensors(plan: Sequence[PlannedMerge]) -> list[PlannedMerge]:
    """Return the tensors of a plan that are merged or split; the others keep their bytes."""
    return [planned for planned in plan if planned.changed]
