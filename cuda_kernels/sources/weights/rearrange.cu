// Run a table of bit moves (formats/codecs/bit_moves.py) over all blocks, to undo interleaving and
// to put fields into planes.
//
// One thread makes one byte of the result: the xor of `flips` and of the moves that end in it, those from starts[t] to before
// starts[t + 1], each (byte to read) << 16 | (left shift + 8) << 8 | mask. Byte t of block (group, block) goes to segment
// s = segment_of[t], at segments[s] = {where it begins less the t it begins with, step per group, step per block} of the result.
#include "units/common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rearrange(const uint8_t* source, uint8_t* result, const uint32_t* moves, const uint16_t* starts, const uint8_t* flips,
              const uint8_t* segment_of, const int64_t* segments, int64_t groups, int blocks, int target_bytes, int64_t source_head,
              int64_t source_group_step, int source_step) {
  const int64_t total = groups * blocks * target_bytes;
  for (int64_t n = int64_t(blockIdx.x) * 256 + threadIdx.x; n < total; n += int64_t(gridDim.x) * 256) {
    const int64_t whole = n / target_bytes, group = whole / blocks;
    const int t = int(n - whole * target_bytes), block = int(whole - group * blocks);
    const uint8_t* from = source + source_head + group * source_group_step + int64_t(block) * source_step;
    uint32_t byte = flips[t];
    for (int m = starts[t]; m < starts[t + 1]; ++m) {
      const uint32_t move = moves[m];
      byte ^= uint32_t(from[move >> 16]) << (move >> 8 & 255u) >> 8 & move & 255u;
    }
    const int64_t* segment = segments + 3 * segment_of[t];
    result[segment[0] + t + group * segment[1] + block * segment[2]] = uint8_t(byte);
  }
}
