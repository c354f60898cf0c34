"""The ranks that evaluate one model together: sums, concatenations and decisions.

A rank is a process with one device. Every rank runs the same program on the same tokens, holds its
part of the weights, and meets the others here. On CPUs ranks talk through gloo, on GPUs through
NCCL. Sums add the parts in the order of ranks, or in the order that NCCL derives from shapes, so
that a run repeats bit for bit and all ranks have the same numbers.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ...errors import DeviceError, UsageError
from .arrival import await_all, shared_store
from .modes import DEFAULT_TIMEOUT
from .payload import DTYPES, FEW_ROWS, decoded, encoded
from .ranks import Ranks, named_ranks
from .waits import Waits

_MARGIN = 1.0  # seconds that torch has to say itself why ranks do not meet
_LONG = datetime.timedelta(minutes=10)

_Result = TypeVar("_Result")


class Group:
    """The group of this process, rank `rank` of `size`, which computes on `device`.

    reduce_type: see `payload`. timeout: seconds that a rank waits for others. Close it to leave.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        *,
        reduce_type: str = "f32",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        self.ranks, self.rank, self.size, self.device = ranks, ranks.rank, ranks.size, device
        self.reduce_type, self.timeout = reduce_type, timeout
        self._pauses = 0
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with _ended_after(timeout, f"rank {ranks.rank} of {ranks.size} cannot reach the others"):
            self._store = _joined(ranks, device, timeout)
        self._waits = Waits(self._store, self.rank, self.size, timeout)

    def __repr__(self) -> str:
        return f"<Group rank {self.rank} of {self.size} on {self.device}>"

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x float32[rows, width] over all ranks, float32, the same bits on each.

        What is moved has the type `reduce_type`, or float32 for few rows.
        """
        kind = "f32" if len(x) <= FEW_ROWS else self.reduce_type
        if x.device.type == "cuda" and kind != "q8_0":
            moved = encoded(x.contiguous(), kind)
            self._named("a sum", lambda: dist.all_reduce(moved))
            return moved.float()
        parts = self._all(encoded(x.contiguous(), kind))
        total = decoded(parts[0], x)
        for part in parts[1:]:
            total = total + decoded(part, x)
        return total

    def moved_type(self, rows: int) -> torch.dtype | None:
        """Return the type in which GPUs sum so many rows; None for blocks of 8 bits."""
        return DTYPES.get("f32" if rows <= FEW_ROWS else self.reduce_type)

    def sum_while(self, pieces: Iterable[torch.Tensor]) -> None:
        """Replace tensors on a GPU by their sums over all ranks, each while `pieces` computes the
        next.
        """
        # Pieces are computed between calls: a rank that hangs there does not wait for others.
        started = [
            self._named("a sum", partial(dist.all_reduce, piece, async_op=True)) for piece in pieces
        ]
        self._named("a sum", lambda: [one.wait() for one in started if one is not None])

    def gather(self, x: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """Return [rows, ends[-1]], the columns of all ranks side by side; x [rows, n] are those of
        this rank, and those of rank r end before column ends[r].
        """
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        padded = x.new_zeros(len(x), max(counts))
        padded[:, : x.shape[1]] = x
        parts = self._all(padded)
        return torch.cat([part[:, :n] for part, n in zip(parts, counts, strict=True)], dim=1)

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rank 0, int64 of any shape, on the device of `tokens`. All ranks
        pass as many.
        """
        held = tokens.to("cpu", torch.int64).contiguous()
        self._named("tokens", lambda: dist.broadcast(held, 0))
        return held.to(tokens.device)

    def from_first(self, value: _Result) -> _Result:
        """Return the value of rank 0, any object that can be pickled."""
        held = [value]
        self._named("a decision", lambda: dist.broadcast_object_list(held, 0, device=_CPU))
        return held[0]

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor to another rank, which calls `receive`."""
        self._named("a receiver", lambda: dist.send(x, to))

    def receive(self, x: torch.Tensor, sender: int) -> None:
        """Overwrite x, a contiguous tensor, with what `sender` sends."""
        self._named("activations", lambda: dist.recv(x, sender))

    def spread(self, x: torch.Tensor, owner: int) -> None:
        """Overwrite x, a contiguous tensor, on all ranks with that of `owner`."""
        self._named("results", lambda: dist.broadcast(x, owner))

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        found: list[Any] = [None] * self.size
        self._named("values", lambda: dist.all_gather_object(found, value))
        return found

    def agree(self, wanted: bool) -> bool:
        """Return whether any rank wants it: to stop, for example."""
        flag = torch.tensor([wanted], dtype=torch.int32)
        self._named("a decision", lambda: dist.all_reduce(flag, dist.ReduceOp.MAX))
        return bool(flag[0])

    def await_first(self) -> None:
        """Return when rank 0 has come here, however long that takes: somebody may be typing.
        DeviceError if it has ended instead.
        """
        self._pauses += 1
        key = f"pause/{self._pauses}"
        if self.rank == 0:
            self._store.set(key, "")
            return
        while True:
            try:
                self._store.wait([key], _LONG)
                return
            except dist.DistStoreError:  # `_LONG` is over
                continue
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[:1]
                raise DeviceError(
                    f"rank {self.rank} of {self.size} has lost rank 0: {' '.join(reason)[:200]}"
                ) from None

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self.agree(False)

    def close(self) -> None:
        """Leave the group."""
        self._waits.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._named("results", lambda: dist.all_gather(parts, x))
        return parts

    def _named(self, what: str, call: Callable[[], _Result]) -> _Result:
        """Call a collective. DeviceError that names the ranks that did not come to it."""
        self._waits.begin()
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise DeviceError(self._explained(what, self._waits.seconds, str(error))) from None
        finally:
            self._waits.end()

    def _explained(self, what: str, seconds: float, error: str) -> str:
        """Say for whom this rank has waited, or whom it has lost: those that do not say that they
        wait as well.
        """
        lost = seconds < self.timeout - min(1.0, self.timeout / 10)  # a connection has ended
        missing = self._waits.missing(lost=lost)
        named = named_ranks(missing) if missing else "other ranks"
        last = error.strip().splitlines()[-1] if error.strip() else "no reason given"
        why, rank = shorten(last, 200, placeholder=" ..."), f"rank {self.rank} of {self.size}"
        if lost:
            return f"{rank} did not get {what} of {named}: {why}"
        return (
            f"{rank} has waited {seconds:.0f} s for {what} of {named}, at most"
            f" {self.timeout:.0f} s (--timeout): {why}"
        )


_CPU = torch.device("cpu")


@contextmanager
def _ended_after(seconds: float, what: str) -> Iterator[None]:
    """End this process if the context is open for longer: torch waits without end for a store that
    accepts a connection and does not answer.
    """

    def end() -> None:
        # Other ranks than the first print nothing to sys.stderr.
        line = f"error: {what} within {seconds:.0f} s (--timeout)"
        print(line, file=sys.__stderr__, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds + _MARGIN, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _joined(ranks: Ranks, device: torch.device, timeout: float) -> Any:
    """Join the other ranks, and return the store that all of them reach."""
    on_gpu = device.type == "cuda"
    if ranks.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Sums in the memory of NVLink switches: without, sums repeat, and they may not be used on hosts
    # that are shared.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    limit = datetime.timedelta(seconds=timeout)
    if dist.is_initialized():
        raise UsageError("this process has joined a group of ranks already")
    options: dict[str, Any] = {"timeout": limit, "rank": ranks.rank, "world_size": ranks.size}
    try:
        if ranks.store_socket is not None and ranks.rank == 0:
            listening = socket.socket(fileno=os.dup(ranks.store_socket))
            port = listening.getsockname()[1]
            options["store"] = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  it is public
                "127.0.0.1",
                port,
                ranks.size,
                True,
                limit,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        elif ranks.launched:
            options["store"] = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  it is public
                "127.0.0.1", ranks.port, ranks.size, False, limit, wait_for_workers=False
            )
        else:
            options["store"] = shared_store(ranks, timeout)
            await_all(options["store"], ranks, timeout)
        if on_gpu:
            options["device_id"] = device
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"rank {ranks.rank} of {ranks.size} cannot reach the others: {reason}"
        ) from None
    return _get_default_store()
