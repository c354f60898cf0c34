// Run a table of bit moves (formats/codecs/bit_moves.py) over all blocks, to undo interleaving and
// to put fields into planes.
//
// One thread makes byte t of `EACH` blocks at most: the xor of `flips` and of the moves that end in it, those from starts[t] to before
// starts[t + 1], each (byte to read) << 16 | (left shift + 8) << 8 | mask. Byte t of block (group, block) goes to segment
// s = segment_of[t], at segments[s] = {where it begins less the t it begins with, step per group, step per block} of the result.
// A thread block makes a tile of `EACH` times as many blocks as it has threads for the bytes of.
#include "units/common.cuh"

constexpr int THREADS = 256, EACH = 32, KEPT = 3;  // moves that a thread keeps in registers

__device__ __forceinline__ uint32_t moved(const uint8_t* from, uint32_t move) {
  return uint32_t(from[move >> 16]) << (move >> 8 & 255u) >> 8 & move & 255u;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rearrange(const uint8_t* source, uint8_t* result, const uint32_t* moves, const uint16_t* starts, const uint8_t* flips,
              const uint8_t* segment_of, const int64_t* segments, int64_t groups, int blocks, int target_bytes, int64_t source_head,
              int64_t source_group_step, int source_step) {
  const int per_block = target_bytes < THREADS ? THREADS / target_bytes : 1;
  const int own = target_bytes < THREADS ? int(threadIdx.x) / target_bytes : 0;
  if (own >= per_block) return;
  const int64_t total = groups * blocks, tile = int64_t(per_block) * EACH, row_step = int64_t(blocks) * source_step;
  for (int t = int(threadIdx.x) - own * target_bytes; t < target_bytes; t += THREADS) {
    const int first = starts[t], n = starts[t + 1] - first;
    uint32_t kept[KEPT];
#pragma unroll
    for (int m = 0; m < KEPT; ++m) kept[m] = m < n ? moves[first + m] : 0u;
    const uint32_t flip = flips[t];
    const int64_t* segment = segments + 3 * segment_of[t];
    const int64_t group_step = segment[1], block_step = segment[2];
    for (int64_t begin = blockIdx.x * tile; begin < total; begin += gridDim.x * tile) {
      const int64_t whole = begin + own, group = whole / blocks;
      const int64_t end = begin + tile < total ? begin + tile : total;
      int block = int(whole - group * blocks);
      const uint8_t* from = source + source_head + group * source_group_step + int64_t(block) * source_step;
      uint8_t* to = result + segment[0] + t + group * group_step + block * block_step;
#pragma unroll 4
      for (int64_t i = whole; i < end; i += per_block) {
        uint32_t byte = flip;
#pragma unroll
        for (int m = 0; m < KEPT; ++m)
          if (m < n) byte ^= moved(from, kept[m]);
        for (int m = KEPT; m < n; ++m) byte ^= moved(from, moves[first + m]);
        *to = uint8_t(byte);
        block += per_block, from += int64_t(per_block) * source_step, to += per_block * block_step;
        for (; block >= blocks; block -= blocks) from += source_group_step - row_step, to += group_step - blocks * block_step;
      }
    }
  }
}
