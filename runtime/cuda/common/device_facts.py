"""What a CUDA device can do at best: the limits that speeds are compared with.

Memory bandwidth and dense bf16/f16 tensor rate with float32 accumulation. For data-center cards
they are those of the datasheet; for others they follow from the clocks and widths that the driver
reports and the operations per clock of the architecture (tuning guides and whitepapers of NVIDIA).
Nothing reaches them: a large copy gets about 90 % of the bandwidth, a large matrix product about 80
% of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# part of the name: (bytes/s, dense bf16 FLOP/s), datasheets of NVIDIA. The first that fits counts.
_DATASHEET = {
    "H200": (4.8e12, 989.4e12),
    "H100 PCIe": (2.04e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989.4e12),
    "GH200": (4.0e12, 989.4e12),
    "B200": (8.0e12, 2250e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100 80GB": (1.935e12, 312e12),
    "A100": (1.555e12, 312e12),
    "L40S": (864e9, 362e12),
    "L4": (300e9, 121e12),
}
# Dense bf16 FLOP per clock and multiprocessor, float32 accumulation; of consumer cards, whose rate
# is half that of their kin.
_FLOP_PER_CLOCK = {
    (8, 0): 2048,
    (8, 6): 512,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
}


@dataclass(frozen=True)
class DeviceFacts:
    """bandwidth in bytes/s and bf16_rate in FLOP/s, None where they are not known."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    bandwidth: float | None
    bf16_rate: float | None

    def describe(self) -> str:
        """One line for logs and pages."""
        major, minor = self.capability
        parts = [
            self.name,
            f"sm_{major}{minor}",
            f"{self.multiprocessors} SMs",
            f"{self.memory_bytes / 2**30:.0f} GiB",
        ]
        if self.bandwidth:
            parts.append(f"{self.bandwidth / 1e9:.0f} GB/s")
        if self.bf16_rate:
            parts.append(f"{self.bf16_rate / 1e12:.0f} TFLOP/s bf16")
        return ", ".join(parts)


def device_facts(device: torch.device | str | int = "cuda") -> DeviceFacts:
    """Facts of a CUDA device that torch can see."""
    p = torch.cuda.get_device_properties(device)
    return facts_of(p)


def facts_of(p) -> DeviceFacts:
    """Facts from torch's device properties. Older versions of torch do not state clocks: then only
    listed cards have limits.
    """
    capability = (p.major, p.minor)
    listed = next((limits for part, limits in _DATASHEET.items() if part in p.name), None)
    # Clocks in kHz, width in bits.
    memory_clock, width, clock = (
        getattr(p, field, 0) for field in ("memory_clock_rate", "memory_bus_width", "clock_rate")
    )
    bandwidth, rate = listed or (
        2 * memory_clock * 1e3 * width / 8 or None,
        clock * 1e3 * p.multi_processor_count * _FLOP_PER_CLOCK.get(capability, 0) or None,
    )
    return DeviceFacts(
        p.name,
        capability,
        p.multi_processor_count,
        p.total_memory,
        getattr(p, "L2_cache_size", 0),
        bandwidth,
        rate,
    )
