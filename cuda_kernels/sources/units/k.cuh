// The K-quants: codes are numbers; Q2_K, Q4_K and Q5_K take a minimum off.
#pragma once
#include "units/common.cuh"

// d and dmin, a byte per unit with its scale and the lowest two bits of its minimum, a nibble per unit with the other four.
__device__ __forceinline__ void six_bit_scales(const uint4& record, int u, float& s, float& m) {
  const uint32_t low = (u < 4 ? record.y : record.z) >> (8 * (u & 3)), high = record.w >> (4 * u);
  s = scaled(half_to_float(record.x & 0xFFFFu), low & 63u);
  m = scaled(half_to_float(record.x >> 16), (low >> 6 & 3u) | (high & 15u) << 2);
}

// Four codes of 2 bits, byte by byte: word k of a unit's eight.
__device__ __forceinline__ uint32_t four_pairs(const uint2& q, int k) { return (k < 4 ? q.x : q.y) >> (2 * (k % 4)) & 0x03030303u; }

struct Q2_K : layout::Q2_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = true;
  struct Raw { uint2 q; uint32_t scales, heads; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&m)[2]) {
    const float d = half_to_float(r.heads & 0xFFFFu), dmin = half_to_float(r.heads >> 16);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      s[g] = scaled(d, r.scales >> (8 * g) & 15u);
      m[g] = scaled(dmin, r.scales >> (8 * g + 4) & 15u);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = four_pairs(r.q, k);
  }
};

struct Q3_K : layout::Q3_K {
  static constexpr int SCALES = 2, LESS = 4;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t third, low, high, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, THIRD_PLANE, row, unit)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HIGH_BYTES>(base, g, HIGH_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.d);
    const uint32_t high = r.high >> (4 * (unit & 7));
    s[0] = scaled(d, int((r.low & 15u) | (high & 3u) << 4) - 32);
    s[1] = scaled(d, int(r.low >> 4 | (high >> 2 & 3u) << 4) - 32);
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = less_bytes<4>(four_pairs(r.q, k) | (shifted(r.third, k, 2) & 0x04040404u));
  }
};

struct Q4_K : layout::Q4_K {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = true;
  struct Raw { uint4 q, record; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)),
            load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&m)[2]) {
    six_bit_scales(r.record, unit & 7, s[0], m[0]);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = q[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu;
  }
};

struct Q5_K : layout::Q5_K {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = true;
  struct Raw { uint4 q, record; uint32_t fifth; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)),
            load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint32_t>(of_unit<4>(base, g, FIFTH_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&m)[2]) {
    six_bit_scales(r.record, unit & 7, s[0], m[0]);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = (q[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu) | (shifted(r.fifth, k, 4) & 0x10101010u);
  }
};

struct Q6_K : layout::Q6_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 low; uint2 high; uint32_t scales, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, LOW_PLANE, row, unit)), load8(of_unit<8>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.d);
    s[0] = scaled(d, int8_t(r.scales));
    s[1] = scaled(d, int8_t(r.scales >> 8));
    const uint32_t low[4] = {r.low.x, r.low.y, r.low.z, r.low.w}, high[2] = {r.high.x, r.high.y};
#pragma unroll
    for (int k = 0; k < 8; ++k)
      w[k] = minus_bytes<32>((low[k / 2] >> (4 * (k % 2)) & 0x0F0F0F0Fu) | (shifted(high[k / 4], 2 * (k % 4), 4) & 0x30303030u));
  }
};
