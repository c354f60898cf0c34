"""Show every token to every expert, so that a collector sees more tokens per expert than are routed
to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..formats.tensor_names import TensorName
from ..runtime.layers.moe import MoE
from ..runtime.model import Model
from ..runtime.network.experts import moe_layers

Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


class AllExperts:
    """An observer in front of `collector`. When a router has seen the rows of a pass, it shows the
    collector all rows with each expert of the layer in turn, and afterwards leaves out the rows
    that are routed, as they are counted already.

    The results of the model do not change by a bit. A pass takes about (experts / experts used)
    times as long in these layers.
    """

    def __init__(self, model: Model, collector: Observer):
        self._collector, self._layers, self._showing = (
            collector,
            {moe.router.linear.name: moe for moe in moe_layers(model.network)},
            False,
        )

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if self._showing or not TensorName.parse(name).is_stacked:
            self._collector(name, x, experts)
        if name in self._layers and not self._showing:
            self._showing = True
            try:
                self._show(self._layers[name], x)
            finally:
                self._showing = False

    def _show(self, moe: MoE, x: torch.Tensor) -> None:
        x = x.to(moe.experts.down.device)
        for expert in range(moe.spec.n_experts):
            counts = torch.zeros(moe.spec.n_experts, dtype=torch.int64)
            counts[expert] = len(x)
            # the same rows as for the expert before
            self._collector.forget_inputs()
            inner = moe.experts.inner(x, counts)  # gate and up are observed as they are used
            for name in moe.experts.down.observed:
                self._collector(name, inner, torch.full((len(x),), expert, device=x.device))
        self._collector.forget_inputs()


def router_rows(model: Model) -> dict[str, np.ndarray]:
    """Return float32[n_experts, width] of every layer with experts, by the name of the router's
    tensor.
    """
    routers = [moe.router.linear for moe in moe_layers(model.network)]
    return {
        router.name: torch.cat([rows for _, rows in router.matrix.parts()]).numpy(force=True)
        for router in routers
    }
