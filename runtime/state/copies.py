"""Copies of several tensors, in as few launches as are fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements that a block of torch's copy of several tensors takes, one after the other: of longer
# tensors few blocks would read a few thousand bytes at a time.
_BLOCK = 1 << 16


def copy_together(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `of` to the one of `to`: short ones in one launch, long ones in a launch
    each, which has enough blocks for all of the device's bandwidth.
    """
    if all(x.numel() <= _BLOCK for x in of):
        torch.ops.aten._foreach_copy_(to, of)
        return
    for mine, other in zip(to, of, strict=True):
        mine.copy_(other)
