"""The precisions that a model can be evaluated in."""

from __future__ import annotations

import torch

from ..errors import UsageError, printable

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def usable_precision(precision: str | None, device: torch.device) -> str:
    """Return the precision of a model on `device`, None being the default there. Raise UsageError
    for an unknown one, and for one that the device has no kernels for.
    """
    if device.type == "cuda":
        # No TF32 at any precision: observers see float32 products.
        torch.set_float32_matmul_precision("highest")
    if precision is None:
        return "f32" if device.type == "cpu" else "bf16"
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision '{printable(precision, 40)}' is not known; known are"
            f" {', '.join(PRECISIONS)}"
        )
    if device.type == "cpu" and precision != "f32":
        raise UsageError(
            f"precision {precision} is for GPUs: on the CPU everything is computed in float32"
        )
    return precision
