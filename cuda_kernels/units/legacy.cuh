// Blocks of 32 elements with a scale each.
#pragma once
#include "units/common.cuh"

struct Q8_0 : layout::Q8_0 {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 a, b; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<32>(base, g, CODES_PLANE, row, unit);
    return {load16(at), load16(at + 16), load_as<uint16_t>(of_unit<2>(base, g, D_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    w[0] = r.a.x, w[1] = r.a.y, w[2] = r.a.z, w[3] = r.a.w;
    w[4] = r.b.x, w[5] = r.b.y, w[6] = r.b.z, w[7] = r.b.w;
  }
};
