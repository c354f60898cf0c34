// What the kernels that round with second moments share.
//
// Every sum is taken in index order with separate roundings, as quantize/rounding/kernels/codes.py takes it, so bytes
// are those of the CPU. A warp works on one row of weights; nothing depends on how rows are divided.
//
// A type's codes have the values (d * factor) * level + second * shift, where d and `second` are the scales of a
// block or row, `factor` and `shift` belong to the choice (scale and shift bits) of a group, and levels come in a few
// patterns. Tables: factors, shifts float[groups of a block, choices]; patterns u8[groups of a block, choices],
// the first level of the pattern divided by the number of codes; levels float[patterns, codes].
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;

constexpr int WARPS = 8;          // rows of a CUDA block
constexpr int MOST_COLUMNS = 256; // that are worked on together
constexpr int MOST_CODES = 64;
constexpr int MOST_LEVELS = 512;

__device__ inline float bits_as_float(uint32_t bits) {
  union { uint32_t u; float f; } both;
  both.u = bits;
  return both.f;
}

__device__ inline uint32_t float_as_bits(float value) {
  union { uint32_t u; float f; } both;
  both.f = value;
  return both.u;
}

__device__ inline float value_of_half(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return bits_as_float(sign | 0x7F800000u | mantissa << 13);
  if (exponent) return bits_as_float(sign | exponent + 112 << 23 | mantissa << 13);
  const float small = float(int(mantissa)) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}

// The bits of a half, for a value that a half has.
__device__ inline uint32_t bits_of_half(float value) {
  const uint32_t bits = float_as_bits(value), sign = bits >> 16 & 0x8000u, exponent = bits >> 23 & 255;
  if (exponent == 255) return sign | 0x7C00u | (bits >> 13 & 1023);
  if (exponent >= 113) return sign | (exponent - 112) << 10 | (bits >> 13 & 1023);
  return sign | uint32_t(int((sign ? -value : value) * 16777216.0f));
}

// The value of the half nearest to x, ties to even, +-65504 beyond; `nearest_half` of the CPU.
__device__ inline float nearest_half(float x) {
  const float size = x < 0 ? -x : x;
  const float a = size < 65504.0f ? size : 65504.0f;
  const uint32_t bits = float_as_bits(a);
  const float rounded = bits_as_float((bits + 0xFFFu + (bits >> 13 & 1)) & 0xFFFFE000u);
  const float small = (a + 0.5f) - 0.5f;
  const float value = a < 6.103515625e-5f ? small : rounded;
  return x < 0 ? -value : value;
}

__device__ inline float size_of(float x) { return x < 0 ? -x : x; }

// The code whose level is nearest, as `_nearest` of the CPU finds it. level(code) gives its value.
template <class Level>
__device__ inline int nearest_code(float value, int n, bool ordered, Level level) {
  if (ordered) {
    const bool rising = level(n - 1) >= level(0);
    int low = 0, high = n - 1;
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if ((level(middle) <= value) == rising) low = middle;
      else high = middle;
    }
    return size_of(value - level(low)) <= size_of(value - level(high)) ? low : high;
  }
  int best = 0;
  float least = size_of(value - level(0));
  for (int c = 1; c < n; ++c) {
    const float error = size_of(value - level(c));
    if (error < least) {
      least = error;
      best = c;
    }
  }
  return best;
}

// The least value of a warp, and what belongs to it: the least of these among equal values.
__device__ inline void least_of_warp(float& least, int& at) {
  for (int by = 16; by; by >>= 1) {
    const float other = __shfl_xor_sync(~0u, least, by);
    const int theirs = __shfl_xor_sync(~0u, at, by);
    if (other < least || (other == least && theirs < at)) {
      least = other;
      at = theirs;
    }
  }
}
