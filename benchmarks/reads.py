"""Measure how fast a device reads weights as decode steps do: through rings of cp.async, a piece of
codes and a piece of scales in turn.

    python benchmarks/reads.py

Each warp copies its own rows, piece by piece, into its ring in shared memory; the scales of a piece
are in another plane. Nothing is multiplied. The runs differ in the L2 prefetch hint, the length of
the pieces and the size of the ring. The output is microseconds and TB/s of one launch in a graph of
several, over more bytes than the caches hold.
"""

# cuda.core is compiled and has no stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import argparse

import numpy as np
import torch
from cuda import core
from iqforge.cuda_kernels.compile.launch import architecture, launch
from matvec import microseconds

WARPS, ROW = 16, 4096
KERNEL = r"""
typedef unsigned int u32;
template <bool ASKS> __device__ void copy16(u32 to, const char* from) {
#define COPY(HINTED) \
  asm volatile("cp.async.cg.shared.global" HINTED " [%0], [%1], 16;" \
               :: "r"(to), "l"(from) : "memory")
  if (!ASKS || HINT == 0) COPY("");
  else if (HINT == 64) COPY(".L2::64B");
  else if (HINT == 128) COPY(".L2::128B");
  else COPY(".L2::256B");
#undef COPY
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) reads(
    const char* codes, const char* scales, long long rows, u32* out) {
  extern __shared__ __align__(128) char shared[];
  constexpr int SLOT = PIECE + (SCALES + 15) / 16 * 16, PIECES = ROW / PIECE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long stride = gridDim.x * WARPS, begin = blockIdx.x * WARPS + warp;
  const char* ring = shared + warp * SLOTS * SLOT;
  long long row = begin;
  int piece = 0, slot = 0;
  u32 sum = 0;
  auto fetch = [&](int s) {
    const u32 to = (u32)__cvta_generic_to_shared(ring + s * SLOT) + 16 * lane;
    if (row < rows) {
      #pragma unroll
      for (int i = 0; i < PIECE; i += 512)
        if (i + 16 * lane < PIECE)
          copy16<true>(to + i, codes + row * ROW + piece * PIECE + i + 16 * lane);
      if (16 * lane < SCALES)
        copy16<SCALES_TOO>(to + PIECE, scales + (row * PIECES + piece) * SCALES + 16 * lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (++piece == PIECES) piece = 0, row += stride;
  };
  for (int s = 0; s < SLOTS; s++) fetch(s);
  for (long long at = begin; at < rows; at += stride)
    for (int p = 0; p < PIECES; p++) {
      asm volatile("cp.async.wait_group %0;" :: "n"(SLOTS - 1) : "memory");
      __syncwarp();
      for (int i = 16 * lane; i < PIECE; i += 512) sum += *(const u32*)(ring + slot * SLOT + i);
      __syncwarp();
      fetch(slot);
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
  if (sum == 0x12345678) out[0] = sum;   // so that nothing is left out
}
"""


class Reads:
    """Kernels over the same 1.1 GB."""

    def __init__(self):
        self.codes, self.scales = (
            torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda")
            for n in (1 << 30, 1 << 28)
        )
        self.out = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.device = torch.cuda.current_device()
        self.blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.kernels = []  # kept alive, as `launch` identifies them by their handles
        core.Device(self.device).set_current()

    def __call__(self, megabytes: int, **macros: int) -> tuple[float, float]:
        """Return the microseconds of a launch that reads this many megabytes of codes, and TB/s,
        including scales.
        """
        slot = macros["PIECE"] + -(-macros["SCALES"] // 16) * 16
        macros |= {
            "WARPS": WARPS,
            "ROW": ROW,
            "SLOTS": max(2, macros.pop("RING") // (WARPS * slot)),
        }
        options = core.ProgramOptions(
            std="c++17",
            arch=architecture(self.device),
            define_macro=[f"{k}={v}" for k, v in macros.items()],
        )
        kernel, shared = (
            core.Program(KERNEL, "c++", options).compile("cubin").get_kernel("reads"),
            WARPS * macros["SLOTS"] * slot,
        )
        self.kernels.append(kernel)
        rows = megabytes * 10**6 // ROW

        def read(i: int) -> None:
            start = i * (131 << 20) % (len(self.codes) - rows * ROW) // ROW * ROW
            launch(
                kernel,
                self.blocks,
                32 * WARPS,
                self.codes[start:],
                self.scales,
                np.int64(rows),
                self.out,
                shared=shared,
            )

        read(0)
        time = microseconds(read, 8)
        return time, rows * ROW * (1 + macros["SCALES"] / macros["PIECE"]) / time * 1e-6


def main() -> None:
    """Time every variant of the loads, and print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    reads = Reads()
    print(
        f"{torch.cuda.get_device_name()}; megabytes of codes, then us and TB/s of codes and"
        " scales\n"
    )
    for megabytes in (558, 125):
        for label, changes in (
            ("L2::256B", {"HINT": 256}),
            ("L2::128B", {"HINT": 128}),
            ("L2::128B also for scales", {"HINT": 128, "SCALES_TOO": 1}),
            ("L2::64B", {"HINT": 64}),
            ("no hint", {"HINT": 0}),
            ("no scales, L2::256B", {"HINT": 256, "SCALES": 0}),
            ("no scales, L2::128B", {"HINT": 128, "SCALES": 0}),
            ("pieces of 512 + 32", {"PIECE": 512, "SCALES": 32}),
            ("pieces of 2048 + 128", {"PIECE": 2048, "SCALES": 128}),
            ("ring of 40 KB", {"RING": 40 << 10}),
            ("ring of 104 KB", {"RING": 104 << 10}),
        ):
            time, rate = reads(
                megabytes,
                **(
                    {"HINT": 128, "SCALES_TOO": 0, "PIECE": 1024, "SCALES": 64, "RING": 80 << 10}
                    | changes
                ),
            )
            print(f"{megabytes} MB  {label:32s} {time:7.1f} us  {rate:.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
