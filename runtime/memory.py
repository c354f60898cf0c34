"""The memory that a model takes on each device, before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..cuda_kernels.packed.matrix import packable
from ..errors import DeviceError
from ..formats.tensor_names import TensorName
from ..formats.types import GGMLType
from .cuda import planned
from .cuda.common.registry import Slow, check_description
from .cuda.prompt.common import rounded
from .layers.attention import Attention
from .layers.block import Branch
from .layers.layer_input import LayerInputs
from .layers.mla import MLA
from .network.network import Network
from .state.cache import CacheSettings
from .weights.host_memory import available_memory
from .weights.resident import PART_BYTES
from .weights.stacked_linear import ManyMatrices
from .weights.weights import Weights

_LIBRARIES = 64 << 20  # workspaces of matrix products and small buffers


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device. `free`: what is free there now, None if that is not known."""

    device: torch.device
    weights: int
    cache: int
    compute: int
    free: int | None

    @property
    def total(self) -> int:
        """Bytes of weights, cache and intermediate results."""
        return self.weights + self.cache + self.compute


def estimate(
    network: Network,
    weights: Weights,
    *,
    capacity: int = 0,
    settings: CacheSettings = CacheSettings(),
    rows: int = 512,
    window: int = 0,
    precision: str = "f32",
) -> list[DeviceMemory]:
    """Estimate the memory for a sequence of `capacity` tokens, of which `rows` are evaluated at a
    time: one entry per device, GPUs first.

    window: the tokens of each independent sequence that is evaluated instead. Weights on the CPU
    are counted, although they stay in the file, which the system caches in free memory.
    """
    sizes: dict[torch.device, list[int]] = {}

    def entry(device: torch.device) -> list[int]:
        return sizes.setdefault(device, [0, 0, 0])

    for device, n_bytes in weights.bytes_by_device().items():
        entry(device)[0] += n_bytes
    if capacity:
        for device in {network.blocks[layer].device for layer in network.layers}:
            entry(device)[1] += network.state_bytes(capacity, settings, rows, device)
    for device in list(sizes):
        entry(device)[2] = _compute_bytes(
            network, weights, device, rows, capacity, window, settings, precision
        )
    entry(network.output_device)[2] += (window or 1) * network.n_vocab * 4
    found = [
        DeviceMemory(device, weights_, cache, compute, free_bytes(device))
        for device, (weights_, cache, compute) in sizes.items()
    ]
    return sorted(found, key=lambda memory: (memory.device.type == "cpu", memory.device.index or 0))


def _compute_bytes(
    network: Network,
    weights: Weights,
    device: torch.device,
    rows: int,
    capacity: int,
    window: int,
    settings: CacheSettings,
    precision: str,
) -> int:
    """Activations of the widest product and its neighbours, scores of the attention on the
    reference path, the most weights that are decoded at a time, and what libraries keep. An upper
    estimate on the reference path; on the fast path what its executors ask for.
    """
    is_here = weights.placement.is_here
    here = [p for p in weights.parameters if p.device == device and is_here(p.name)]
    if not here:
        return 0
    keys = window or max(capacity, rows)
    inner = [p for p in here if p.role not in ("token_embd", "output")]
    own = (network.blocks[layer] for layer in network.layers)
    blocks = [block for block in own if block.device == device]
    if precision != "f32" and device.type != "cpu":
        # Layers with matrices that no kernel reads are on the reference path, or a part of them.
        unread = [p for p in here if not packable(_type_of(p), p.cols)]
        layers = {TensorName.parse(p.name).layer for p in unread}
        slow = [
            network.blocks[layer]
            for layer in network.layers
            if network.blocks[layer].device == device
            and (layer in layers or not _is_fast(network.blocks[layer].branches[0]))
        ]
        all_logits = window and network.output.device == device
        others = [planned.output_sizes(network.output, window)] if all_logits else []
        inputs = network.inputs
        if isinstance(inputs, LayerInputs) and inputs.projection.device == device:
            others.append(planned.input_sizes(inputs, rows))
        n_ranks = 1 if weights.share is None else weights.share.plan.n_ranks
        scores = (block.mixer.score_bytes(rows, keys, "f32") for block in slow)
        return (
            planned.buffer_bytes(blocks, network.width, rows, keys, settings, device, others)
            + planned.kept_bytes(blocks, settings)
            + planned.stream_bytes(network.n_streams, network.width, rows)
            + planned.shared_bytes(n_ranks, network.width, rows)
            + planned.LIBRARIES
            + (
                rounded.buffer_bytes(rows, [(p.rows, p.cols) for p in inner])
                if precision == "int8"
                else 0
            )
            + max(scores, default=0)
            + _decoded_bytes(unread)
        )
    used = max((m.experts_used for block in blocks for m in block.row_layers), default=1)
    width = network.stream_width
    widest = max(
        (
            2 * (p.rows + p.cols) * (used if TensorName.parse(p.role).is_stacked else 1)
            for p in inner
        ),
        default=0,
    )
    activations = rows * (4 * widest + 16 * width * network.n_streams)
    activations += max(
        (m.score_bytes(rows, keys, precision) for block in blocks for m in block.mixers), default=0
    )
    return activations + _decoded_bytes(here) + _LIBRARIES * (device.type != "cpu")


