"""Sums of many rows over the GPUs of one host, with the norm after them: `prompt/peer.cu`.

One launch replaces a collective, the addition to the residual stream, the norm and the rounding. It
can be captured into a CUDA graph, as the GPUs count the exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...errors import ShapeError
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..prompt.rows import norm_fits
from .links import MOST_RANKS, PeerMemory, opened_by_all

_HALVES = {torch.bfloat16: 0, torch.float16: 1}
_MOVED = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_UNITS, _THREADS, _UNIT = (1, 2, 4, 8), 256, 8  # as in norm.cuh
_ALIGNED = 1024  # bytes: rows of 4 bytes move in pieces of so many
_NOTHING = 0x80008000


def _spec(half: torch.dtype) -> KernelSpec:
    return KernelSpec(
        f"prompt_peer_{'bf16' if half == torch.bfloat16 else 'f16'}",
        ("prompt/peer.cu",),
        (("HALF", str(_HALVES[half])),),
        tuple(f"{name}_{n}" for name in ("peer_norm", "peer_post_norm") for n in _UNITS),
    )


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [_spec(half) for half in _HALVES]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNED) * _ALIGNED


def row_bytes(width: int, moved: torch.dtype) -> int:
    """Return the bytes of a row that moves as `moved`."""
    return _aligned(4 * width) if moved == torch.float32 else moved.itemsize * width


def place_bytes(n_ranks: int, rows: int, width: int, moved: torch.dtype) -> int:
    """Return the bytes that one exchange of so many rows takes in the memory of a rank."""
    each = 0 if n_ranks == 2 else -(-rows // n_ranks)
    return _aligned((n_ranks * each + rows) * row_bytes(width, moved))


def memory_bytes(n_ranks: int, sizes: Sequence[tuple[int, torch.dtype]], width: int) -> int:
    """Return the bytes of the memory that a rank shares for exchanges of up to so many rows of each
    type.
    """
    return 2 * max(place_bytes(n_ranks, rows, width, moved) for rows, moved in sizes)


class PeerRows:
    """The links of rank `rank` of `n_ranks` for rows of `width` elements, of which up to so many
    move as a type at a time as `sizes` say; more rows move in pieces.

    exchange: returns the `bytes` that every rank has passed, in the order of ranks. timeout:
    seconds after which a kernel that waits for another rank stops with an error; `missing` then is
    that rank. DeviceError on all ranks if memory cannot be shared.
    """

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        sizes: Sequence[tuple[int, torch.dtype]],
        width: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        timeout: float = 600.0,
    ):
        if not 2 <= n_ranks <= MOST_RANKS:
            raise ShapeError(f"{n_ranks} GPUs, expected 2 to {MOST_RANKS}")
        self.rank, self.n_ranks, self.rows = rank, n_ranks, max(rows for rows, _ in sizes)
        n_bytes = memory_bytes(n_ranks, sizes, width)
        self._place = n_bytes // 2
        self._memory, addresses = opened_by_all(
            lambda: PeerMemory(n_bytes, device, word=_NOTHING), rank, exchange
        )
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(3, dtype=torch.int32, device=device)
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._most = np.uint64(int(timeout * 1e9))

    @property
    def missing(self) -> int | None:
        """The rank for which a kernel has waited too long; None if none has."""
        rank = int(self._missing[0])
        return rank - 1 if rank else None

    def fits(self, rows: int, width: int, moved: torch.dtype) -> bool:
        """Return whether `add_norm` takes so many rows of this width, and moves them as `moved`."""
        taken = place_bytes(self.n_ranks, min(rows, self.rows), width, moved)
        return norm_fits(width) and taken <= self._place

    def add_norm(
        self,
        h: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor | None,
        *,
        moved: torch.dtype,
        half: torch.dtype,
        delta: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
        shares: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
        permuted: bool = False,
        plain: torch.Tensor | None = None,
        post_weight: torch.Tensor | None = None,
        post_eps: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Compute h += the sum over all ranks of what each adds, and out = norm(h), as
        `prompt.add_norm`.

        This rank adds `delta` (with `rows` and `weights` the outputs of experts), and `extra`
        half[T, width], if given with `shares`; without both it adds nothing. Parts move in the type
        `moved`. All ranks call with as many rows of one width, and the same type and `post_weight`.
        """
        given = {"weights": weights, "rows": rows, "extra": extra, "shares": shares}
        given |= {"exact": exact, "plain": plain, "out": out}
        for first in range(0, len(h), self.rows):
            last = min(first + self.rows, len(h))
            some = {n: None if x is None else x[first:last] for n, x in given.items()}
            whole = delta if delta is None or weights is not None else delta[first:last]
            self._add(
                h[first:last],
                whole,
                some,
                weight,
                eps,
                moved,
                half,
                permuted,
                post_weight,
                (post_eps, scale),
            )

    def _add(
        self,
        h: torch.Tensor,
        delta: torch.Tensor | None,
        some: dict[str, torch.Tensor | None],
        weight: torch.Tensor | None,
        eps: float,
        moved: torch.dtype,
        half: torch.dtype,
        permuted: bool,
        post_weight: torch.Tensor | None,
        post: tuple[float, float],
    ) -> None:
        width, weights = h.shape[1], some["weights"]
        if not self.fits(len(h), width, moved):
            raise ShapeError(f"{len(h)} rows of {width} {moved} do not fit the shared memory")
        units = next(n for n in _UNITS if n * _THREADS * _UNIT >= width)
        name = "peer_norm" if post_weight is None else "peer_post_norm"
        launch(
            function(_spec(half), f"{name}_{units}", h.device),
            len(h),
            _THREADS,
            h,
            delta,
            weights,
            some["rows"],
            np.int32(0 if weights is None else weights.shape[1]),
            some["extra"],
            some["shares"],
            weight,
            np.float32(eps),
            some["out"],
            np.int32(permuted),
            some["plain"],
            some["exact"],
            np.int32(width),
            post_weight,
            np.float32(post[0]),
            np.float32(post[1]),
            self._state,
            self._missing,
            self._peers,
            self._most,
            np.uint64(self._place),
            np.int32(self.rank),
            np.int32(self.n_ranks),
            np.int32(_MOVED[moved]),
        )

    def close(self) -> None:
        """Free the memory, once no rank uses it."""
        self._memory.close()
