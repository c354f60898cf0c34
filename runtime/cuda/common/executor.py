"""What executors share: ranges that name what they launch while a model is profiled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ....cuda_kernels.matvec.operands import RowRange
from ....cuda_kernels.packed.matrix import PackedMatrix
from ...weights.ranges import RangeName, opened, recording
from .registry import PlacedBranch


class Executor:
    """The base of executors. What one launches is within a range of its layer and the class of its
    module while a model is profiled.
    """

    branch: PlacedBranch

    @property
    def range(self) -> RangeName:
        """Return the name of its range in a profile."""
        return RangeName(f"blk.{self.branch.layer}", type(self.branch.module).__name__)


def operation(function: Callable[..., None], *args: Any, **options: Any) -> None:
    """Call a function of `matvec`; while a model is profiled, within a range of its name and of the
    bytes of the packed matrices that it reads. Of experts these are as many as there are ids, if
    all ids differ.
    """
    if not recording:
        function(*args, **options)
        return
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    matrices = [arg for arg in chain(*lists) if isinstance(arg, (PackedMatrix, RowRange))]
    ids = next((x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.int32), None)
    n_bytes = sum(
        m.nbytes
        * (
            min(1.0, ids.numel() / m.n_matrices)
            if ids is not None and isinstance(m, PackedMatrix) and m.n_matrices > 1
            else 1.0
        )
        for m in matrices
    )
    with opened("", function.__name__, n_bytes):
        function(*args, **options)
