"""Inputs of layers in a prompt, and what a layer does with its own."""

from __future__ import annotations

import torch

from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.batch import Batch
from ...layers.layer_input import LayerInput, LayerInputs
from ..common.context import Context
from ..common.expert_terms import gating_of
from ..common.registry import PROMPT, Placed, PlacedBranch, executor
from .common.graphs import Stage, Staged
from .common.stream import Stream
from .common.weights import Product


class PromptLayerInputs:
    """The inputs of all layers, from token ids and their embeddings."""

    def __init__(self, inputs: LayerInputs, context: Context):
        if inputs.norm.weight.device != context.device:
            raise Placed(f"the norm of inputs of layers is not on {context.device}")
        self.inputs, self.context = inputs, context
        self.projection = Product("layer inputs", [inputs.projection], context, exact=True)

    def __call__(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, layers, length] for int64[rows] and float32[rows, width]."""
        x = self.context.buffer("normed", tuple(h.shape), self.context.dtype)
        x.copy_(h)
        return self.inputs.joined(tokens, self.projection(x).float())


@executor(PROMPT, LayerInput)
class PromptLayerInput(Staged):
    """h += norm(projection(activation(gate h) * inputs of the layer))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        m: LayerInput = branch.module
        self.branch, self.context = branch, context
        self.gate = Product("layer input", [m.gate], context)
        self.projection = Product("delta", [m.projection], context)
        self.gating = gating_of(m.spec)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(True, self._run)]  # inputs are where they were, see `PromptPath`

    def _run(self, stream: Stream, batch: Batch) -> None:
        if batch.inputs is None:
            raise TypeError("the batch has no inputs for layers")
        h, context = stream.settled(), self.context
        x = context.buffer("normed", tuple(h.shape), context.dtype)
        x.copy_(h)
        gate = self.gate(x)
        inputs = context.buffer("input of a layer", tuple(gate.shape), gate.dtype)
        inputs.copy_(batch.inputs[:, self.branch.layer])
        gated = context.buffer("gated", tuple(gate.shape), gate.dtype)
        prompt_rows.join_gate(gate, inputs, gated, self.gating)
        stream.add(self.projection(gated), post_norm=self.branch.post_norm)
