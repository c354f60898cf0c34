"""The trellis searches on CUDA devices: `trellis_rows.cu` and `trellis_words.cu`, compiled when a
type is first used and kept in the cache of kernels.

For speed, this is another implementation than the CPU's: a warp shares the search for one group,
which would be slower in numba-cuda, and several scales share every code word that is loaded. The
choice of d, the guesses and the trials are computed with the same roundings as on the CPU. Here the
search for the best code word covers all of them; on the CPU far boxes are left out (REACH). So the
bytes differ where the CPU misses the best word, or in near ties.

cuda-core and numba-cuda are the extra `iqforge[cuda]`; this module is imported only where a CUDA
device is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...cuda_kernels.compile.numba_cuda import cuda_module, device_number
from ...cuda_kernels.compile.plain_launch import launch_on, load
from ...cuda_kernels.compile.spec import KernelSpec
from ...formats.types import GGMLType, ggml_type
from ..search.trellis import SETTINGS
from ..search.trellis.nearest import MARGIN
from ..search.trellis.scales import SMALLEST
from ..search.trellis.tree import CODEBOOKS, search_tree
from .encoder import LOCKS, CudaEncoder

LEAF = 32  # words per leaf: one for each lane of a warp
THREADS = 256
BATCH = {"IQ1_KT": 1, "IQ2_KT": 1, "IQ3_KT": 1, "IQ4_KT": 4}  # scales searched at once
# CUDA blocks per multiprocessor that the registers must suffice for.
RESIDENT = {
    "IQ1_KT": 5,
    "IQ2_KT": 5,
    "IQ3_KT": 5,
    "IQ4_KT": 4,
}
FORMATS = {"IQ1_KT": 1, "IQ2_KT": 2, "IQ3_KT": 3, "IQ4_KT": 4}


def tables(name: str) -> list[np.ndarray]:
    """Return the tables of the kernel: constants float32, words as bfloat16 bits uint16[books,
    size, dim], their indices uint16[books, size], boxes of leaves and of nodes float32. Nodes are
    padded to a multiple of 32 with boxes that are far from everything.
    """
    book = CODEBOOKS[name]
    names: dict[str, Any] = SETTINGS[name].names(name)
    words, indices, leaf_boxes, node_boxes = search_tree(name, LEAF)
    side_by_side = (
        words.reshape(len(words), -1, book.dim, LEAF).transpose(0, 1, 3, 2).astype(np.float32)
    )
    nodes = np.full((len(words), 2, book.dim, node_count(name)), np.inf, dtype=np.float32)
    nodes[:, 1] = -np.inf
    nodes[..., : book.nodes(LEAF)] = node_boxes.reshape(len(words), 2, book.dim, -1)
    return [
        np.concatenate([names["TARGETS"], names["POSITIVE"], names["NEGATIVE"]]),
        np.ascontiguousarray(side_by_side.view(np.uint32) >> 16).astype(np.uint16),
        indices.astype(np.uint16),
        leaf_boxes,
        nodes,
    ]


def node_count(name: str) -> int:
    """Return the nodes per book of the tree that a GPU searches, rounded up to a multiple of 32."""
    return -(-CODEBOOKS[name].nodes(LEAF) // 32) * 32


def defines(type: GGMLType) -> list[tuple[str, str]]:
    """Return the macros that the sources need."""
    names: dict[str, Any] = SETTINGS[type.name].names(type.name)
    names |= {key: len(names[key]) for key in ("TARGETS", "POSITIVE", "NEGATIVE")}
    names |= {
        "SIDES": 2 if names["NEGATIVE"] else 1,
        "NODES": node_count(type.name),
        "BATCH": BATCH[type.name],
        "RESIDENT": RESIDENT[type.name],
        "SMALLEST": SMALLEST,
        "MARGIN": MARGIN,
        "FORMAT": FORMATS[type.name],
        "BLOCK_BYTES": type.block_bytes,
    }
    shown = {True: "true", False: "false"}
    return [
        (
            key,
            (
                float(np.float32(v)).hex() + "f"
                if isinstance(v, float)
                else shown[v]
                if isinstance(v, bool)
                else str(v)
            ),
        )
        for key, v in names.items()
    ]


def spec(type: GGMLType) -> KernelSpec:
    """Return the spec of the three kernels of a trellis type."""
    return KernelSpec(
        f"search_{type.name.lower()}",
        ("search/trellis_rows.cu", "search/trellis_words.cu"),
        tuple(defines(type)),
        ("trellis_prepare", "trellis_search", "trellis_finish"),
        fma=False,
    )


def specs() -> list[KernelSpec]:
    """Return the kernels of all trellis types."""
    return [spec(ggml_type(name)) for name in FORMATS]


@functools.cache
def _kernels(type: GGMLType, device: int) -> tuple:
    return tuple(load(spec(type), device))


class TrellisEncoder(CudaEncoder):
    """Quantize rows of `n_cols` elements to a trellis type on one device, as `CudaEncoder` does for
    other types.
    """

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        weights: np.ndarray,
        device: str = "cuda",
        stream: Any = 0,
    ):
        """weights: float32[n_cols]. stream: the stream on which they are copied."""
        self.type, self.kind, self.n_cols, self.number = type, "row", n_cols, device_number(device)
        self._by_row = True
        self._cuda = cuda_module()
        self._groups = 32 // CODEBOOKS[type.name].dim
        with LOCKS[self.number], self._cuda.gpus[self.number]:
            self._steps = _kernels(type, self.number)
            self._tables = [
                self._cuda.to_device(table, stream=stream) for table in tables(type.name)
            ]
            self._weights = self._cuda.to_device(
                np.ascontiguousarray(weights, dtype=np.float32), stream=stream
            )
            if stream:
                stream.synchronize()

    def arrays(self, rows: int, new: Callable[..., Any] | None = None) -> list[Any]:
        """Return x, headers, blocks and scratch; see `CudaEncoder.arrays`."""
        blocks = self.n_cols // 32
        if new is None:
            new = self._allocate
        return [
            new((rows, self.n_cols), np.float32),
            new((rows, self.type.header_bytes), np.uint8),
            new((rows, self.n_cols // self.type.block_size, self.type.block_bytes), np.uint8),
            new((rows, 2), np.float32),
            new((rows, blocks, 2), np.float32),
            new((rows, blocks, self._groups + 2), np.int32),
        ]

    def launch(self, arrays: list[Any], stream: Any = 0, weights: Any = None) -> None:
        """Start the search; see `CudaEncoder.launch`."""
        if not len(arrays[0]):
            return
        x, heads, bodies, rows, guesses, chosen = (_address(a) for a in arrays)
        constants, words, indices, leaf_boxes, node_boxes = (_address(t) for t in self._tables)
        w, count, blocks = (
            _address(self._weights if weights is None else weights),
            len(arrays[0]),
            np.int32(self.n_cols // 32),
        )
        total = count * int(blocks)
        prepare, search, finish = self._steps
        on = int(stream) if stream else 0
        launch_on(on, prepare, count, THREADS, x, w, constants, rows, guesses, blocks)
        launch_on(
            on,
            search,
            -(-total // (THREADS // 32)),
            THREADS,
            x,
            w,
            constants,
            rows,
            guesses,
            words,
            indices,
            leaf_boxes,
            node_boxes,
            chosen,
            blocks,
            np.int64(total),
        )
        launch_on(on, finish, count, THREADS, x, w, rows, chosen, heads, bodies, blocks)


def _address(array: Any) -> np.uintp:
    """Return the address of an array on a device."""
    return np.uintp(array.__cuda_array_interface__["data"][0])
