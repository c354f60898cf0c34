// The part of CUDA that the headers in cuda_kernels/units/ need, for g++, so that they can be
// tested without a GPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define UNITS_ON_HOST
#define __device__
#define __host__
#define __constant__
#define __shared__
#define __forceinline__ inline

static const struct { int x = 0; } threadIdx;
static const struct { int x = 1; } blockDim;
inline void __syncthreads() {}

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(4) ushort2 { uint16_t x, y; };
struct alignas(8) float2 { float x, y; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
inline float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
inline float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
inline float __fsub_rn(float a, float b) { volatile float c = a - b; return c; }
inline float __int2float_rn(int n) { return float(n); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int j = 0; j < 4; ++j) {
    const uint32_t n = select >> (4 * j) & 15;
    uint32_t byte = uint32_t(both >> (8 * (n & 7))) & 255;
    if (n & 8) byte = byte & 128 ? 255 : 0;  // the hardware repeats the sign
    result |= byte << (8 * j);
  }
  return result;
}

inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selectors) { return __byte_perm(low, high, selectors); }
inline uint32_t dot_of_halves(uint32_t halves, uint32_t by, uint32_t more) {
  return (halves & 0xFFFF) * (by & 255) + (halves >> 16) * (by >> 8 & 255) + more;
}
inline uint32_t held(uint32_t constant) { return constant; }
template <int TRUTH> inline uint32_t logic(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int n = 0; n < 32; ++n) r |= uint32_t(TRUTH >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1) << n;
  return r;
}
inline uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int j = 0; j < 4; ++j) c += (a >> (8 * j) & 255) * (b >> (8 * j) & 255);
  return c;
}

inline uint32_t shifted_half(uint32_t word, uint32_t more) { return (word >> 16) + more; }
inline uint32_t distances(uint32_t a, uint32_t b) {
  uint32_t d = 0;
  for (int j = 0; j < 32; j += 8) d |= uint32_t(abs(int(a >> j & 255) - int(b >> j & 255))) << j;
  return d;
}

inline int __dp4a(int a, int b, int c) {
  for (int j = 0; j < 4; ++j) c += int(int8_t(a >> (8 * j))) * int(int8_t(b >> (8 * j)));
  return c;
}

inline float half_to_float(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023, sign = (bits & 0x8000) << 16;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
  return __uint_as_float(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13);
}

inline uint32_t rounded_half(double v) {  // of normal ones
  if (v == 0) return 0;
  int exponent;
  frexp(v, &exponent);
  const double step = ldexp(1.0, exponent - 11), n = nearbyint(v / step) * step;
  uint32_t mantissa;
  frexp(n, &exponent);
  if (exponent < -13 || exponent > 16) __builtin_trap();
  mantissa = uint32_t(fabs(ldexp(n, 11 - exponent)));
  return (n < 0 ? 0x8000u : 0) | (exponent + 14) << 10 | (mantissa & 1023);
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t both = 0;
  for (int n = 0; n < 32; n += 16)
    both |= rounded_half(double(half_to_float(a >> n & 0xFFFF)) * half_to_float(b >> n & 0xFFFF) + half_to_float(c >> n & 0xFFFF)) << n;
  return both;
}
inline uint32_t add_halves(uint32_t a, uint32_t b) { return fma_halves(a, 0x3C003C00u, b); }

template <class T>
inline T aligned_load(const uint8_t* at) {  // as on a device, a load has to be aligned to its size
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) __builtin_trap();
  T v;
  memcpy(&v, at, sizeof v);
  return v;
}
inline uint4 load16(const uint8_t* at) { return aligned_load<uint4>(at); }
inline uint2 load8(const uint8_t* at) { return aligned_load<uint2>(at); }
template <class T>
inline T load_shared_by_threads(const uint8_t* at) { return aligned_load<T>(at); }
template <class T>
inline T __ldg(const T* at) { return aligned_load<T>(reinterpret_cast<const uint8_t*>(at)); }
