// Activations of a product that first finishes the branch before: JOINS of matvec.cu.
#include "matvec/common.cuh"

// The result of the branch before, `delta` float32[ROWS, COLS], which its post-norm is still to be applied to.
struct Pending { const float *delta, *weight; float eps, scale, *out; };

// As `take_activations` with NORM, of the stream h' = (h + scaled(delta) * weight) * scale instead of x, where scaled divides a row by its root
// mean square. Every block computes all of h', and the blocks together write it to `out`, which no block reads.
template <class F, int ROWS> DEV void take_joined_activations(
    const float* h, const float* weight, const Pending& pending, float (*sums)[WARPS], uint8_t* to) {
  constexpr uint32_t VECTORS = COLS / 8, PADDED = Activations<F>::GRANULES * F::G / 8, ALL = ROWS * PADDED;
  constexpr uint32_t PER = (ALL + THREADS - 1) / THREADS;
  constexpr bool KEEP = ROWS == 1 && PER <= 2;
  static __shared__ float inner[ROWS][WARPS];
  const uint32_t thread = threadIdx.x;
  struct Eight { float f[8]; };
  auto load = [&](const float* from, uint32_t v) -> Eight {
    const float4 a = __ldcg((const float4*)from + 2 * v), b = __ldcg((const float4*)from + 2 * v + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  };
  auto squares_of = [&](const Eight& e) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++) sum += e.f[i] * e.f[i];
    return sum;
  };
  auto keep_sum = [&](float (&of_row)[WARPS], float sum) {
    sum = warp_sum(sum);
    if (thread % 32 == 0) of_row[thread / 32] = sum;
  };
  auto advance = [&](Eight& e, const Eight& delta, const Eight& by, float factor) {   // from h to h'
    #pragma unroll
    for (int i = 0; i < 8; i++) e.f[i] = (e.f[i] + delta.f[i] * factor * by.f[i]) * pending.scale;
  };
  auto write = [&](const Eight& e, uint32_t n, uint32_t v) {
    if (v % gridDim.x != blockIdx.x) return;
    float4* at = (float4*)(pending.out + (int64_t)n * COLS) + 2 * v;
    at[0] = make_float4(e.f[0], e.f[1], e.f[2], e.f[3]);
    at[1] = make_float4(e.f[4], e.f[5], e.f[6], e.f[7]);
  };
  auto store = [&](Eight e, uint32_t n, uint32_t v) {   // whole warps, also past a row's end
    if (v < VECTORS && weight) {
      const Eight by = load(weight, v);
      #pragma unroll
      for (int i = 0; i < 8; i++) e.f[i] *= by.f[i];
    }
    Activations<F>::store(to + n * Activations<F>::BYTES, v, e.f);
  };

  for (uint32_t line = thread; line < COLS / 32; line += THREADS) {   // no kernel writes weights
    prefetch(pending.weight + 32 * line);
    if (weight) prefetch(weight + 32 * line);
  }
  wait_for_predecessor();
  STAMP(WAIT_ENDED);
  if (KEEP) {
    Eight e[KEEP ? PER : 1], delta[KEEP ? PER : 1];
    float square = 0;
    #pragma unroll
    for (int i = 0; i < (KEEP ? PER : 1); i++) {
      const uint32_t v = thread + i * THREADS;
      delta[i] = e[i] = Eight{};
      if (v < VECTORS) delta[i] = load(pending.delta, v), e[i] = load(h, v);
      square += squares_of(delta[i]);
    }
    keep_sum(inner[0], square);
    __syncthreads();
    const float factor = norm_factor(inner[0], pending.eps);
    square = 0;
    #pragma unroll
    for (int i = 0; i < (KEEP ? PER : 1); i++) {
      const uint32_t v = thread + i * THREADS;
      if (v < VECTORS) {
        advance(e[i], delta[i], load(pending.weight, v), factor);
        write(e[i], 0, v);
      }
      square += squares_of(e[i]);
      if (ALL % THREADS == 0 || v < ALL) store(e[i], 0, v);
    }
    keep_sum(sums[0], square);
    return;
  }
  #pragma unroll 1
  for (int n = 0; n < ROWS; n++) {
    float square = 0;
    #pragma unroll 2
    for (uint32_t v = thread; v < VECTORS; v += THREADS) square += squares_of(load(pending.delta + (int64_t)n * COLS, v));
    keep_sum(inner[n], square);
  }
  __syncthreads();
  #pragma unroll 1
  for (int n = 0; n < ROWS; n++) {
    const float factor = norm_factor(inner[n], pending.eps);
    float square = 0;
    #pragma unroll 1
    for (uint32_t v = thread; v < PADDED; v += THREADS) {   // whole warps
      Eight e{};
      if (v < VECTORS) {
        e = load(h + (int64_t)n * COLS, v);
        advance(e, load(pending.delta + (int64_t)n * COLS, v), load(pending.weight, v), factor);
        write(e, n, v);
      }
      square += squares_of(e);
      store(e, n, v);
    }
    keep_sum(sums[n], square);
  }
}