def _type_of(p: Any) -> GGMLType:
    return (p.matrices[0] if isinstance(p, ManyMatrices) else p.matrix).type


def _decoded_bytes(parameters: Sequence[Any]) -> int:
    """Return the bytes of what the reference path decodes of them at a time."""
    return max((min(4 * p.rows * p.cols, PART_BYTES) for p in parameters), default=0)


def _is_fast(mixer: Branch) -> bool:
    """Return whether kernels evaluate the mixer of a block, as far as its description says."""
    m = mixer.modules[0]
    try:
        check_description(mixer)
    except Slow:
        return False
    return not isinstance(m, (Attention, MLA)) or m.switches.flash_attention


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on the device now, or None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def table(memories: Sequence[DeviceMemory]) -> list[str]:
    """Return a table with the MiB of each device."""
    lines = [
        f"{'device':10} {'weights':>11} {'cache':>11} {'compute':>11} {'sum':>11} {'free':>11}  MiB"
    ]
    for m in memories:
        cells = [f"{x / 2**20:11.1f}" for x in (m.weights, m.cache, m.compute, m.total)]
        cells.append(f"{'?':>11}" if m.free is None else f"{m.free / 2**20:11.1f}")
        lines.append(f"{m.device!s:10} {' '.join(cells)}")
    return lines


@contextmanager
def named_errors(device: torch.device, file: str | os.PathLike) -> Iterator[None]:
    """While the context is open, a GPU or a CPU that runs out of memory raises a DeviceError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise _out_of_memory(device, file) from None
        # torch has no class of its own for this.
        if isinstance(error, MemoryError) or "DefaultCPUAllocator: " in str(error):
            raise DeviceError(
                "the CPU ran out of memory: evaluate fewer tokens at a time (-ub, -b, -c)",
                file=file,
            ) from None
        raise


def _out_of_memory(device: torch.device, file: str | os.PathLike) -> DeviceError:
    free = free_bytes(device) or 0
    return DeviceError(
        f"{device} ran out of memory with {free / 2**20:.0f} MiB free: evaluate fewer tokens at"
        " a time (-ub, -b, -c), or keep more on the CPU with -ngl, --n-cpu-moe or --fit",
        file=file,
    )


def check(memories: Sequence[DeviceMemory], *, cpu: bool = False) -> None:
    """DeviceError with the numbers for a device on which the model does not fit: a GPU, with `cpu`
    also the CPU.
    """
    for m in memories:
        if m.free is not None and m.total > m.free and (cpu or m.device.type != "cpu"):
            advice = (
                "choose fewer tokens (-c, -p, -n, -b, -ub) or a smaller model"
                if m.device.type == "cpu"
                else "keep layers on the CPU with -ngl, experts with --n-cpu-moe, or let --fit"
                " choose"
            )
            raise DeviceError(
                f"{m.device} has {m.free / 2**20:.0f} MiB free, the model takes"
                f" {m.total / 2**20:.0f} MiB there (weights {m.weights / 2**20:.0f}, cache"
                f" {m.cache / 2**20:.0f}, compute {m.compute / 2**20:.0f}): {advice}"
            )


def check_cache(
    network: Network, capacity: int, settings: CacheSettings, ubatch: int, n_sequences: int = 1
) -> None:
    """DeviceError with the numbers if `n_sequences` of `capacity` tokens together do not fit the
    free memory of the CPU. GPUs report that when they allocate.
    """
    needed = network.state_bytes(capacity, settings, ubatch, torch.device("cpu"), n_sequences)
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise DeviceError(
            f"a context of {capacity} tokens takes {needed / 2**20:.0f} MiB, cpu has"
            f" {free / 2**20:.0f} MiB free: choose a smaller one (-c, -n, -p), or a smaller type of"
            " cache (-ctk, -ctv)"
        )
