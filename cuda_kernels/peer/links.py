"""Sums over the GPUs of one host within a decoding step, through memory that they share:
`step/peer.cu`. For prompts see `rows`.

Every rank is a process with one GPU. `PeerMemory` is what a rank lets the others write to.
`PeerLinks.sum` and `.gather` are one launch each, which can be captured into a CUDA graph. They use
plain stores to the memory of other GPUs, over NVLink or PCIe, and no multicast.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ...errors import DeviceError, ShapeError
from ..compile.launch import device_index, function, launch
from ..compile.spec import KernelSpec

MOST_RANKS = 8
_THREADS, _EACH = 128, 4  # as in peer.cu
_PLACES, _UNIT_BYTES, _UNIT_ELEMENTS = 2, 16, 2
# Elements of a launch of several rows: blocks wait for those of other ranks where they are, so that
# all should find a place at once.
_MOST_AT_ONCE = 512 * _THREADS * _EACH


def _spec(ranks: int) -> KernelSpec:
    return KernelSpec(
        f"step_peer_{ranks}",
        ("step/peer.cu",),
        (("RANKS", str(ranks)),),
        ("peer_sum", "peer_gather"),
    )


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [_spec(ranks) for ranks in range(2, MOST_RANKS + 1)]


def _checked(device: int, result: Any) -> Any:
    """Return what a call of the driver gave besides its error. DeviceError if it failed."""
    error, *values = result
    if int(error):
        raise DeviceError(f"cuda:{device}: memory cannot be shared with other GPUs: {error.name}")
    return values[0] if values else None


class PeerMemory:
    """`n_bytes` on a device, in an allocation of their own, which other processes can open. Each
    four bytes are `word` at first.
    """

    def __init__(self, n_bytes: int, device: torch.device, word: int = 0):
        self._driver = importlib.import_module("cuda.bindings.driver")
        self.device = device_index(device)
        self._opened: list[int] = []
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # torch makes the context
            torch.empty(1, device=device)
            self.address = int(self._call(self._driver.cuMemAlloc(n_bytes)))
            self._call(self._driver.cuMemsetD32(self.address, word, n_bytes // 4))
            torch.cuda.synchronize()
        self._free = weakref.finalize(
            self, _freed, self._driver, self.device, self.address, self._opened
        )

    def _call(self, result: Any) -> Any:
        return _checked(self.device, result)

    def handle(self) -> bytes:
        """Return what another process of this host opens the memory with."""
        return bytes(self._call(self._driver.cuIpcGetMemHandle(self.address)).reserved)

    def open(self, handle: bytes) -> int:
        """Return the address, for kernels of this device, of the memory of another process."""
        found = self._driver.CUipcMemHandle()
        found.reserved = handle
        flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with torch.cuda.device(self.device):
            address = int(self._call(self._driver.cuIpcOpenMemHandle(found, int(flag))))
        self._opened.append(address)
        return address

    def close(self) -> None:
        """Close the memory of others and free the own one, once nobody uses it."""
        self._free()


def _freed(driver: Any, device: int, own: int, opened: list[int]) -> None:
    with suppress(RuntimeError), torch.cuda.device(device):  # at exit the context may be gone
        torch.cuda.synchronize()
        for address in opened:
            driver.cuIpcCloseMemHandle(address)
        driver.cuMemFree(own)


def opened_by_all(
    allocate: Callable[[], PeerMemory], rank: int, exchange: Callable[[bytes], Sequence[bytes]]
) -> tuple[PeerMemory, list[int]]:
    """Return the memory of this rank, and the address, for kernels of this device, of the memory of
    each rank. DeviceError on all ranks if one of them has no memory or cannot open another's.
    """
    memory, failed, handle = None, None, b""
    addresses: list[int] = []
    try:
        memory = allocate()
        handle = memory.handle()
    except DeviceError as error:
        failed = error
    handles = exchange(handle)
    if memory is not None and all(handles):
        try:
            addresses = [
                memory.address if peer == rank else memory.open(handle)
                for peer, handle in enumerate(handles)
            ]
        except DeviceError as error:
            failed = error
    # Nobody writes before all have come here with memory that is set.
    opened = exchange(b"" if failed or not all(handles) else b"opened")
    if memory is None or not all(opened):
        if memory is not None:
            memory.close()
        raise failed or DeviceError("another GPU cannot share its memory")
    return memory, addresses


class PeerLinks:
    """The links of rank `rank` of `n_ranks` for exchanges of up to `elements` float32 per rank.

    exchange: returns the `bytes` that every rank has passed, in the order of ranks. timeout:
    seconds after which a kernel that waits for another rank stops with an error; `missing` then is
    that rank.
    """

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        elements: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        timeout: float = 600.0,
    ):
        if not 2 <= n_ranks <= MOST_RANKS:
            raise ShapeError(f"{n_ranks} GPUs, expected 2 to {MOST_RANKS}")
        self.rank, self.n_ranks, self.device = rank, n_ranks, device
        per_block = _THREADS * _EACH
        self._blocks = -(-elements // per_block)
        self.elements = self._blocks * per_block
        self._units = self.elements // _UNIT_ELEMENTS
        n_bytes = _PLACES * n_ranks * self._units * _UNIT_BYTES
        self._memory, addresses = opened_by_all(lambda: PeerMemory(n_bytes, device), rank, exchange)
        self._peers = [np.uint64(a) for a in addresses + [0] * (MOST_RANKS - n_ranks)]
        self._numbers = torch.zeros(self._blocks, dtype=torch.int32, device=device)
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._most = np.uint64(int(timeout * 1e9))

    @property
    def missing(self) -> int | None:
        """The rank for which a kernel has waited too long; None if none has."""
        rank = int(self._missing[0])
        return rank - 1 if rank else None

    def _launch(self, name: str, n: int, *args: Any) -> None:
        if n > self.elements:
            raise ShapeError(f"{n} elements, the memory shared among GPUs has {self.elements}")
        launch(
            function(_spec(self.n_ranks), name, self.device),
            -(-n // (_THREADS * _EACH)),
            _THREADS,
            *args,
            pdl=True,
        )

    @property
    def _common(self) -> tuple[Any, ...]:
        sizes = np.int32(self.rank), np.uint32(self._units)
        return self._numbers, self._missing, self._most, *sizes, self._peers[self.rank]

    def sum(self, x: torch.Tensor, h: torch.Tensor, *, assign: bool = False) -> None:
        """Compute h += the sum of x over all ranks, with `assign` h = that sum, and set x to 0; x
        and h contiguous float32 of equal sizes, a multiple of 4. Raise ShapeError for other sizes.
        """
        n = x.numel()
        if n % _EACH or h.numel() != n or not (x.is_contiguous() and h.is_contiguous()):
            raise ShapeError(
                f"a sum over GPUs of {list(x.shape)} and {list(h.shape)}: expected contiguous"
                f" tensors of one size, a multiple of {_EACH}"
            )
        self._launch(
            "peer_sum", n, x, h, np.int32(assign), np.int32(n), *self._common, *self._peers
        )

    def gather(self, x: torch.Tensor, out: torch.Tensor, ends: Sequence[int]) -> None:
        """Compute out float32[rows, width] = the columns x float32[rows, ...] of all ranks side by
        side; those of rank r end before column ends[r]. Raise ShapeError for columns that do not
        fit `ends`.
        """
        rows, width = out.shape
        counts = np.diff([0, *ends])
        if x.shape != (rows, counts[self.rank]) or ends[-1] != width:
            raise ShapeError(f"columns {list(x.shape)} of rank {self.rank} for {list(out.shape)}")
        most = -(-int(counts.max()) // _EACH) * _EACH
        padded = [np.int32(end) for end in [*ends] + [width] * (MOST_RANKS - len(ends))]
        own = np.int32(ends[self.rank] - counts[self.rank]), np.int32(counts[self.rank])
        each = max(1, _MOST_AT_ONCE // most)
        for first in range(0, rows, each):
            some = slice(first, min(first + each, rows))
            n, sizes = some.stop - first, (np.int32(width), np.int32(most))
            more = *sizes, *self._common, *own, *padded, *self._peers
            self._launch("peer_gather", n * most, x[some], out[some], np.int32(n), *more)

    def close(self) -> None:
        """Free the memory, once no rank uses it."""
        self._memory.close()
