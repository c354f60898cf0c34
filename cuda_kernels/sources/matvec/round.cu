// Rows of activations in 8 bits for several.cu: once for all blocks of a product. The grid: chunks of 2048 columns, rows.
//
// Macros: those of matvec/columns.cuh, WARPS (8), BF16_X, JOINS: first finishes the branch before, x' = (x + normed(delta) * post_weight) * scale, where
// normed divides a row by its root mean square, and stores x' in `stream`. Each row is multiplied by `weight` (or null), and its squares are summed: what divides
// by the root mean square is a factor of every result.
#include "matvec/columns.cuh"
#ifndef JOINS
#define JOINS 0
#endif
static_assert(8 * THREADS == Columns::CHUNK, "a chunk has eight elements for each thread");

struct Eight { float f[8]; };
DEV Eight eight_at(const float* from, int v) {
  const float4 a = __ldcg((const float4*)from + 2 * v), b = __ldcg((const float4*)from + 2 * v + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
DEV Eight weights_at(const float* from, int v) {   // no kernel writes them
  const float4 a = load_now((const float4*)from + 2 * v), b = load_now((const float4*)from + 2 * v + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
DEV float squares_of(const Eight& e) {
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 8; i++) sum += e.f[i] * e.f[i];
  return sum;
}
// Of all threads of the block.
DEV float block_sum(float v, float (&of_warps)[WARPS]) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < WARPS; i++) sum += of_warps[i];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) round_rows(const float* x, const float* weight, uint8_t* to
#if JOINS
    , const float* delta, const float* post_weight, float post_eps, float scale, float* stream
#endif
    ) {
  allow_successor();
  constexpr int VECTORS = COLS / 8;
  const int n = blockIdx.y, v = blockIdx.x * THREADS + threadIdx.x;
  Eight by{1, 1, 1, 1, 1, 1, 1, 1}, e{};
  if (weight && v < VECTORS) by = weights_at(weight, v);
#if JOINS
  static __shared__ float inner[WARPS];
  Eight after{};
  if (v < VECTORS) after = weights_at(post_weight, v);
#endif
  wait_for_predecessor();
  if (v < VECTORS) {
    if (BF16_X) {
      const int4 f = __ldcg((const int4*)x + (int64_t)n * VECTORS + v);
      const int four[4] = {f.x, f.y, f.z, f.w};
      #pragma unroll
      for (int i = 0; i < 4; i++) e.f[2 * i] = __int_as_float(four[i] << 16), e.f[2 * i + 1] = __int_as_float(four[i] & ~0xFFFF);
    } else e = eight_at(x + (int64_t)n * COLS, v);
  }
#if JOINS
  const float* of_row = delta + (int64_t)n * COLS;
  float square_of_delta = 0;
  #pragma unroll 4
  for (int i = threadIdx.x; i < VECTORS; i += THREADS) square_of_delta += squares_of(eight_at(of_row, i));
  const float factor = rsqrtf(block_sum(square_of_delta, inner) / COLS + post_eps);
  if (v < VECTORS) {
    const Eight d = eight_at(of_row, v);
    #pragma unroll
    for (int i = 0; i < 8; i++) e.f[i] = (e.f[i] + d.f[i] * factor * after.f[i]) * scale;
    float4* at = (float4*)(stream + (int64_t)n * COLS) + 2 * v;
    at[0] = make_float4(e.f[0], e.f[1], e.f[2], e.f[3]);
    at[1] = make_float4(e.f[4], e.f[5], e.f[6], e.f[7]);
  }
#endif
  static __shared__ float squares[WARPS];
  const float square = block_sum(squares_of(e), squares);
  if (threadIdx.x == 0) Columns::store_square(to, n, blockIdx.x, square);
  #pragma unroll
  for (int i = 0; i < 8; i++) e.f[i] *= by.f[i];
  if (v < 4 * PADDED_UNITS) Columns::store(to, n, v, e.f);   // whole warps
}
