"""Encode rows of floats as rows of blocks. `encode` is the entry to every search.

A search is a plain Python function over one block, or over one row where the row has a scale. It is
registered in `searches`, and `formats.kernel` compiles it. Rows are independent, so all pieces and
numbers of threads give the same bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NonFiniteError, ShapeError, UnsupportedTypeError
from ..formats.codecs.codec import encode_float, interleave
from ..formats.codecs.rows import in_pieces
from ..formats.kernel import over_blocks
from ..formats.options import checks_keywords
from ..formats.types import GGMLType, ggml_type
from .search.lanes import LANES
from .search.legacy import q4_0_symmetric
from .search.steps import COLUMNS
from .search.trellis.tree import CODEBOOKS as TRELLIS_TYPES
from .searches import search_tables, searches

if TYPE_CHECKING:
    from .cuda.encoder import CudaEncoder

# Weights below this fraction of the row's mean are raised to it: a block whose importances are all
# zero is then quantized as if they were equal, and single zeros still hardly count.
_SMALLEST_WEIGHT = 1e-6
# Elements that a thread works on at a time: few enough to stay in the core's cache between passes.
_STEP_ELEMENTS = 1 << 17


@checks_keywords
def encode(
    type: str | GGMLType,
    x: np.ndarray,
    importance: np.ndarray | None = None,
    device: str = "cpu",
    threads: int = 1,
) -> np.ndarray:
    """Quantize rows: float32[rows, n_cols] to uint8[rows, row_bytes].

    Interleaved types take whole row groups and return their bytes as that many rows.

    importance: float32[n_cols], not negative, the mean square of the activations of each column;
    None weights all columns equally. device: "cpu", or "cuda" or "cuda:N" for the same bytes from a
    GPU. threads: on the CPU. Raise ShapeError for shapes that the type cannot have, NonFiniteError
    naming row and column of NaN or infinity in x or importance, UnsupportedTypeError for a type
    without a search, UsageError for an unknown or missing device, DeviceError for one that fails.
    Values near the largest float32 may decode to infinity in trellis types, as values beyond 65504
    do in F16.
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
    run = (
        row_encoder(type, n_cols, importance)
        if device == "cpu"
        else device_encoder(type, n_cols, importance, device)
    )
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
    """Turn what `row_encoder` wrote into rows of `type`, which may be interleaved."""
    if type.base:
        return interleave(type, rows, n_cols)
    if type.is_interleaved:
        from ..formats.codecs.interleaved import pack_rows

        return pack_rows(type, rows, n_cols)
    return rows


def refuse_non_finite(
    x: np.ndarray, tensor: str | None = None, file: str | None = None, first_row: int = 0
) -> None:
    """Raise NonFiniteError naming the first row and column of x that hold NaN or infinity."""
    finite = np.isfinite(x)
    if not finite.all():
        row, column = (int(v[0]) for v in np.nonzero(~finite))
        raise NonFiniteError(
            f"{x[row, column]} at row {row + first_row}, column {column}", tensor=tensor, file=file
        )


def zero_non_finite(x: np.ndarray) -> int:
    """Set NaN and infinities in float32 `x` to 0, in place. Return their number."""
    finite = np.isfinite(x)
    count = int(finite.size - np.count_nonzero(finite))
    if count:
        x[~finite] = 0
    return count


