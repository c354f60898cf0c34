// What the matrix-vector kernels share: activations in shared memory.
//
// Macros: COLS (row length of the weights), X_ROWS (rows of activations, 1..8), WARPS (of a thread block), STEPS (of a row, see below),
// BF16_X (activations are bf16, not float32), SPREAD_X (the format has SPREAD), NEGATED_X (it has SIZES, and takes activations or what is negated), PLAIN (they are not normed; without it 0), LATE (the next kernel may start only when the preceding
// one has ended: earlier, its first weights would delay these activations; without it 0).
//
// A format (matvec/formats.cuh) cuts a row of weights into granules of F::G elements, one for each lane in a step of the warp:
// step t of a row is granules 32 t .. 32 t + 31, so neighbouring lanes load neighbouring bytes. Activations are in shared memory in
// the same cut, as int8 with a scale per 32 elements (scale = max / 127, Q8_0's formula with a float32 scale) and sums per 16:
//     words of elements 16 v .. 16 v + 15 of granule g: int4 at v * GRANULES + g
//     followed by a record per granule, see `record`; of a format with NEGATED, by all words negated before that
// or, of a format with FLOATS, in float32: elements 4 v .. 4 v + 3 of granule g are the int4 at v * GRANULES + g,
// or, of a format with SPREAD, each element four times: elements 4 v .. 4 v + 3 of granule g are the int4 at v * GRANULES + g
#include "units/common.cuh"
#define DEV static __device__ __forceinline__
#define CONST static __host__ __device__ constexpr

#ifndef PLAIN
#define PLAIN 0
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef READ_AGAIN
#define READ_AGAIN 0
#endif

constexpr int N = X_ROWS, THREADS = 32 * WARPS;

extern __shared__ __align__(16) uint8_t shared_memory[];   // activations, then the warps' rings

#include "matvec/instructions.cuh"
#include "units/stamps.cuh"

