"""Measure the speed of `decode_torch` on one device, and check its bits against the stored digests,
as a Markdown table.

    python benchmarks/torch_decode.py cuda [ROWS]

Figures are millions of elements a second with bytes and results in the device's memory, best of
five, on ROWS rows of 4096 elements. The environment sets the number of torch's threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from iqforge.formats.codecs.codec import decodable_types
from iqforge.formats.codecs.torch_decode import decode_torch
from iqforge.formats.types import ggml_type


def measure(device: str, rows: int) -> None:
    """Check and time the decoding of every type on a device."""
    stored = json.loads((Path(__file__).parents[1] / "tests/decode_digests.json").read_text())
    name_of = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} thread(s)"
    )
    print(
        f"torch {torch.__version__}, {name_of}, {rows} rows of 4096\n\n| type | M elements/s | bits"
        " |\n| --- | --- | --- |"
    )
    for name in decodable_types():
        type = ggml_type(name)
        data = np.random.default_rng(11).integers(0, 256, (32, type.row_bytes(512)), dtype=np.uint8)
        y = decode_torch(name, torch.from_numpy(data).to(device), 512).cpu().numpy()
        same = (
            hashlib.sha256(np.where(np.isnan(y), np.float32(0), y).tobytes()).hexdigest()
            == stored[name]
        )
        data, best = (
            torch.randint(0, 256, (rows, type.row_bytes(4096)), dtype=torch.uint8, device=device),
            float("inf"),
        )
        for _ in range(5):
            started = time.perf_counter()
            decode_torch(name, data, 4096)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        print(
            f"| {name} | {rows * 4096 / best / 1e6:.0f} | {'equal' if same else 'DIFFERENT'} |",
            flush=True,
        )


def main() -> None:
    """Measure on the device that was given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", help="cpu, cuda or cuda:N")
    parser.add_argument("rows", nargs="?", type=int, default=8192)
    args = parser.parse_args()
    measure(args.device, args.rows)


if __name__ == "__main__":
    main()
