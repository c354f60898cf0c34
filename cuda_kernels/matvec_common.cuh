// What the matrix-vector kernels share: activations in 8 bits.
//
// Macros: COLS (row length of the weights), X_ROWS (rows of activations, 1..8), WARPS (of a thread block), STEPS (of a row, see below),
// BF16_X (activations are bf16, not float32).
//
// A format (matvec_formats.cuh) cuts a row of weights into granules of F::G elements, one for each lane in a step of the warp:
// step t of a row is granules 32 t .. 32 t + 31, so neighbouring lanes load neighbouring bytes. Activations lie in shared memory in
// the same cut, as int8 with a scale per 32 elements (scale = max / 127, Q8_0's formula with a float32 scale) and sums per 16:
//     words of elements 16 v .. 16 v + 15 of granule g: int4 at v * GRANULES + g
//     behind them a record per granule, see `record`
#include "units/common.cuh"
#define DEV static __device__ __forceinline__
#define CONST static __host__ __device__ constexpr

constexpr int N = X_ROWS, THREADS = 32 * WARPS;

extern __shared__ __align__(16) uint8_t shared_memory[];   // activations, then the warps' rings

#include "matvec_instructions.cuh"

DEV float warp_sum(float v) {
  #pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

DEV float silu(float v) { return v / (1.0f + __expf(-v)); }

#ifdef STEPS
template <class F> struct Activations {
  static constexpr int GRANULES = 32 * STEPS;              // of a row, made up with zeros to whole steps
  static constexpr int PARTS = F::G / 16;
  static constexpr int RECORD = F::G == 32 ? 16 : 8;       // bytes: {scale, sum}, or {scale, sum, sum, both}, or {scale, scale}
  static constexpr int BYTES = GRANULES * (16 * PARTS + RECORD);   // of one row of activations

  // Sums are for what every code has in common: integers times F::SUM0, F::SUM1 (and F::SUM of both), or floats times the scale.
  // One float4 for each of the threads of whole warps: elements 4 v .. 4 v + 3 of a row, already normed.
  // A scale that is not finite makes every product with it so, and is seen in the logits.
  DEV void store(uint8_t* row, int v, float4 f) {
    float m = larger(larger(fabsf(f.x), fabsf(f.y)), larger(fabsf(f.z), fabsf(f.w)));
    #pragma unroll
    for (int o = 1; o < 8; o <<= 1) m = larger(m, __shfl_xor_sync(~0u, m, o));
    float inverse = m > 0 ? 127.0f / m : 0.0f;
    int a = __float2int_rn(f.x * inverse), b = __float2int_rn(f.y * inverse);
    int c = __float2int_rn(f.z * inverse), d = __float2int_rn(f.w * inverse);
    int sum = a + b + c + d;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    uint32_t word = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (uint32_t)d << 24;
    int k = v & 3, g = v / (F::G / 4);
    ((uint32_t*)row)[4 * ((v / 4) % PARTS * GRANULES + g) + k] = word;
    record(row + 16 * PARTS * GRANULES + RECORD * g, v, m / 127.0f, sum);
  }

  DEV void record(uint8_t* at, int v, float scale, int sum) {
    if (F::G == 16) {
      if (v % 4 == 0) *(int2*)at = make_int2(__float_as_int(scale), sum);
      return;
    }
    int second = __shfl_xor_sync(~0u, sum, 4), s = __float_as_int(scale);
    if (F::G == 32 && v % 8 == 0) {
      if (F::FLOAT_SUMS)
        *(int4*)at = make_int4(s, __float_as_int(scale * sum), __float_as_int(scale * second), __float_as_int(scale * (sum + second)));
      else *(int4*)at = make_int4(s, F::SUM0 * sum, F::SUM1 * second, F::SUM * (sum + second));
    }
    if (F::G == 64) {
      int next = __shfl_xor_sync(~0u, s, 8);
      if (v % 16 == 0) *(int2*)at = make_int2(s, next);
    }
  }
};

// Rows of float32 activations into shared memory in 8 bits; with NORM each is multiplied by `weight`, and its squares are summed up for
// `norm_factor`: what divides by the root mean square is a factor of every result, and need not be known before the products. Every
// block of a launch does it for itself: that costs less than a kernel in front. Waits for the kernel in front, once the norm's weights
// are on their way. All threads; no barrier at the end.
template <class F, int ROWS, bool NORM> DEV void quantize(const float* x, const float* weight, float (*sums)[WARPS], uint8_t* to) {
  constexpr int VECTORS = COLS / 4, PADDED = Activations<F>::GRANULES * F::G / 4, ALL = ROWS * PADDED, PER = (ALL + THREADS - 1) / THREADS;
  constexpr bool KEEP = PER <= 8;   // what a thread has stays in registers between the sum and the rounding
  const int thread = threadIdx.x;
  constexpr bool EARLY = NORM && ROWS == 1 && PER <= 4;
  float4 kept[KEEP ? PER : 1], norm[EARLY ? PER : 1];
  if (EARLY)
    #pragma unroll
    for (int i = 0; i < PER; i++) {
      int v = thread + i * THREADS;
      norm[EARLY ? i : 0] = weight && v < VECTORS ? __ldg((const float4*)weight + v) : make_float4(1, 1, 1, 1);
    }
  wait_for_predecessor();
  auto load = [&](int i) {   // of all rows' vectors, made up to whole steps
    int n = ROWS == 1 ? 0 : i / PADDED, v = i - n * PADDED;
    if (i >= ALL || v >= VECTORS) return make_float4(0, 0, 0, 0);
    if (!BF16_X) return __ldcg((const float4*)(x + (int64_t)n * COLS) + v);
    const int2 f = __ldcg((const int2*)x + (int64_t)n * VECTORS + v);
    return make_float4(__int_as_float(f.x << 16), __int_as_float(f.x & ~0xFFFF), __int_as_float(f.y << 16), __int_as_float(f.y & ~0xFFFF));
  };
  if (KEEP)
    #pragma unroll
    for (int i = 0; i < PER; i++) kept[KEEP ? i : 0] = load(thread + i * THREADS);
  if (NORM) {
    #pragma unroll
    for (int n = 0; n < ROWS; n++) {
      float square = 0;
      if (ROWS == 1 && KEEP)
        #pragma unroll
        for (int i = 0; i < PER; i++) {
          float4 f = kept[KEEP ? i : 0];
          square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
        }
      else
        #pragma unroll 4
        for (int v = thread; v < VECTORS; v += THREADS) {
          float4 f = __ldcg((const float4*)(x + (int64_t)n * COLS) + v);
          square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
        }
      square = warp_sum(square);
      if (thread % 32 == 0) sums[n][thread / 32] = square;
    }
  }
  auto store = [&](int at, int turn, float4 f) {
    int n = ROWS == 1 ? 0 : at / PADDED, v = at - n * PADDED;
    if (NORM) {
      float4 w = EARLY ? norm[EARLY ? turn : 0] : weight && v < VECTORS ? __ldg((const float4*)weight + v) : make_float4(1, 1, 1, 1);
      f.x *= w.x; f.y *= w.y; f.z *= w.z; f.w *= w.w;
    }
    Activations<F>::store(to + n * Activations<F>::BYTES, v, f);
  };
  if (KEEP) {
    #pragma unroll
    for (int i = 0; i < PER; i++)
      if (ALL % THREADS == 0 || thread + i * THREADS < ALL) store(thread + i * THREADS, i, kept[KEEP ? i : 0]);   // whole warps
  } else {
    #pragma unroll 1
    for (int i = 0; i < PER; i += 4) {
      float4 f[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) f[j] = load(thread + (i + j) * THREADS);
      #pragma unroll
      for (int j = 0; j < 4; j++) if (thread + (i + j) * THREADS < ALL) store(thread + (i + j) * THREADS, 0, f[j]);
    }
  }
}

// Of a row whose squares are in `sums`.
DEV float norm_factor(const float (&sums)[WARPS], float eps) {
  float square = 0;
  #pragma unroll
  for (int i = 0; i < WARPS; i++) square += sums[i];
  return rsqrtf(square / COLS + eps);
}
#endif
