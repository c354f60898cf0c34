// Floats: their units have values and no integers, so `decode` is all there is.
#pragma once
#include "units/common.cuh"

struct FloatUnit {
  static constexpr bool FLOATS = true;
  static constexpr bool OWN = true;
};

struct F32 : layout::F32, FloatUnit {
  struct Raw { uint4 v[8]; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<128>(base, g, VALUES_PLANE, row, unit);
    Raw r;
#pragma unroll
    for (int n = 0; n < 8; ++n) r.v[n] = load16(at + 16 * n);
    return r;
  }
  static __device__ __forceinline__ void decode(const Raw& r, int, float (&v)[32]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      v[4 * n] = float_of_bits(r.v[n].x), v[4 * n + 1] = float_of_bits(r.v[n].y);
      v[4 * n + 2] = float_of_bits(r.v[n].z), v[4 * n + 3] = float_of_bits(r.v[n].w);
    }
  }
};

// Two values in a word: `low` and `high`.
struct HalfWords : FloatUnit {
  struct Raw { uint4 v[4]; };
  static __device__ __forceinline__ Raw load_at(const uint8_t* at) {
    return {load16(at), load16(at + 16), load16(at + 32), load16(at + 48)};
  }
  static __device__ __forceinline__ uint32_t word(const Raw& r, int n) {
    const uint4& v = r.v[n / 4];
    return n % 4 == 0 ? v.x : n % 4 == 1 ? v.y : n % 4 == 2 ? v.z : v.w;
  }
};

struct F16 : layout::F16, HalfWords {
  static __device__ __forceinline__ float low(uint32_t word) { return half_to_float(word & 0xFFFFu); }
  static __device__ __forceinline__ float high(uint32_t word) { return half_to_float(word >> 16); }
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return load_at(of_unit<64>(base, g, VALUES_PLANE, row, unit));
  }
  static __device__ __forceinline__ void decode(const Raw& r, int, float (&v)[32]) {
#pragma unroll
    for (int n = 0; n < 16; ++n) v[2 * n] = low(word(r, n)), v[2 * n + 1] = high(word(r, n));
  }
};

struct BF16 : layout::BF16, HalfWords {
  static __device__ __forceinline__ float low(uint32_t word) { return float_of_bits(word << 16); }
  static __device__ __forceinline__ float high(uint32_t word) { return float_of_bits(word & 0xFFFF0000u); }
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return load_at(of_unit<64>(base, g, VALUES_PLANE, row, unit));
  }
  static __device__ __forceinline__ void decode(const Raw& r, int, float (&v)[32]) {
#pragma unroll
    for (int n = 0; n < 16; ++n) v[2 * n] = low(word(r, n)), v[2 * n + 1] = high(word(r, n));
  }
};
