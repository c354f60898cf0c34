"""Choose the GPUs of a call, for the other modules here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..formats.source import TensorInfo
    from ..formats.types import GGMLType
    from ..quantize.plan.plan import PlannedTensor

# Elements times types. On 16 cores that takes 4 s (all rows) to a minute (samples), on an H200 one
# to four seconds once searches are compiled, which takes 2 to 4 s for each type.
WORTH_DEVICES = 1 << 29

log = logging.getLogger(__name__)


def devices_of_plan(device: str, planned: Sequence[PlannedTensor]) -> tuple[int, ...]:
    """Return the GPUs that `device` names, see `quantize.cuda.devices.find_devices`, or none if no
    tensor of the plan needs a search. A device that is named must exist all the same.
    """
    from ..quantize.cuda.devices import find_devices
    from ..quantize.run.piece import runs_on_device

    needed = any(map(runs_on_device, planned))
    if device == "auto" and not needed:
        return ()
    devices = find_devices(device)
    if devices and not needed:
        log.info("no tensor is quantized: the GPU is not used")
        return ()
    if device == "auto":
        note_choice(devices, [planned])
    return devices


def devices_to_measure(
    work: Iterable[tuple[Sequence[TensorInfo], Sequence[GGMLType]]], sampled: int
) -> tuple[int, ...]:
    """Return the GPUs that `auto` means for measuring types on about `sampled` rows of each tensor
    (0: all rows): none where that is less work than compiling the searches.
    """
    from ..quantize.cuda.devices import find_devices
    from ..quantize.report.stats import measured_elements

    n_elements = sum(measured_elements(tensors, types, sampled) for tensors, types in work)
    return find_devices("auto") if n_elements >= WORTH_DEVICES else ()


def note_choice(devices: Sequence[int], plans: Iterable[Sequence[PlannedTensor]]) -> None:
    """Log what `auto` means for these plans."""
    from ..quantize.search.trellis.tree import CODEBOOKS as TRELLIS_TYPES

    made = {plan.target.type.name for planned in plans for plan in planned if not plan.kept}
    trellis = sorted(made & TRELLIS_TYPES.keys())
    if devices and trellis:
        log.info(
            "the GPU search for %s gives other bytes than the CPU's; --device cpu gives those",
            ", ".join(trellis),
        )
    if not devices:
        log.info("quantizing on the CPU")
