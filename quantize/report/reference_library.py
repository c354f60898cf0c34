"""Call a built ggml library (`libggml*.so` of ik_llama.cpp or llama.cpp) through its C functions,
as a quantizer to compare with.

It uses `ggml_init` (fills the library's tables), `ggml_type_name`, `ggml_row_size`,
`ggml_quantize_requires_imatrix`, `ggml_quantize_init` and `ggml_quantize_chunk`. ik_llama.cpp's
ggml_quantize_chunk takes one pointer more than llama.cpp's, to two flags that are both off unless a
user of llama-quantize asks otherwise; llama.cpp's ignores it.
"""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np

from ...errors import NotFoundError, UnsupportedTypeError, UsageError
from ...formats.types import GGMLType, ggml_type


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class ReferenceLibrary:
    """The quantizers of one shared library. Raise NotFoundError, or UsageError if it is not a ggml
    library that can be loaded.
    """

    def __init__(self, path: str | os.PathLike):
        if not os.path.isfile(path):
            raise NotFoundError("no such file", file=path)
        try:
            self._library = ctypes.CDLL(os.path.abspath(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise UsageError(f"not a ggml library that can be loaded: {error}", file=path) from None
        self._context = self._library.ggml_init(_InitParams(1 << 16, None, False))

    def _declare(self) -> None:
        number, rows, pointer, size = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ggml_init", pointer, [_InitParams]),
            ("ggml_type_name", ctypes.c_char_p, [number]),
            ("ggml_row_size", size, [number, rows]),
            ("ggml_quantize_requires_imatrix", ctypes.c_bool, [number]),
            ("ggml_quantize_init", None, [number]),
            (
                "ggml_quantize_chunk",
                size,
                [number, pointer, pointer, rows, rows, rows, pointer, pointer],
            ),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def has(self, type: str | GGMLType) -> bool:
        """Return whether the library knows the type: the same id by the same name, with rows of the
        same size.
        """
        type = ggml_type(type)
        name = self._library.ggml_type_name(type.id)
        if name is None or name.decode(errors="replace").lower() not in (
            type.type_name.lower(),
            type.name.lower(),
        ):
            return False
        n_cols = 1024 * type.block_size
        # A file's row size counts the header of a row; of interleaved rows with headers the library
        # counts none.
        return self._library.ggml_row_size(type.id, n_cols) in (
            type.row_bytes(n_cols),
            type.row_bytes(n_cols) - type.header_bytes,
        )

    def requires_importance(self, type: str | GGMLType) -> bool:
        """Return whether the library refuses to quantize to the type without importances."""
        return bool(self._library.ggml_quantize_requires_imatrix(ggml_type(type).id))

    def survives(self, type: str | GGMLType, x: np.ndarray, importance: np.ndarray | None) -> bool:
        """Return whether `quantize` returns. The library ends the process if one of its assertions
        fails, so a child process tries first.
        """
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)  # what the library would print on its way out
                os.dup2(nowhere, 2)
                self.quantize(type, x, importance)
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def quantize(
        self, type: str | GGMLType, x: np.ndarray, importance: np.ndarray | None
    ) -> np.ndarray:
        """Quantize float32[rows, n_cols] to uint8[rows, row_bytes] with one thread. Raise
        UnsupportedTypeError for a type that the library lacks or that it does not quantize without
        importances.
        """
        type = ggml_type(type)
        if not self.has(type):
            raise UnsupportedTypeError(f"the reference library has no type {type.name}")
        if importance is None and self.requires_importance(type):
            raise UnsupportedTypeError(
                f"the reference library quantizes to {type.name} with importances only"
            )
        type.tensor_bytes(x.shape)  # raises ShapeError
        x = np.ascontiguousarray(x, dtype=np.float32)
        weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
        out = np.zeros((len(x), type.row_bytes(x.shape[1])), dtype=np.uint8)
        self._library.ggml_quantize_init(type.id)
        self._library.ggml_quantize_chunk(
            type.id,
            x.ctypes.data,
            out.ctypes.data,
            0,
            *x.shape,
            None if weights is None else weights.ctypes.data,
            ctypes.create_string_buffer(16),
        )
        return out
