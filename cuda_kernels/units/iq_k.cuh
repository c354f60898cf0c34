// The IQ_K types: two scales per unit, values from tables of which a bit per scale chooses the half.
#pragma once
#include "units/common.cuh"

struct IQ2_K : layout::IQ2_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t head, scale; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7));
    s[0] = scaled(d, int(r.scale & 15u) - 8);
    s[1] = scaled(d, int(r.scale >> 4) - 8);
    const uint32_t q[2] = {r.q.x, r.q.y};
#pragma unroll
    for (int g = 0; g < 2; ++g) {  // a word of codes has the 16 elements of a scale
      const uint32_t t = halves >> g & 1u ? IQ2NL_TABLE::second(0) : IQ2NL_TABLE::word(0);
      const uint32_t first = q[g] & 0x33333333u, next = q[g] >> 2 & 0x33333333u;
      w[4 * g] = lookup8(first, t, t);
      w[4 * g + 1] = lookup8(first >> 16, t, t);
      w[4 * g + 2] = lookup8(next, t, t);
      w[4 * g + 3] = lookup8(next >> 16, t, t);
    }
  }
};

struct IQ4_K : layout::IQ4_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q, record; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const int u = unit & 7;
    const float d = half_to_float(r.record.x & 0xFFFFu);
    const uint32_t halves = r.record.x >> (16 + 2 * u), high = r.record.y >> (4 * u);
    const uint32_t low = (u < 4 ? r.record.z : r.record.w) >> (8 * (u & 3));
    s[0] = scaled(d, int((low & 15u) | (high & 3u) << 4) - 32);
    s[1] = scaled(d, int((low >> 4 & 15u) | (high >> 2 & 3u) << 4) - 32);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t t[4];
      table_words<IQ4NL_TABLE>(halves >> g & 1u, t);
#pragma unroll
      for (int k = 2 * g; k < 2 * g + 2; ++k) {
        const uint2 eight = lookup16(q[k], t);
        w[2 * k] = eight.x;
        w[2 * k + 1] = eight.y;
      }
    }
  }
};
