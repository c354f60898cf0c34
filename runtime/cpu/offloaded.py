"""Experts that are on the CPU while the other layers are on a GPU, for few rows."""

from __future__ import annotations

import threading

import torch

from ..layers.moe import MoE
from ..network.experts import experts_of
from ..network.network import Network
from ..simd.operations import operation
from ..simd.step import experts
from ..simd.threads import Program, run
from ..state.cache import CacheSettings
from ..weights.matrix import FEW_ROWS
from ..weights.store import TensorStore
from ..weights.taps import Taps
from .feed_forward import plan_experts
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


class OffloadedExperts:
    """The weighted sum of the experts of a layer, or of those that a rank has (`MoE.owned`), as a
    program without Python between its operations. rounds: see `Plan`.
    """

    def __init__(self, module: MoE, store: TensorStore, taps: Taps, *, rounds: bool):
        self._module, self.store, self._taps, self.rounds = module, store, taps, rounds
        self._lock = threading.Lock()
        self._key = 0, -1
        self._program: Program | None = None

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Return what `MoE.mix` does; None if there are more rows than `FEW_ROWS`, if somebody
        observes products, or if the experts cannot be planned.
        """
        if len(x) > FEW_ROWS or self._taps.observers:
            return None
        with self._lock:
            n_threads = torch.get_num_threads()
            if (program := self._planned(n_threads)) is None:
                return None
            n, used = x.shape[1], chosen.shape[1]
            if self._module.owned is not None:  # others are left out
                first, end = self._module.owned
                is_here = (chosen >= first) & (chosen < end)
                chosen, weights = torch.where(is_here, chosen - first, -1), weights * is_here
            # One copy to the CPU, for which the device is waited for once. Numbers are exact.
            together = torch.cat([x.float(), weights.float(), chosen.float()], 1).cpu()
            y = torch.empty(len(x), n)
            for row, out in zip(together, y, strict=True):
                self._x.copy_(row[:n])
                self._weights.copy_(row[n : n + used])
                self._chosen.copy_(row[n + used :])
                run(program, n_threads)
                out.copy_(self._y)
        return y.to(x.device)

    def _planned(self, n_threads: int) -> Program | None:
        """Return the program for so many threads or more; None if there can be none."""
        key = n_threads, self.store.n_changes
        if key[0] > self._key[0] or key[1] != self._key[1]:
            self._key = key
            try:
                self._program = self._plan(n_threads)
            except NotPlanned:
                self._program = None
        return self._program

    def add(self, plan: Plan, x: Buffer, chosen: Buffer, weights: Buffer, y: Buffer) -> None:
        """Add y = the weighted sum of the chosen experts, int64 at `chosen`, for one x. NotPlanned
        if there are no operations for it.
        """
        module, width = self._module, self._module.experts.down.rows
        if width % LANES:
            raise NotPlanned(f"experts that give {width} elements")
        slots = plan_experts(plan, module, x, chosen)
        plan.add(
            operation(experts.combine),
            *(slots.address, 4 * width, module.spec.n_used, *weights, 0, 0, width, y.address),
        )

    def _plan(self, n_threads: int) -> Program:
        used, width = self._module.spec.n_used, self._module.experts.down.rows
        plan = Plan(n_threads, CacheSettings(), 0, rounds=self.rounds)
        memory = plan.memory
        x, weights, y = (
            memory.floats(name, n) for name, n in (("x", width), ("weights", used), ("y", width))
        )
        self._chosen = torch.zeros(used, dtype=torch.int64)
        self.add(plan, x, Buffer(self._chosen.data_ptr()), weights, y)
        self._x, self._weights, self._y = (
            torch.from_numpy(memory.view(buffer, n))
            for buffer, n in ((x, width), (weights, used), (y, width))
        )
        self._held = plan  # it owns the memory that operations use
        return plan.program()


def offload_experts(network: Network, store: TensorStore, taps: Taps, *, rounds: bool) -> None:
    """Let layers whose experts are on the CPU, and whose other weights are on a GPU, use
    `OffloadedExperts`.
    """
    for block in network.blocks:
        for moe in experts_of(block):
            if moe.experts.down.device.type == "cpu" != block.device.type:
                moe.few_rows = OffloadedExperts(moe, store, taps, rounds=rounds)
