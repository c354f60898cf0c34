"""Copies of several tensors, in as few launches as are fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements that one block of torch's copy of several tensors takes. A tensor of a few times as many
# has only a few blocks, too few for the bandwidth of a device.
_BLOCK = 1 << 16


def copy_together(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `of` to the one of `to`: short ones in one launch, long ones in a launch
    each, which has more blocks.
    """
    if all(x.numel() <= _BLOCK for x in of):
        torch.ops.aten._foreach_copy_(to, of)
        return
    for mine, other in zip(to, of, strict=True):
        mine.copy_(other)
