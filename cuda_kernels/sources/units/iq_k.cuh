// The IQ_K types: two scales per unit, values from tables of which a bit per scale chooses the half.
#pragma once
#include "units/common.cuh"

// Bits of a plane of pairs as the low bits of nibbles: elements 8k to 8k + 7 of a unit.
__device__ __forceinline__ uint32_t eight_pairs(const uint2& q, int k) { return (k < 2 ? q.x : q.y) >> (2 * (k % 2)) & 0x33333333u; }

// Bits of a plane of single bits as bit 2 of nibbles: elements 8k to 8k + 7 of a unit.
__device__ __forceinline__ uint32_t eight_singles(uint32_t bits, int k) { return shifted(bits, k, 2) & 0x44444444u; }

// Sixteen elements of 4 or of 5 bits.
__device__ __forceinline__ void sixteen_of_16(uint32_t q0, uint32_t q1, uint32_t second, int* w) {
  uint32_t t[4];
  table_words<IQ4NL_TABLE>(second, t);
  const uint2 a = lookup16(q0, t), b = lookup16(q1, t);
  w[0] = a.x, w[1] = a.y, w[2] = b.x, w[3] = b.y;
}

__device__ __forceinline__ void sixteen_of_32(uint32_t q0, uint32_t q1, uint32_t fifth, int k, uint32_t second, int* w) {
  uint32_t t[8];
  table_words<IQ5NL_TABLE>(second, t);
  const uint2 a = lookup32(q0, eight_singles(fifth, k), t), b = lookup32(q1, eight_singles(fifth, k + 1), t);
  w[0] = a.x, w[1] = a.y, w[2] = b.x, w[3] = b.y;
}

// The scales of IQ4_K and IQ5_K (see `_record` of layouts/iq_k.py). Returns the halves of the unit's table in bits 0 and 1.
__device__ __forceinline__ uint32_t six_bit_signed_scales(const uint4& record, int u, float (&s)[2]) {
  const float d = half_to_float(record.x & 0xFFFFu);
  const uint32_t own = (u < 4 ? record.z : record.w) >> (8 * (u & 3));
  const uint32_t four = u < 4 ? record.y : record.y >> 24 | (record.x & 0xFFFF0000u) >> 8;   // the second scales of four units
  s[0] = scaled(d, int(own << 24) >> 26);
  s[1] = scaled(d, int(four << (26 - 6 * (u & 3))) >> 26);
  return own;
}

struct IQ2_K : layout::IQ2_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t head, scale; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7));
    s[0] = scaled(d, int(r.scale & 15u) - 8);
    s[1] = scaled(d, int(r.scale >> 4) - 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t t = halves >> (k / 2) & 1u ? IQ2NL_TABLE::second(0) : IQ2NL_TABLE::word(0), codes = eight_pairs(r.q, k);
      w[2 * k] = lookup8(codes, t, t);
      w[2 * k + 1] = lookup8(codes >> 16, t, t);
    }
  }
};

struct IQ3_K : layout::IQ3_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t third, head, scale, signs; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, THIRD_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<SIGNS_BYTES>(base, g, SIGNS_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7)), signs = r.signs >> (2 * (unit & 7));
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int magnitude = 2 * (r.scale >> (4 * g) & 15u) + 1;
      s[g] = scaled(d, signs >> g & 1u ? -magnitude : magnitude);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t t[2];
      table_words<IQ3NL_TABLE>(halves >> (k / 2) & 1u, t);
      const uint32_t codes = eight_pairs(r.q, k) | eight_singles(r.third, k);
      w[2 * k] = lookup8(codes, t[0], t[1]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[1]);
    }
  }
};

struct IQ4_K : layout::IQ4_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q, record; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)),
            load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t halves = six_bit_signed_scales(r.record, unit & 7, s);
    sixteen_of_16(r.q.x, r.q.y, halves & 1u, w);
    sixteen_of_16(r.q.z, r.q.w, halves & 2u, w + 4);
  }
};

struct IQ5_K : layout::IQ5_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q, record; uint32_t fifth; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)),
            load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint32_t>(of_unit<4>(base, g, FIFTH_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t halves = six_bit_signed_scales(r.record, unit & 7, s);
    sixteen_of_32(r.q.x, r.q.y, r.fifth, 0, halves & 1u, w);
    sixteen_of_32(r.q.z, r.q.w, r.fifth, 2, halves & 2u, w + 4);
  }
};

struct IQ6_K : layout::IQ6_K {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint2 high; uint32_t scales, head; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load8(of_unit<8>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7)), q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
    s[0] = scaled(d, int8_t(r.scales));
    s[1] = scaled(d, int8_t(r.scales >> 8));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t t[16];
      table_words<IQ6NL_TABLE>(halves >> (k / 2) & 1u, t);
      const uint2 eight = lookup64(q[k], eight_pairs(r.high, k), t);
      w[2 * k] = eight.x;
      w[2 * k + 1] = eight.y;
    }
  }
};
