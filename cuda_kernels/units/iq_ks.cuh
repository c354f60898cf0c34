// The IQ_K types with one scale per unit and d in the row header.
#pragma once
#include "units/common.cuh"

struct IQ4_KS : layout::IQ4_KS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scaled(r.d, int(r.scale & 254u) - 127);
    uint32_t t[4];
    table_words<IQ4NL_TABLE>(r.scale & 1u, t);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 eight = lookup16(q[k], t);
      w[2 * k] = eight.x;
      w[2 * k + 1] = eight.y;
    }
  }
};
