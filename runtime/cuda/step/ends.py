"""What begins a decoding step and what ends it: embedding and output, on the device and on the
reference path.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ....cuda_kernels.matvec.plan import NORM_MATVEC
from ....cuda_kernels.packed.decode import decode_rows
from ....cuda_kernels.step import between as step_between
from ...network.network import Network
from ..common.context import Context
from ..common.executor import operation
from .frame import Frame
from .layers import StepInput, on_device


class StepBegin(Protocol):
    """What launches the embedding at the beginning of a step."""

    captured: bool

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        """Write the embedding of the step's tokens to h float32[n, width]."""
        ...


class StepEnd(Protocol):
    """What launches the output of some rows at the end of a step."""

    captured: bool

    def __call__(self, frame: Frame, rows: slice) -> None:
        """Write the logits of these rows of the residual stream to the first rows of
        `frame.logits`, float32[n, vocabulary].
        """
        ...


class DeviceEmbedding:
    """Rows of the embedding for token ids in device memory. It is the first launch of a step and
    must not be a dependent launch: the draw at the end of the step before writes the token and the
    position, which later launches of this step read before they wait.
    """

    captured = True

    def __init__(self, network: Network, context: Context):
        self.matrix, self.scale = on_device(network.embedding, context), network.embedding_scale

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        """See `StepBegin`."""
        decode_rows(self.matrix, frame.sequence.tokens[: frame.n], torch.float32, out=h)
        if self.scale != 1:
            step_between.scale(h, self.scale)


class StepOutput:
    """The final norm, the output matrix, and the cap of logits."""

    captured = True

    def __init__(self, network: Network, context: Context):
        self.input, self.softcap = StepInput(network.output_norm, context), network.softcap
        self.matrix = on_device(network.output, context, NORM_MATVEC)
        self.ends = () if context.share is None else context.share.ends

    def __call__(self, frame: Frame, rows: slice) -> None:
        """See `StepEnd`; ranks gather the columns of all."""
        logits = frame.logits[: rows.stop - rows.start]
        if frame.links is None or not self.ends:
            self.input(frame, [self.matrix], [logits], rows)
        else:
            own = frame.buffer("own logits", self.matrix.rows)[: len(logits)]
            self.input(frame, [self.matrix], [own], rows)
            operation(frame.links.gather, own, logits, self.ends)
        if self.softcap:
            step_between.cap(logits, self.softcap)


class SlowEmbedding:
    """The embedding on the reference path, where kernels cannot read its matrix."""

    captured = False

    def __init__(self, network: Network, context: Context):
        self.network = network

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        """See `StepBegin`."""
        h.copy_(self.network.embed(frame.sequence.tokens[: frame.n].long()))


class SlowLayerInputs:
    """They are computed for the batch of the step, which is not captured."""

    captured = False

    def __init__(self, inputs: object, context: Context):
        pass

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        """Nothing: `Network.prepared` does it."""


class SlowOutput:
    """The final norm and the output matrix on the reference path, on their device."""

    captured = False

    def __init__(self, network: Network, context: Context):
        self.network = network

    def __call__(self, frame: Frame, rows: slice) -> None:
        """See `StepEnd`."""
        network, h = self.network, frame.settled()[rows]
        frame.logits[: len(h)].copy_(
            network.logits(network.output_norm(h.to(network.output_device)))
        )