DEV float warp_sum(float v) {
  #pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// a / b with `inverse` about 1 / b: rounded to nearest, but for a case in a great many, where nothing over- or underflows on the way.
DEV float quotient(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(fmaf(-b, q, a), inverse, q);
}

// Eight elements of each thread of a warp in 8 bits. Four lanes have 32 elements with one scale, and two lanes have the sum of 16 codes. A scale that
// is not finite makes every product with it so, and is seen in the logits.
struct Rounded { uint32_t word[2]; float scale; int sum; };
DEV Rounded rounded(const float (&f)[8]) {
  Rounded r;
  float m = fabsf(f[0]);
  #pragma unroll
  for (int i = 1; i < 8; i++) m = larger(m, fabsf(f[i]));
  #pragma unroll
  for (int o = 1; o < 4; o <<= 1) m = larger(m, __shfl_xor_sync(~0u, m, o));
  const float inverse = m > 0x1p-120f ? quotient(127.0f, m, reciprocal(m)) : 0.0f;
  r.scale = m < 0x1p126f ? quotient(m, 127.0f, 1 / 127.0f) : __int_as_float(0x7F800000);   // beyond, reciprocals are 0
  #pragma unroll
  for (int k = 0; k < 2; k++) {
    uint32_t code[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) code[i] = __float_as_uint(fmaf(f[4 * k + i], inverse, 0x1.8p23f));   // to even, in its lowest byte
    r.word[k] = permute(permute(code[0], code[1], 0x40), permute(code[2], code[3], 0x40), 0x5410);
  }
  r.sum = dp4a_ss(r.word[1], 0x01010101, dp4a_ss(r.word[0], 0x01010101, 0));
  r.sum += __shfl_xor_sync(~0u, r.sum, 1);
  return r;
}

template <class F> struct Activations {
  static constexpr int GRANULES = 32 * STEPS;              // of a row, padded with zeros to whole steps
  static constexpr int WORDS = F::SPREAD || F::FLOATS ? F::G / 4 : F::G / 16, PARTS = F::NEGATED ? 2 * WORDS : WORDS;
  static constexpr int RECORD = F::FLOATS ? 0 : F::G == 32 ? 16 : 8;       // bytes: {scale, sum}, or {scale, sum, sum, both}, or {scale, scale}
  static constexpr int BYTES = GRANULES * (16 * PARTS + RECORD);   // of one row of activations

  // Eight elements of each thread: 8 v .. 8 v + 7 of a row, already normed. By the threads of whole warps, but for a format with FLOATS.
  DEV void store(uint8_t* row, uint32_t v, const float (&f)[8]) {
    if constexpr (F::FLOATS) {
      #pragma unroll
      for (uint32_t q = 2 * v; q < 2 * v + 2; q++)   // WORDS to a granule
        *(float4*)(row + 16 * (q % WORDS * GRANULES + q / WORDS)) = make_float4(f[4 * (q % 2)], f[4 * (q % 2) + 1], f[4 * (q % 2) + 2], f[4 * (q % 2) + 3]);
    } else round(row, v, f);
  }

  // Sums are for what every code has in common: integers times F::SUM0, F::SUM1 (and F::SUM of both), or floats times the scale.
  DEV void round(uint8_t* row, uint32_t v, const float (&f)[8]) {
    const Rounded r = rounded(f);
    const uint32_t (&word)[2] = r.word;
    const uint32_t g = v / (F::G / 8);
    if (F::SPREAD)
      #pragma unroll
      for (int k = 0; k < 2; k++)
        *(int4*)(row + 16 * ((2 * v + k) % WORDS * GRANULES + g)) =
            make_int4(permute(word[k], 0, 0x0000), permute(word[k], 0, 0x1111), permute(word[k], 0, 0x2222), permute(word[k], 0, 0x3333));
    else {
      uint8_t* at = row + 16 * ((v / 2) % WORDS * GRANULES + g) + 8 * (v & 1);
      *(int2*)at = make_int2(word[0], word[1]);
      if (F::NEGATED) *(int2*)(at + 16 * WORDS * GRANULES) = make_int2(bytes_negated(word[0]), bytes_negated(word[1]));
    }
    record(row + 16 * PARTS * GRANULES + RECORD * g, v, r.scale, r.sum);
  }

  DEV void record(uint8_t* at, uint32_t v, float scale, int sum) {
    if (F::G == 16) {
      if (v % 2 == 0) *(int2*)at = make_int2(__float_as_int(scale), sum);
      return;
    }
    int second = __shfl_xor_sync(~0u, sum, 2), s = __float_as_int(scale);
    if (F::G == 32 && v % 4 == 0) {
      if (F::FLOAT_SUMS)
        *(int4*)at = make_int4(s, __float_as_int(scale * sum), __float_as_int(scale * second), __float_as_int(scale * (sum + second)));
      else *(int4*)at = make_int4(s, F::SUM0 * sum, F::SUM1 * second, F::SUM * (sum + second));
    }
    if (F::G == 64) {
      int next = __shfl_xor_sync(~0u, s, 4);
      if (v % 8 == 0) *(int2*)at = make_int2(s, next);
    }
  }
};

DEV float square_of(const float4& f) { return f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w; }

// Rows of float32 activations into shared memory as the format wants them; with NORM each is multiplied by `weight`, and its squares are summed up for
// `norm_factor`: what divides by the root mean square is a factor of every result, and need not be known before the products. Every
// block of a launch does it for itself: that costs less than a kernel in front. Nothing else of the block runs meanwhile, so it is
// short: 84 instructions for 8 elements, 104 with a norm. WAITS: waits for the kernel in front, once the norm's weights are on their way:
// they come from device memory. All threads; no barrier at the end.
template <class F, int ROWS, bool NORM, bool WAITS = true> DEV void take_activations(const float* x, const float* weight, float (*sums)[WARPS], uint8_t* to) {
  constexpr uint32_t VECTORS = COLS / 8, PADDED = Activations<F>::GRANULES * F::G / 8, ALL = ROWS * PADDED;
  constexpr uint32_t PER = (ALL + THREADS - 1) / THREADS;
  constexpr bool KEEP = PER <= 4;   // what a thread has stays in registers between the sum and the rounding
  constexpr bool EARLY = NORM && ROWS == 1 && PER <= 2;
  struct Eight { float4 low, high; };
  const uint32_t thread = threadIdx.x;
  const float4 zeros = make_float4(0, 0, 0, 0), ones = make_float4(1, 1, 1, 1);
  auto weights = [&](uint32_t v) -> Eight {
    if (!weight || v >= VECTORS) return {ones, ones};
    const float4* at = (const float4*)weight + 2 * v;
    if (EARLY) return {load_now(at), load_now(at + 1)};
    return {__ldg(at), __ldg(at + 1)};   // by several rows: once for all of them
  };
  auto widened = [](const int4& f) -> Eight {
    const auto two = [](int a, int b) {
      return make_float4(__int_as_float(a << 16), __int_as_float(a & ~0xFFFF), __int_as_float(b << 16), __int_as_float(b & ~0xFFFF));
    };
    return {two(f.x, f.y), two(f.z, f.w)};
  };
  auto load = [&](uint32_t i) -> Eight {   // of all rows' vectors, padded to whole steps
    const uint32_t n = ROWS == 1 ? 0 : i / PADDED, v = i - n * PADDED;
    if (i >= ALL || v >= VECTORS) return {zeros, zeros};
    if (!BF16_X) {
      const float4* at = (const float4*)(x + (int64_t)n * COLS) + 2 * v;
      return {__ldcg(at), __ldcg(at + 1)};
    }
    return widened(__ldcg((const int4*)x + (int64_t)n * VECTORS + v));
  };
  Eight kept[KEEP ? PER : 1], norm[EARLY ? PER : 1];
  // Long rows of bf16: as they are, all on their way at once.
  constexpr bool RAW = BF16_X && ROWS == 1 && !NORM && !KEEP && PER <= 8;
  if (EARLY)
    #pragma unroll
    for (int i = 0; i < PER; i++) norm[EARLY ? i : 0] = weights(thread + i * THREADS);
  if (WAITS) {
    wait_for_predecessor();
    STAMP(WAIT_ENDED);
  }
  if (WAITS && LATE) allow_successor();
  if (KEEP)
    #pragma unroll
    for (int i = 0; i < PER; i++) kept[KEEP ? i : 0] = load(thread + i * THREADS);
  if (KEEP) STAMP_WITH(INPUT_THERE, __float_as_uint(kept[KEEP ? PER - 1 : 0].high.w));
  if (NORM) {
    #pragma unroll
    for (int n = 0; n < ROWS; n++) {
      float square = 0;
      if (ROWS == 1 && KEEP)
        #pragma unroll
        for (int i = 0; i < PER; i++) square += square_of(kept[KEEP ? i : 0].low) + square_of(kept[KEEP ? i : 0].high);
      else
        #pragma unroll 4
        for (uint32_t v = thread; v < COLS / 4; v += THREADS) square += square_of(__ldcg((const float4*)(x + (int64_t)n * COLS) + v));
      square = warp_sum(square);
      if (thread % 32 == 0) sums[n][thread / 32] = square;
    }
  }
  auto store = [&](uint32_t at, int turn, const Eight& e) {
    const uint32_t n = ROWS == 1 ? 0 : at / PADDED, v = at - n * PADDED;
    float f[8] = {e.low.x, e.low.y, e.low.z, e.low.w, e.high.x, e.high.y, e.high.z, e.high.w};
    if (NORM) {
      const Eight w = EARLY ? norm[EARLY ? turn : 0] : weights(v);
      const float by[8] = {w.low.x, w.low.y, w.low.z, w.low.w, w.high.x, w.high.y, w.high.z, w.high.w};
      #pragma unroll
      for (int i = 0; i < 8; i++) f[i] *= by[i];
    }
    Activations<F>::store(to + n * Activations<F>::BYTES, v, f);
  };
  if (RAW) {
    int4 raw[RAW ? PER : 1];
    #pragma unroll
    for (int i = 0; i < (RAW ? PER : 1); i++) {
      const uint32_t v = thread + i * THREADS;
      raw[i] = v < VECTORS ? __ldcg((const int4*)x + v) : make_int4(0, 0, 0, 0);
    }
    STAMP_WITH(INPUT_THERE, raw[RAW ? PER - 1 : 0].w);
    #pragma unroll
    for (int i = 0; i < (RAW ? PER : 1); i++)
      if (thread + i * THREADS < ALL) store(thread + i * THREADS, 0, widened(raw[i]));   // whole warps
    return;
  }
  if (KEEP) {
    #pragma unroll
    for (int i = 0; i < PER; i++)
      if (ALL % THREADS == 0 || thread + i * THREADS < ALL) store(thread + i * THREADS, i, kept[KEEP ? i : 0]);   // whole warps
  } else {
    #pragma unroll 1
    for (int i = 0; i < PER; i += 2) {
      Eight e[2];
      #pragma unroll
      for (int j = 0; j < 2; j++) e[j] = load(thread + (i + j) * THREADS);
      #pragma unroll
      for (int j = 0; j < 2; j++) if (thread + (i + j) * THREADS < ALL) store(thread + (i + j) * THREADS, 0, e[j]);
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
