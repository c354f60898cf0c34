// Four-bit floats: the table has them doubled, so scales are halved.
#pragma once
#include "units/common.cuh"

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
  // 4 bits of exponent, 3 of mantissa; the highest bit is ignored, 127 is 0.
  static __device__ __forceinline__ float half_ue4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, mantissa = byte & 7u;
    const float normal = float_of_bits((exponent + 119u) << 23 | mantissa << 20), small = __fmul_rn(small_float(mantissa), 0x1p-10f);
    return byte == 127u ? 0.0f : exponent == 0 ? small : normal;
  }
};
