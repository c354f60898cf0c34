"""Rows of floats to rows of blocks: `encode`, the one entry to every search.

A search is a plain Python function over one block (or one row, where the row has a scale of its
own), registered by type name in a family file of `search/`, and compiled by `formats.kernel`. Rows
do not influence each other, so rows may be cut into any number of pieces and worked on by any
number of threads with the same bytes as result.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..errors import NonFiniteError, ShapeError, UnsupportedTypeError
from ..formats.codec import encode_float, in_pieces, interleave
from ..formats.kernel import over_blocks
from ..formats.types import TYPES, GGMLType, ggml_type
from . import search
from .search.lanes import LANES
from .search.legacy import q4_0_symmetric
from .search.steps import COLUMNS
from .search.trellis_tree import CODEBOOKS as TRELLIS_TYPES

# Weights below this part of the row's mean are raised to it: a block whose importances are all zero
# is then quantized as if they were equal, and single zeros still count for next to nothing.
_SMALLEST_WEIGHT = 1e-6
# What a thread works on at a time: what is read twice or written twice should not leave the core's
# cache in between.
_STEP_ELEMENTS = 1 << 17


@functools.cache
def _searches() -> dict[str, dict[str, Callable]]:
    """Searches by kind and type name: of a "block", of a "single" group, of a "row" that has a
    header, and in "steps" of blocks or rows; and for some types the format's definition, which is
    used without importances ("plain", "plain row").
    """
    tables = {
        "block": "BLOCK_SEARCHES",
        "single": "SINGLE_SEARCHES",
        "row": "ROW_SEARCHES",
        "steps": "STEPPED_SEARCHES",
        "plain": "PLAIN_ENCODERS",
        "plain row": "PLAIN_ROW_ENCODERS",
    }
    return {kind: _union(table) for kind, table in tables.items()}


@functools.cache
def _families() -> list[ModuleType]:
    """The modules of `search/`: a type is added by adding a file there."""
    return [
        importlib.import_module(f".search.{module.name}", __package__)
        for module in pkgutil.iter_modules(search.__path__)
    ]


def _union(table: str) -> dict[str, Callable]:
    merged: dict[str, Callable] = {}
    for family in _families():
        for name, function in getattr(family, table, {}).items():
            if merged.setdefault(name, function) is not function:
                raise RuntimeError(f"two entries for {name} in {table}")
    return merged


@functools.cache
def search_tables(name: str) -> tuple[np.ndarray, ...]:
    """The read-only arrays that the search for the type takes after its scratch; SEARCH_TABLES of
    its family makes them.
    """
    make = _union("SEARCH_TABLES").get(name)
    return tuple(make()) if make else ()


def encodable_types() -> list[str]:
    """Names of the types that `encode` supports."""
    known = {"F32", "F16", "BF16"} | {name for table in _searches().values() for name in table}
    return [
        t.name
        for t in TYPES.values()
        if t.name in known or (t.base in known and t.name in _interleavable())
    ]


def _interleavable() -> set[str]:
    from ..formats.codecs.interleaved import INTERLEAVERS

    return set(INTERLEAVERS)


def encode(
    type: str | GGMLType,
    x: np.ndarray,
    importance: np.ndarray | None = None,
    device: str = "cpu",
    threads: int = 1,
) -> np.ndarray:
    """Quantize rows: float32[rows, n_cols] to uint8[rows, row_bytes].

    importance: float32[n_cols], not negative, the mean square of the activations that meet each
    column; None weighs all columns alike. Interleaved types take whole row groups and give their
    bytes as that many rows. device: "cpu", or "cuda" or "cuda:N" for the same bytes from a GPU;
    `threads` counts on the CPU only. ShapeError for shapes the type cannot have, NonFiniteError
    naming row and column for NaN or infinity in x or importance, UnsupportedTypeError for a type
    without a search, UsageError for a device that is unknown or not there, DeviceError for one that
    fails. Values near float32's largest may decode to infinity in trellis types, as values beyond
    65504 do in F16.
    """
    if device != "cpu":
        from ..cuda_kernels.compile.numba_cuda import device_number, named_errors

        device_number(device)
        with named_errors(device):
            return _encode(ggml_type(type), x, importance, device, 1)
    return _encode(ggml_type(type), x, importance, device, threads)


def _encode(
    type: GGMLType, x: np.ndarray, importance: np.ndarray | None, device: str, threads: int
) -> np.ndarray:
    x = np.ascontiguousarray(x, dtype=np.float32)
    if x.ndim != 2:
        raise ShapeError(f"encode takes float32[rows, n_cols], got {x.ndim} dimensions")
    n_cols = x.shape[1]
    type.tensor_bytes(x.shape)  # raises ShapeError
    if not len(x):
        return np.empty((0, type.row_bytes(n_cols)), dtype=np.uint8)
    plain = ggml_type(type.base) if type.base else type
    if plain.is_float:
        return arrange_rows(type, encode_float(plain, x), n_cols)
    run = row_encoder(type, n_cols, importance, device)
    out = np.empty((len(x), type.row_bytes(n_cols)), dtype=np.uint8)
    step = (
        type.group_rows * max(1, _STEP_ELEMENTS // (type.group_rows * n_cols))
        if device == "cpu"
        else len(x)
    )

    def work(part: slice) -> None:
        staged = None
        for start in range(part.start, part.stop, step):
            rows = slice(start, min(start + step, part.stop))
            refuse_non_finite(x[rows], first_row=start)
            if not type.is_interleaved:
                run(x[rows], out[rows])
                continue
            if staged is None:
                staged = np.empty((rows.stop - start, plain.row_bytes(n_cols)), dtype=np.uint8)
            piece = staged[: rows.stop - start]
            run(x[rows], piece)
            out[rows] = arrange_rows(type, piece, n_cols)

    in_pieces(work, len(x), type.group_rows, threads)
    return out


def arrange_rows(type: GGMLType, rows: np.ndarray, n_cols: int) -> np.ndarray:
    """What `row_encoder` of the plain type (or, where there is none, of the type) wrote, as rows of
    `type`, which may be interleaved.
    """
    if type.base:
        return interleave(type, rows, n_cols)
    if type.is_interleaved:
        from ..formats.codecs.interleaved import pack_rows

        return pack_rows(type, rows, n_cols)
    return rows


def refuse_non_finite(
    x: np.ndarray, tensor: str | None = None, file: str | None = None, first_row: int = 0
) -> None:
    """NonFiniteError naming the first row and column of x that hold NaN or infinity."""
    finite = np.isfinite(x)
    if not finite.all():
        row, column = (int(v[0]) for v in np.nonzero(~finite))
        raise NonFiniteError(
            f"{x[row, column]} at row {row + first_row}, column {column}", tensor=tensor, file=file
        )


def zero_non_finite(x: np.ndarray) -> int:
    """Set NaN and infinities in float32 `x` to 0, in place; returns how many there were."""
    finite = np.isfinite(x)
    count = finite.size - np.count_nonzero(finite)
    if count:
        x[~finite] = 0
    return count


def prepare_weights(importance: np.ndarray, n_cols: int) -> np.ndarray:
    """Search weights float32[n_cols] from importances: divided by their mean (scale plays no role)
    and kept above zero.
    """
    importance = np.asarray(importance, dtype=np.float64)
    if importance.shape != (n_cols,):
        raise ShapeError(f"importance has shape {list(importance.shape)}, expected [{n_cols}]")
    if not np.isfinite(importance).all():
        column = int(np.nonzero(~np.isfinite(importance))[0][0])
        raise NonFiniteError(f"importance is {importance[column]} at column {column}")
    if (importance < 0).any():
        column = int(np.nonzero(importance < 0)[0][0])
        raise ShapeError(f"importance is negative ({importance[column]:g}) at column {column}")
    mean = importance.mean()
    if mean == 0:
        return np.ones(n_cols, dtype=np.float32)
    return np.maximum(importance / mean, _SMALLEST_WEIGHT).astype(np.float32)


def symmetric_encoder(n_cols: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """As `row_encoder` for Q4_0, with the codes -7 to 7 alone."""
    loop = over_blocks(q4_0_symmetric)
    return lambda x, out: loop(
        x.reshape(len(x), n_cols // 32, 32), out.reshape(len(x), n_cols // 32, -1)
    )


def row_encoder(
    type: GGMLType,
    n_cols: int,
    importance: np.ndarray | None = None,
    device: str = "cpu",
    stream: object = 0,
) -> Callable[[np.ndarray, np.ndarray], None]:
    """A function run(x float32[rows, n_cols], out uint8[rows, row_bytes]) that writes rows of a
    plain quantized type, or for an interleaved type what `arrange_rows` takes; safe to call from
    threads. On a CUDA device it is a `CudaEncoder`; `stream`: where its importances are copied.
    """
    own = {kind: table[type.name] for kind, table in _searches().items() if type.name in table}
    if not own and type.base:
        return row_encoder(ggml_type(type.base), n_cols, importance, device, stream)
    kinds, type = own, ggml_type(type.base) if type.base else type
    if not kinds:
        raise UnsupportedTypeError(f"there is no quantizer for {type.name}")
    blocks, size, head = n_cols // type.block_size, type.block_size, type.header_bytes
    if importance is None and "plain row" in kinds:
        kinds = {"row": kinds["plain row"]}
    plain = importance is None and "plain" in kinds
    weights = (
        None
        if plain
        else (
            np.ones(n_cols, dtype=np.float32)
            if importance is None
            else prepare_weights(importance, n_cols)
        )
    )
    if device != "cpu" and type.name in TRELLIS_TYPES:
        from .cuda.trellis import TrellisEncoder

        return TrellisEncoder(type, n_cols, weights, device, stream)
    if device != "cpu":
        from .cuda.encoder import CudaEncoder

        kind = (
            "plain"
            if plain
            else next(kind for kind in kinds if kind in ("block", "single", "row", "steps"))
        )
        return CudaEncoder(
            type,
            kind,
            kinds[kind],
            n_cols,
            weights,
            () if plain else search_tables(type.name),
            device,
            stream,
        )
    if plain:
        loop = over_blocks(kinds["plain"])
        return lambda x, out: loop(x.reshape(len(x), blocks, size), out.reshape(len(x), blocks, -1))
    if "steps" in kinds:
        kinds["row" if type.header_bytes else "block"] = kinds["steps"].in_sequence()
    if "row" in kinds:
        loop = over_blocks(kinds["row"], per_column=("w",), shared=_parameters(kinds["row"])[4:])

        def run_rows(x: np.ndarray, out: np.ndarray) -> None:
            heads, bodies = (
                out[:, None, :head],
                out[:, head:].reshape(len(x), 1, blocks, type.block_bytes),
            )
            staged = np.empty(
                bodies.shape, dtype=np.uint8
            )  # rows with a header are not contiguous blocks
            loop(
                x[:, None],
                weights[None],
                heads,
                staged,
                *_scratch(n_cols),
                *search_tables(type.name),
            )
            out[:, head:] = staged.reshape(len(x), -1)

        return run_rows
    kind = "block" if "block" in kinds else "single"
    loop = over_blocks(kinds[kind], per_column=("w",), shared=_parameters(kinds[kind])[3:])

    def run_blocks(x: np.ndarray, out: np.ndarray) -> None:
        scratch = _scratch(size)
        loop(
            x.reshape(len(x), blocks, size),
            weights.reshape(blocks, size),
            out.reshape(len(x), blocks, -1),
            *(scratch if kind == "block" else scratch[2:]),
            *search_tables(type.name),
        )

    return run_blocks


def _parameters(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(function, "py_func", function)).parameters)


def _scratch(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scratch of a search over n elements: (own, groups, lanes), see `search/steps.py`. Groups hold
    16 elements or more.
    """
    return (
        np.empty(n, dtype=np.float32),
        np.empty((n // 16 + 1, COLUMNS), dtype=np.float32),
        np.empty((6, LANES), dtype=np.float32),
    )
