// Four-bit floats: the table has them doubled, so scales are halved.
#pragma once
#include "units/common.cuh"

#ifdef TENSOR_CORES  // sm_90

// Eight codes times a factor, the same in both halves of its word, in bf16. The codes' values are looked up byte by byte: 0, 1, 2, 3, 4, 6,
// 8, 12 are 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140.
__device__ __forceinline__ void fp4_bfloats(uint32_t codes, uint32_t factor, uint32_t* pairs) {
  const uint32_t places = codes & 0x77777777u, signs = codes >> 3 & 0x11111111u;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t low = permute(held(0x40008000u), 0x4000C080u, places >> 16 * k);
    const uint32_t high = permute(held(0x40403F00u), 0x41414040u, places >> 16 * k) | permute(0x8000u, 0, signs >> 16 * k);
    const uint32_t both[2] = {permute(low, high, 0x5140u), permute(low, high, 0x7362u)};
#pragma unroll
    for (int i = 0; i < 2; ++i) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[2 * k + i]) : "r"(both[i]), "r"(factor));
  }
}

#endif

struct MXFP4 : layout::MXFP4 {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t scale; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = power_of_two(r.scale);
    lookup_unit<FP4_TABLE>(r.q, w);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[2][8], float (&s)[2]) {
    s[0] = power_of_two(r.scale);
    signed_table_parts<FP4_TABLE>(r.q, w);
  }
#ifdef TENSOR_CORES
  static __device__ __forceinline__ void bfloats(const Raw& r, int, uint32_t (&pairs)[16]) {
    const float s = power_of_two(r.scale);
    const uint32_t codes[4] = {r.q.x, r.q.y, r.q.z, r.q.w}, factor = to_bfloats(s, s);
#pragma unroll
    for (int k = 0; k < 4; ++k) fp4_bfloats(codes[k], factor, pairs + 4 * k);
  }
#endif
  // 2^(scale - 128)
  static __device__ __forceinline__ float power_of_two(uint32_t scale) {
    return float_of_bits(scale >= 2 ? (scale - 1) << 23 : 0x200000u << scale);
  }
};

struct NVFP4 : layout::NVFP4 {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t scales; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_ue4m3(r.scales & 255u);
    s[1] = half_ue4m3(r.scales >> 8);
    lookup_unit<FP4_TABLE>(r.q, w);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[2][8], float (&s)[2]) {
    s[0] = half_ue4m3(r.scales & 255u);
    s[1] = half_ue4m3(r.scales >> 8);
    signed_table_parts<FP4_TABLE>(r.q, w);
  }
#ifdef TENSOR_CORES
  static __device__ __forceinline__ void bfloats(const Raw& r, int, uint32_t (&pairs)[16]) {  // 4 bits of mantissa times 2
    const float s = half_ue4m3(r.scales & 255u), t = half_ue4m3(r.scales >> 8);
    const uint32_t codes[4] = {r.q.x, r.q.y, r.q.z, r.q.w}, factors[2] = {to_bfloats(s, s), to_bfloats(t, t)};
#pragma unroll
    for (int k = 0; k < 4; ++k) fp4_bfloats(codes[k], factors[k / 2], pairs + 4 * k);
  }
#endif
  // 4 bits of exponent, 3 of mantissa; the highest bit is ignored, 127 is 0.
  static __device__ __forceinline__ float half_ue4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, mantissa = byte & 7u;
    const float normal = float_of_bits((exponent + 119u) << 23 | mantissa << 20), small = __fmul_rn(small_float(mantissa), 0x1p-10f);
    return byte == 127u ? 0.0f : exponent == 0 ? small : normal;
  }
};
