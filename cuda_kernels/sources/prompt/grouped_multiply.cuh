// Tiles of 64 rows of weights times some tokens on Hopper's tensor cores, and how results leave them, for grouped.cu and few.cu.
#pragma once
#include "prompt/barriers.cuh"
#include "prompt/grouped_decode.cuh"

// Registers of a thread of a consumer, and of the producer.
constexpr int REGISTERS = CONSUMERS == 4 ? 104 : CONSUMERS == 3 ? 152 : 216;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 4 ? 64 : CONSUMERS == 3 ? 56 : 72;
// A block begins with as many for every thread, in multiples of 8, and gets no more later: consumers would wait for them forever.
static_assert(CONSUMERS * REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * (65536 / (128 * CONSUMERS + PRODUCERS) / 8 * 8), "registers of a block");

using Turn = Ring<STAGES>;

// Stages of a row of weights. Rows of x have as many groups of 128.
__device__ __forceinline__ int steps_of(int cols) { return (cols + 127) / 128; }

// A descriptor of 16 k of tokens in shared memory, `bytes` after `stage`: rows of 128 bytes, swizzled by 128, groups of 8 rows 1024 bytes
// apart. Addresses are below 2^18, so that a sum does not leave the lower 14 bits.
__device__ __forceinline__ uint64_t descriptor(uint32_t stage, int bytes) {
  return uint64_t(64 | 1 << 30) << 32 | uint32_t((stage >> 4 | 1 << 16) + (bytes >> 4));
}

// sums += 64 rows of weights times N tokens, 128 k deep. The registers are free again when this
// returns. The compiler does not know that wgmma reads them until it has been waited for, so
// nothing may be decoded meanwhile. The other consumer decodes during this time.
template <int N>
__device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&a)[16], const uint32_t (&b)[16], uint32_t stage, bool add) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t fragment[4] = {a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1]};
    Wgmma<N>::run(sums, fragment, descriptor(stage, j / 4 * (LARGEST * 128) + j % 4 * 32), add || j);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// The same, of a tile that can be as large as that.
template <int N>
__device__ __forceinline__ void multiply_within(Sums& sums, const uint32_t (&a)[16], const uint32_t (&b)[16], uint32_t stage, bool add) {
  if constexpr (N <= LARGEST) multiply<N>(sums, a, b, stage, add);
}

// As many columns as the tile has tokens: the same registers whatever their number.
__device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&a)[16], const uint32_t (&b)[16], uint32_t stage, bool add, int columns) {
  if constexpr (LARGEST <= 64) {
    switch (columns) {
      case 0: multiply<16>(sums, a, b, stage, add); break;
      case 1: multiply<32>(sums, a, b, stage, add); break;
      case 2: multiply_within<48>(sums, a, b, stage, add); break;
      default: multiply_within<64>(sums, a, b, stage, add);
    }
  } else {
    switch (columns) {
      case 0: multiply<32>(sums, a, b, stage, add); break;
      case 1: multiply<64>(sums, a, b, stage, add); break;
      case 2: multiply_within<96>(sums, a, b, stage, add); break;
      case 3: multiply_within<112>(sums, a, b, stage, add); break;
      case 4: multiply_within<128>(sums, a, b, stage, add); break;
      case 5: multiply_within<136>(sums, a, b, stage, add); break;
      case 6: multiply_within<144>(sums, a, b, stage, add); break;
      case 7: multiply_within<152>(sums, a, b, stage, add); break;
      default: multiply_within<160>(sums, a, b, stage, add);
    }
  }
}

// The case of `multiply` for so many tokens.
__device__ __forceinline__ int columns_for(int rows) {
  if (LARGEST <= 64) return max(rows - 1, 0) / 16;
  return rows <= 96 ? max(rows - 1, 0) / 32 : rows <= 128 ? (rows - 97) / 16 + 3 : (rows - 129) / 8 + 5;
}

// sums = the products of 16 rows of weights per warp (per thread a row of `first` and one of `second`) and `rows` tokens, over steps
// `begin` to `end` of 128 k. The weights of AHEAD steps are in registers, or on their way there.
template <int AHEAD>
__device__ __forceinline__ void consume(Sums& sums, int rows, const uint8_t* first, int64_t low, const uint8_t* second, int64_t high,
                                        const Geometry& g, int cols, int begin, int end, uint32_t table, uint32_t ring, uint32_t full,
                                        uint32_t empty, Turn& turn) {
  const int last = cols / 32 - 1, columns = columns_for(rows);
  int unit = min(4 * begin + int(threadIdx.x % 4), last);
  typename TYPE::Raw one[AHEAD], two[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int next = min(unit + 4 * i, last);
    one[i] = TYPE::load(first, g, low, next), two[i] = TYPE::load(second, g, high, next);
  }
  for (int k = begin; k < end; k += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, turn.next()) {
      if (i && k + i >= end) break;
      uint32_t a[16], b[16];
      decode_pairs<TYPE>(one[i], unit, table, a);
      decode_pairs<TYPE>(two[i], unit, table, b);
      unit = min(unit + 4, last);
      if (k + i + AHEAD < end) {
        const int next = min(unit + 4 * (AHEAD - 1), last);
        one[i] = TYPE::load(first, g, low, next), two[i] = TYPE::load(second, g, high, next);
      }
      barrier_wait(full + 8 * turn.stage, turn.round);
      multiply(sums, a, b, ring + turn.stage * STAGE_BYTES, k + i != begin, columns);
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * turn.stage);
    }
  }
}

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these
// 8 x 8 halves of each of four matrices, transposed: rows of the results are at the addresses that lanes 8 m .. 8 m + 7 give for matrix m.
__device__ __forceinline__ void store_matrices(uint32_t at, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ uint4 shared_sixteen(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
#endif

// Sixteen bytes of chunk c of token t of a tile in shared memory, rows of 128 bytes.
__device__ __forceinline__ uint32_t place(uint32_t tile, int t, int c) { return tile + t * 128 + (c ^ (t % 8)) * 16; }

// CHUNKS chunks of 8 columns of all tokens of a tile to out[token][...], those before `chunks`; by one warpgroup.
template <int CHUNKS>
__device__ __forceinline__ void write_out(uint32_t tile, uint16_t* out, int stride, int rows, int chunks) {
  named_sync<128>(WITHIN + threadIdx.x / 128);
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < rows * CHUNKS; i += 128) {
    const int t = i / CHUNKS, c = i % CHUNKS;
    const uint4 eight = shared_sixteen(place(tile, t, c));
    if (c < chunks) *reinterpret_cast<uint4*>(out + int64_t(t) * stride + 8 * c) = eight;
  }
  named_sync<128>(WITHIN + threadIdx.x / 128);  // the tile is free again
}
