"""Ranks of a split plan as threads of one process: what `Group` does between processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.model import Model
from iqforge.runtime.parallel.share import Share
from iqforge.runtime.weights.split_plan import SplitPlan

Result = TypeVar("Result")


class ThreadMeeting:
    """The meeting of rank `rank`; `parts`, `barrier` and `boxes` belong to all ranks."""

    def __init__(
        self,
        rank: int,
        parts: list[Any],
        barrier: threading.Barrier,
        boxes: dict[tuple[int, int], queue.Queue],
    ):
        self.rank, self.parts, self.barrier, self.boxes = rank, parts, barrier, boxes
        self.calls = 0

    def send(self, x: torch.Tensor, to: int) -> None:
        assert x.is_contiguous()
        self.boxes[self.rank, to].put(x.clone())

    def receive(self, x: torch.Tensor, sender: int) -> None:
        assert x.is_contiguous()
        sent = self.boxes[sender, self.rank].get(timeout=300)
        assert sent.shape == x.shape
        x.copy_(sent)

    def spread(self, x: torch.Tensor, owner: int) -> None:
        sent = self._all(x)[owner]
        assert sent.shape == x.shape
        if self.rank != owner:
            x.copy_(sent)
        self.barrier.wait(timeout=300)

    def _all(self, x: Any) -> list[Any]:
        self.calls += 1
        self.parts[self.rank] = x
        self.barrier.wait(timeout=300)
        found = list(self.parts)
        self.barrier.wait(timeout=300)
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self._all(x)
        assert all(x.shape == other.shape for other in others)
        for part in others:
            total = total + part
        return total

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._all(tokens)[0].clone()

    def await_first(self) -> None:
        self.barrier.wait(timeout=300)

    def from_first(self, value: Any) -> Any:
        return self._all(value)[0]

    @property
    def size(self) -> int:
        return self.barrier.parties

    def exchange(self, value: Any) -> list[Any]:
        return list(self._all(value))

    def gather(self, x: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        parts = self._all(x)
        starts = [0, *ends]
        assert [p.shape[1] for p in parts] == [b - a for a, b in zip(starts, ends, strict=False)]
        return torch.cat(parts, dim=1)


def on_ranks(n_ranks: int, work: Callable[[int, ThreadMeeting], Result]) -> list[Result]:
    """Return what `work(rank, meeting)` returns on each rank. If one fails, all end."""
    parts, barrier = [torch.empty(0)] * n_ranks, threading.Barrier(n_ranks)
    ranks = range(n_ranks)
    boxes = {(a, b): queue.Queue() for a in ranks for b in ranks}

    def run(rank: int) -> Result:
        try:
            return work(rank, ThreadMeeting(rank, parts, barrier, boxes))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(n_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(n_ranks)]
    errors = [e for f in futures if (e := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def logits_on_ranks(path, tokens, plan: SplitPlan, **options) -> list[torch.Tensor]:
    """Return the logits of `tokens` on every rank of a plan."""

    def work(rank: int, meeting: ThreadMeeting) -> torch.Tensor:
        with Model(open_gguf(path), share=Share(plan, rank, meeting), **options) as model:
            return model.forward(tokens)

    return on_ranks(plan.n_ranks, work)
