// Packed weights to rows of floats: TYPE (a unit struct, whose header comes first) to float32 (exact), bfloat16 and half (rounded). SCALED:
// times a factor.
//
// A thread decodes one unit. The results of the 32 threads of a warp are adjacent in memory (64
// bytes of each, for float32 two times 64). They go through shared memory, so that every store
// instruction of the warp covers whole lines.
#include "units/common.cuh"

constexpr int WARPS = 8;

// Rows `first` and on, or, where there are `ids`, groups of `group` rows: result row r is row ids[r / group] * group + r % group.
struct RowMap {
  const int64_t* ids;
  int64_t first;
  uint32_t group;
  __device__ int64_t operator()(uint32_t r) const { return ids ? ids[r / group] * group + r % group : first + r; }
};

// 64 bytes of each thread of a warp, `mine`, to result + 64 * number of the unit * PARTS + 64 * part.
template <int PARTS>
__device__ __forceinline__ void store_side_by_side(uint4 (&stage)[128], const uint4 (&mine)[4], uint4* result, uint32_t first_unit,
                                                   uint32_t units, int part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < 4; ++c) stage[4 * lane + (c ^ (lane >> 1 & 3))] = mine[c];  // the swizzle keeps the banks apart
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t u = 8 * j + lane / 4, c = lane % 4;
    if (first_unit + u < units) result[(int64_t(first_unit + u) * PARTS + part) * 4 + c] = stage[4 * u + (c ^ (u >> 1 & 3))];
  }
  __syncwarp();
}

__device__ __forceinline__ uint4 four_words(const float (&v)[32], int at) {
  return make_uint4(__float_as_uint(v[at]), __float_as_uint(v[at + 1]), __float_as_uint(v[at + 2]), __float_as_uint(v[at + 3]));
}

template <uint32_t (*TWO)(float, float)>
__device__ __forceinline__ uint4 eight_halves(const float (&v)[32], int at) {
  return make_uint4(TWO(v[at], v[at + 1]), TWO(v[at + 2], v[at + 3]), TWO(v[at + 4], v[at + 5]), TWO(v[at + 6], v[at + 7]));
}

enum Target { FLOAT32, FLOAT16, BFLOAT16 };

template <Target TARGET>
__device__ __forceinline__ void decode(const uint8_t* base, uint4* result, int64_t total_rows, int cols, uint32_t n_rows,
                                       const RowMap& map, float scale) {
  __shared__ uint4 stages[WARPS][128];
  uint4(&stage)[128] = stages[threadIdx.x / 32];
  const Geometry g = TYPE::geometry(total_rows, cols);
  const uint32_t units = n_rows * uint32_t(g.units);
  const uint32_t unit = blockIdx.x * (32 * WARPS) + threadIdx.x, first_unit = unit - threadIdx.x % 32;
  float v[32];
  prepare_unit<TYPE>();
  if (unit < units) {
    const uint32_t row = unit / uint32_t(g.units), in_row = unit % uint32_t(g.units);
    decode_unit<TYPE>(TYPE::load(base, g, map(row), in_row), in_row, v);
    if (SCALED) {
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] *= scale;
    }
  }
  uint4 mine[4];
  if constexpr (TARGET == FLOAT32) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int c = 0; c < 4; ++c) mine[c] = four_words(v, 16 * part + 4 * c);
      store_side_by_side<2>(stage, mine, result, first_unit, units, part);
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) mine[c] = TARGET == FLOAT16 ? eight_halves<to_halves>(v, 8 * c) : eight_halves<to_bfloats>(v, 8 * c);
    store_side_by_side<1>(stage, mine, result, first_unit, units, 0);
  }
}

#if SCALED
#define SCALE , float scale
#else
#define SCALE
constexpr float scale = 1;
#endif
#define KERNEL(NAME, TARGET)                                                                                                                \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(const uint8_t* base, uint4* result, int64_t total_rows, int cols,           \
                                                                uint32_t n_rows, const int64_t* ids, int64_t first, uint32_t group SCALE) { \
    decode<TARGET>(base, result, total_rows, cols, n_rows, {ids, first, group}, scale);                                                     \
  }

KERNEL(dequantize_f32, FLOAT32)
KERNEL(dequantize_f16, FLOAT16)
KERNEL(dequantize_bf16, BFLOAT16)
