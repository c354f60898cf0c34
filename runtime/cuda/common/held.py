"""Where parameters are: packed matrices on the device of executors, and experts on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cuda_kernels.packed.matrix import PackedMatrix
from ...layers.moe import MoE
from ...weights.linear import Embedding, Linear
from ...weights.stacked_linear import ManyMatrices
from .context import Context
from .registry import Placed, Slow


def held(linear: Linear | Embedding | ManyMatrices, context: Context) -> PackedMatrix:
    """Return the packed matrix, that of all experts or heads together, with the scale of its
    tensor (`<name>.scale`). Scales of experts are terms of theirs.

    Placed if it is on another device; Slow if its type or rows cannot be packed, or if experts are
    in several tensors.
    """
    if linear.device != context.device:
        raise Placed(f"{linear.role} is not on {context.device}")
    many = isinstance(linear, ManyMatrices)
    matrices = linear.matrices if many else [linear.matrix]
    matrix = matrices[0].packed
    if matrix is None:
        raise Slow(f"{linear.role} has rows of {linear.cols} elements, which cannot be packed")
    if matrix.n_matrices != len(matrices):
        raise Slow(f"{linear.role} is in several tensors")
    if many or linear.scale is None:
        return matrix
    return replace(matrix, scale=float(linear.scale))


def held_decoded(linear: Linear, context: Context) -> torch.Tensor:
    """Return the decoded small matrix, float32[rows, cols], packed or not. Placed if it is on
    another device; Slow if it has a bias.
    """
    if linear.device != context.device:
        raise Placed(f"{linear.role} is not on {context.device}")
    if linear.bias is not None:
        raise Slow(f"{linear.role} has a bias")
    return linear.decoded()


def on_cpu(moe: MoE, context: Context) -> bool:
    """Return whether the experts are on the CPU, and the rest of the layer on a GPU. Placed if only
    some of their matrices are.
    """
    found = {linear.device.type == "cpu" != context.device.type for linear in moe.experts.linears}
    if len(found) > 1:
        raise Placed(f"some matrices of its experts are on the CPU, others on {context.device}")
    return found.pop()