def prepare_weights(importance: np.ndarray, n_cols: int) -> np.ndarray:
    """Return search weights float32[n_cols]: importances divided by their mean, as their scale does
    not matter, and kept above zero. Raise ShapeError for importances of another length or below 0,
    NonFiniteError for one that is not finite.
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
    """Return what `row_encoder` does, for Q4_0 with only the codes -7 to 7."""
    loop = over_blocks(q4_0_symmetric)
    return lambda x, out: loop(
        x.reshape(len(x), n_cols // 32, 32), out.reshape(len(x), n_cols // 32, -1)
    )


@dataclass(frozen=True)
class _Search:
    """The functions that encode a plain type, by kind, and the weights that they take; None for a
    function without weights.
    """

    type: GGMLType
    functions: dict[str, Any]
    weights: np.ndarray | None


def _search_of(type: GGMLType, n_cols: int, importance: np.ndarray | None) -> _Search:
    functions = {kind: table[type.name] for kind, table in searches().items() if type.name in table}
    plain = ggml_type(type.base) if type.base else type
    if not functions and type.base:
        return _search_of(plain, n_cols, importance)
    if not functions:
        raise UnsupportedTypeError(f"there is no quantizer for {type.name}")
    if importance is None and "plain row" in functions:
        functions = {"row": functions["plain row"]}
    if importance is not None:
        return _Search(plain, functions, prepare_weights(importance, n_cols))
    if "plain" in functions:
        return _Search(plain, {"plain": functions["plain"]}, None)
    return _Search(plain, functions, np.ones(n_cols, dtype=np.float32))


def device_encoder(
    type: GGMLType,
    n_cols: int,
    importance: np.ndarray | None = None,
    device: str = "cuda",
    stream: Any = 0,
) -> CudaEncoder:
    """Return `row_encoder` for a CUDA device. stream: on which importances are copied."""
    search = _search_of(type, n_cols, importance)
    if search.type.name in TRELLIS_TYPES and search.weights is not None:
        from .cuda.trellis import TrellisEncoder

        return TrellisEncoder(search.type, n_cols, search.weights, device, stream)
    from .cuda.encoder import CudaEncoder

    kinds = ("plain",) if search.weights is None else ("block", "single", "row", "steps")
    kind = next(kind for kind in search.functions if kind in kinds)
    tables = () if search.weights is None else search_tables(search.type.name)
    return CudaEncoder(
        search.type,
        kind,
        search.functions[kind],
        n_cols,
        search.weights,
        tables,
        device,
        stream,
    )


def row_encoder(
    type: GGMLType, n_cols: int, importance: np.ndarray | None = None
) -> Callable[[np.ndarray, np.ndarray], None]:
    """Return a function run(x float32[rows, n_cols], out uint8[rows, row_bytes]) that writes rows
    of a plain quantized type, or for an interleaved type what `arrange_rows` takes. Threads may
    share it.
    """
    search = _search_of(type, n_cols, importance)
    type, functions, weights = search.type, search.functions, search.weights
    blocks, size, head = n_cols // type.block_size, type.block_size, type.header_bytes
    if weights is None:
        loop = over_blocks(functions["plain"])
        return lambda x, out: loop(x.reshape(len(x), blocks, size), out.reshape(len(x), blocks, -1))
    if "steps" in functions:
        functions["row" if type.header_bytes else "block"] = functions["steps"].in_sequence()
    if "row" in functions:
        function = functions["row"]
        loop = over_blocks(function, per_column=("w",), shared=_parameters(function)[4:])
        row_weights, tables = weights[None], search_tables(type.name)

        def run_rows(x: np.ndarray, out: np.ndarray) -> None:
            # The loop takes contiguous arrays: blocks follow a header in a row, and slices of one
            # row would count as contiguous and compile the loop a second time.
            heads = np.empty((len(x), 1, head), dtype=np.uint8)
            bodies = np.empty((len(x), 1, blocks, type.block_bytes), dtype=np.uint8)
            loop(x[:, None], row_weights, heads, bodies, *_scratch(n_cols), *tables)
            out[:, :head] = heads.reshape(len(x), -1)
            out[:, head:] = bodies.reshape(len(x), -1)

        return run_rows
    kind = "block" if "block" in functions else "single"
    loop = over_blocks(functions[kind], per_column=("w",), shared=_parameters(functions[kind])[3:])
    block_weights = weights.reshape(blocks, size)

    def run_blocks(x: np.ndarray, out: np.ndarray) -> None:
        scratch = _scratch(size)
        loop(
            x.reshape(len(x), blocks, size),
            block_weights,
            out.reshape(len(x), blocks, -1),
            *(scratch if kind == "block" else scratch[2:]),
            *search_tables(type.name),
        )

    return run_blocks


def _parameters(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(function, "py_func", function)).parameters)


def _scratch(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scratch of a search over n elements: (own, groups, lanes), see `search/steps.py`.
    Groups hold 16 elements or more.
    """
    return (
        np.empty(n, dtype=np.float32),
        np.empty((n // 16 + 1, COLUMNS), dtype=np.float32),
        np.empty((6, LANES), dtype=np.float32),
    )
