"""The paths that evaluate a model: the reference path, kernels of a GPU, programs of the CPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .opened import OpenModel
from .precision import activations
from .reference_path import ReferencePath
from .state.sequence import State

if TYPE_CHECKING:
    from .cpu.path import StepPath
    from .cuda.engine import Engine


class EvaluationPaths(OpenModel):
    """An open model with the paths that evaluate it, each made at its first use. The reference path
    can do everything; the others are faster, with devices, precisions and observers that suit them.
    """

    @cached_property
    def _reference(self) -> ReferencePath:
        """The reference path, which sees all products."""
        compiled = self.precision == "int8" and self.device.type == "cpu"
        return ReferencePath(self.network, self.weights.taps, self.source.path, compiled)

    @cached_property
    def engine(self) -> Engine | None:
        """The fast path of precisions below f32."""
        if not self.is_fast:
            return None
        from .cuda.common.context import Context
        from .cuda.engine import Engine

        self.load()
        return Engine(
            self.network,
            Context(
                self.device,
                activations(self.precision),
                settings=self.cache,
                ubatch=self.ubatch,
                ser=self.weights.switches.ser,
                rounds=self.precision == "int8",
                verbose=self.verbose,
                share=self.weights.share,
                taps=self.weights.taps,
                replaced=self.weights.store.replaced,
            ),
        )

    def _close_engine(self) -> None:
        if (engine := self.__dict__.pop("engine", None)) is not None:
            engine.close()

    @property
    def _fast(self) -> Engine | None:
        """The engine, unless an observer sees products of the reference path alone."""
        return None if self.weights.taps.need_reference_path else self.engine

    @property
    def _fast_sequences(self) -> Engine | None:
        """The engine for sequences that are kept, unless tensors are replaced: steps read those of
        the file.
        """
        return None if self.weights.store.replaced else self._fast

    @property
    def tokens_together(self) -> int:
        """The tokens of a prompt that are best appended at a time: `ubatch`, or more where pieces
        share copies of experts that are on the CPU.
        """
        fast = self._fast_sequences
        return self.ubatch if fast is None else fast.tokens_together

    @cached_property
    def _steps(self) -> StepPath | None:
        """Programs of steps on the CPU."""
        if self.device.type != "cpu":
            return None
        if self.group is not None:
            if self.verbose is not None and self.group.rank == 0:
                self.verbose("steps run layer by layer, in float32: there are several ranks")
            return None
        from .cpu.path import StepPath

        return StepPath(self.network, self.weights.store, self.verbose)

    def _step(self, token: int, state: State, copied: bool = True) -> torch.Tensor | None:
        """Append a token by a program, if no observer reads inputs of products: logits
        float32[vocab], which the next step overwrites unless they are copied. None if the reference
        path has to do it.
        """
        taps = self.weights.taps
        if self._steps is None or taps.readers:
            return None
        if (logits := self._steps.step(token, state, copied)) is not None:
            for observe in taps.observers:  # they count passes
                for name in self._steps.watched:
                    observe(name, logits, None)
        return logits

    def widen_range(self) -> None:
        """Evaluate in bfloat16 from now on, which holds numbers that are too large for float16.
        Sequences that exist already cannot be continued.
        """
        if self.precision == "f16":
            self.precision = "bf16"
            self._close_engine()

    def close(self) -> None:
        """Close the file and free the memory of GPUs: weights, and the graphs of sequences, even of
        those that still exist.
        """
        self._close_engine()
        super().close()
