"""The executor of experts that are on the CPU while the rest of a decoding step is on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import torch

from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.step.offload import Exchange
from ....cuda_kernels.step.router import fits as router_fits
from ...cpu.offloaded import OffloadedExperts
from ...cpu.offloaded_steps import ENDLESS, MOST_SECONDS, OffloadedSteps
from ...layers.moe import MoE
from ..common.context import Context
from ..common.executor import operation
from ..common.expert_terms import routing_of
from ..common.held import on_cpu
from ..common.registry import STEP, PlacedBranch, Slow, executor
from .frame import STEP_ROWS, Frame
from .moe import Begun, SharedExpert, StepExperts, StepMoE, float_matrix


@executor(STEP, MoE)
def step_moe(branch: PlacedBranch, context: Context) -> StepExperts:
    """Return the executor of experts, wherever they are."""
    return (StepOffloadedMoE if on_cpu(branch.module, context) else StepMoE)(branch, context)


class StepOffloadedMoE(StepExperts):
    """The choice of experts in one launch, the request to the CPU in one, and its answer in one,
    which waits on the device. A shared expert is on the device, and runs meanwhile.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        moe: MoE = branch.module
        if moe.latent is not None:
            raise Slow("experts on the CPU that read shorter vectors")
        if not isinstance(moe.few_rows, OffloadedExperts):
            raise Slow("experts on the CPU without a program for few rows")
        self.experts, spec, width = moe.few_rows, moe.spec, self.norm.numel()
        if spec.on_input:
            raise Slow("experts on the CPU whose weights multiply what they read")
        self.routing = replace(routing_of(moe.router), owned=moe.owned)
        fits = router_fits(STEP_ROWS, width, spec.n_experts, spec.n_used, self.routing)
        if not fits or width % 4:
            raise Slow(f"{spec.n_used} of {spec.n_experts} experts, width {width}")
        self.spec, self.reduction = spec, moe.router.reduction
        self.router = float_matrix(moe.router.linear, context)
        self.router_biases = moe.router.linear.bias, moe.router.bias
        self.shared = None if moe.shared is None else SharedExpert(self, moe, (), context)

    def exchange(self, frame: Frame) -> Exchange:
        """Return what all layers of one size share with the CPU."""
        width, used = self.norm.numel(), self.spec.n_used
        return frame.once(
            ("exchange", width, used), lambda: Exchange(STEP_ROWS, width, used, frame.device)
        )

    def begin(self, frame: Frame, h: torch.Tensor) -> Begun:
        spec, exchange = self.spec, self.exchange(frame)
        ids = frame.buffer("experts", spec.n_used, torch.int32)
        weights = frame.buffer("expert weights", spec.n_used)
        route = frame.router(h.shape[1], spec.n_experts, spec.n_used, self.reduction, self.routing)
        router_norm = self.router_norm, self.router_eps
        route(h, *router_norm, self.router, ids, weights, *self.router_biases, None)
        exchange.hand_over(h, self.norm, self.eps, ids, weights)
        x = None if self.shared is None else self.shared.inner(frame, h)
        return Begun(ids, weights, x=x)

    def add(self, frame: Frame, h: torch.Tensor, begun: Begun) -> None:
        exchange, norm = self.exchange(frame), self.branch.post_norm
        to = frame.onto(h) if norm is None else frame.zeros("sum of experts", h.shape[1])
        if self.shared is not None:
            operation(matvec.matvec_add, begun.x, self.shared.down, to)
        exchange.take_back(to)
        if norm is not None:
            self.end(frame, to, h, norm)


def answers_of(layers: Sequence[StepOffloadedMoE], frame: Frame) -> OffloadedSteps:
    """Return what answers for these layers. NotPlanned if the CPU has no operations for one. The
    GPU of a rank asks only when the others have come as far, which may take as long as they wait.
    """
    group = frame.context.group
    return OffloadedSteps(
        [(layer.experts, layer.exchange(frame)) for layer in layers],
        MOST_SECONDS if group is None else group.timeout,
    )


@contextmanager
def answered(answers: OffloadedSteps, n: int) -> Iterator[None]:
    """While the context is open, answer for the experts of a step of n rows in another thread: what
    is launched may wait for the device, as loading a kernel does.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answers.run, n, torch.get_num_threads(), ENDLESS)
        try:
            yield
        except BaseException:
            answers.release()
            raise
        finally:
            wait([running])
    running.result()
