"""The bandwidth that shares in tables are of: what a large copy within a GPU's memory reaches.

    python benchmarks/copy_rate.py

prints what is measured, and what tables of this device are compared with.
"""

from __future__ import annotations

import argparse
import functools

import torch

# Bytes per second, read and written, by name of the device: tables of all runs have the same limit.
KNOWN = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 3.0e12}
SIZE, COPIES = 1 << 30, 20  # bytes


def main() -> None:
    """Print both rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    device = parser.parse_args().device
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    name, found = torch.cuda.get_device_name(device), measured(device)
    print(f"{name}: {found / 1e12:.2f} TB/s measured, {copy_rate(device) / 1e12:.2f} in tables")


@functools.cache
def copy_rate(device: int = 0) -> float:
    """Return bytes per second, read and written: of a device that is not KNOWN, measured now."""
    name = torch.cuda.get_device_name(device)
    return KNOWN[name] if name in KNOWN else measured(device)


def measured(number: int) -> float:
    """Return the bytes per second, read and written, of a copy of 1 GiB."""
    device = torch.device("cuda", number)
    here, there = (torch.empty(SIZE, dtype=torch.uint8, device=device) for _ in range(2))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        there.copy_(here)
        begin.record()
        for _ in range(COPIES):
            there.copy_(here)
        end.record()
        end.synchronize()
    return 2 * SIZE * COPIES / (1e-3 * begin.elapsed_time(end))


if __name__ == "__main__":
    main()
