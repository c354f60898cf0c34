// The IQ_K types: two scales per unit, values from tables of which a bit per scale chooses the half.
#pragma once
#include "units/common.cuh"

// Bits of a plane of pairs as the low bits of nibbles: elements 8k to 8k + 7 of a unit.
__device__ __forceinline__ uint32_t eight_pairs(const uint2& q, int k) { return (k < 2 ? q.x : q.y) >> (2 * (k % 2)) & 0x33333333u; }

// Bits of a plane of single bits as bit 2 of nibbles: elements 8k to 8k + 7 of a unit.
__device__ __forceinline__ uint32_t eight_singles(uint32_t bits, int k) { return shifted(bits, k, 2) & 0x44444444u; }

// The codes of a unit as nibbles, of types whose codes have 2 or 3 bits.
__device__ __forceinline__ uint4 nibbles_of_pairs(const uint2& q) {
  return make_uint4(eight_pairs(q, 0), eight_pairs(q, 1), eight_pairs(q, 2), eight_pairs(q, 3));
}
__device__ __forceinline__ uint4 nibbles_of_three(const uint2& q, uint32_t third) {
  return make_uint4(eight_pairs(q, 0) | eight_singles(third, 0), eight_pairs(q, 1) | eight_singles(third, 1),
                    eight_pairs(q, 2) | eight_singles(third, 2), eight_pairs(q, 3) | eight_singles(third, 3));
}

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

// The bytes by which group g of eight codes of a table exceeds the one before it; words 0 and 1 of four codes.
template <class TABLE>
__device__ constexpr uint32_t rise(int g, int n) { return bytes_less(TABLE::word(2 * g + n), TABLE::word(2 * g + n - 2)); }

// A unit of 5-bit codes as a sum of four: the value of the lowest three bits in the first group of eight, and what each group that the
// code is in or above adds. Values ascend, so these are positive, and a selector with bit 3 set repeats a sign bit: it takes them out.
__device__ __forceinline__ void iq5_parts(const uint4& q, uint32_t fifth, int (&w)[4][8]) {
  typedef IQ5NL_TABLE T;
  const uint32_t codes[4] = {q.x, q.y, q.z, q.w}, TOP = 0x88888888u;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t fourth = codes[k], last = shifted(fifth, k, 3), low = fourth & ~TOP;
    const uint32_t not1 = logic<0x52>(fourth, last, TOP);   // where TOP has a bit, ~(fourth | last), else fourth
    const uint32_t not2 = logic<0x72>(fourth, last, TOP);   // ~last
    const uint32_t not3 = logic<0x7A>(fourth, last, TOP);   // ~(fourth & last)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      w[0][2 * k + h] = permute(held(T::word(0)), T::word(1), h ? upper_half(low) : low);
      w[1][2 * k + h] = permute(held(rise<T>(1, 0)), rise<T>(1, 1), h ? upper_half(not1) : not1);
      w[2][2 * k + h] = permute(held(rise<T>(2, 0)), rise<T>(2, 1), h ? upper_half(not2) : not2);
      w[3][2 * k + h] = permute(held(rise<T>(3, 0)), rise<T>(3, 1), h ? upper_half(not3) : not3);
    }
  }
}

// The scales of IQ4_K and IQ5_K (see `_record` of layouts/iq_k.py). Returns the halves of the unit's table in bits 0 and 1.
__device__ __forceinline__ uint32_t six_bit_signed_scales(const uint4& record, int u, float (&s)[2]) {
  const float d = half_to_float(record.x & 0xFFFFu);
  const uint32_t own = permute(record.z, record.w, u * 0x1111u | 0x8880u);                  // its byte, and the sign of that
  const uint32_t four = permute(record.y, record.x, u & 4 ? 0x763u : 0x210u);              // the second scales of four units
  s[0] = scaled(d, int(own) >> 2);
  s[1] = scaled(d, int(four << (26 - 6 * (u & 3))) >> 26);
  return own;
}

struct IQ2_K : layout::IQ2_K {
  static constexpr int SCALES = 2, SECOND = 5;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t head, scale; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7));
    scales(r, s);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t t[1];
      table_words<IQ2NL_TABLE>(halves >> (k / 2) & 1u, t);
      const uint32_t codes = eight_pairs(r.q, k);
      w[2 * k] = lookup8(codes, t[0], t[0]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[0]);
    }
  }
  static __device__ __forceinline__ void scales(const Raw& r, float (&s)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    s[0] = scaled(d, int(r.scale & 15u) - 8);
    s[1] = scaled(d, int(r.scale >> 4) - 8);
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) { return r.head >> (16 + 2 * (unit & 7)) & 3u; }
  using Sixteen = IQ2NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return nibbles_of_pairs(r.q); }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    scales(r, s);
    c[0] = halves(r, unit) & 1u ? SECOND : 0.0f;
    c[1] = halves(r, unit) & 2u ? SECOND : 0.0f;
  }
};

struct IQ3_K : layout::IQ3_K {
  static constexpr int SCALES = 2, SECOND = 4;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t third, head, scale, signs; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, THIRD_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<SIGNS_BYTES>(base, g, SIGNS_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7));
    scales(r, unit, s);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t t[2];
      table_words<IQ3NL_TABLE>(halves >> (k / 2) & 1u, t);
      const uint32_t codes = eight_pairs(r.q, k) | eight_singles(r.third, k);
      w[2 * k] = lookup8(codes, t[0], t[1]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[1]);
    }
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t signs = r.signs >> (2 * (unit & 7));
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int magnitude = 2 * (r.scale >> (4 * g) & 15u) + 1;
      s[g] = scaled(d, signs >> g & 1u ? -magnitude : magnitude);
    }
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) { return r.head >> (16 + 2 * (unit & 7)) & 3u; }
  using Sixteen = IQ3NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return nibbles_of_three(r.q, r.third); }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    scales(r, unit, s);
    c[0] = halves(r, unit) & 1u ? SECOND : 0.0f;
    c[1] = halves(r, unit) & 2u ? SECOND : 0.0f;
  }
};

struct IQ4_K : layout::IQ4_K {
  static constexpr int SCALES = 2, SECOND = 4;
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
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    six_bit_signed_scales(r.record, unit & 7, s);
    signed_table_parts<IQ4NL_TABLE>(r.q, w);
  }
  using Sixteen = IQ4NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return r.q; }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    const uint32_t halves = six_bit_signed_scales(r.record, unit & 7, s);
    c[0] = halves & 1u ? SECOND : 0.0f;
    c[1] = halves & 2u ? SECOND : 0.0f;
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) {
    return permute(r.record.z, r.record.w, (unit & 7) * 0x1111u | 0x8880u) & 3u;
  }
};

struct IQ5_K : layout::IQ5_K {
  static constexpr int SCALES = 2, SECOND = 2;
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
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) {
    return permute(r.record.z, r.record.w, (unit & 7) * 0x1111u | 0x8880u) & 3u;
  }
  static constexpr int PARTS = 4;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[4][8], float (&s)[2]) {
    six_bit_signed_scales(r.record, unit & 7, s);
    iq5_parts(r.q, r.fifth, w);
  }
};

// Values of two codes q of IQ6NL, one in each half of `magic + q`, in the lowest bytes of halves; one more if `second`. The table is the
// integers next to a cubic polynomial of q - 26. These coefficients give all 64 of them with each step rounded to a half (test_units.py),
// and an integer plus 1536 has its lowest 8 bits in the lowest byte of a half.
template <uint32_t MINUS_26>   // less magic
__device__ __forceinline__ uint32_t iq6_pair(uint32_t codes, bool second) {
  const uint32_t z = add_halves(codes, MINUS_26 * 0x10001u);
  const uint32_t rise = fma_halves(fma_halves(z, 0x14F214F2u, 0xA4E6A4E6u), z, 0x41B241B2u);   // 0.0012073517, -0.0191345215, 2.84765625
  return fma_halves(rise, z, second ? 0x65EE65EEu : 0x65ED65EDu);                             // -18, or -19, and 1536
}

struct IQ6_K : layout::IQ6_K {
  static constexpr int SCALES = 2, SECOND = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint2 high; uint32_t scales, head; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load8(of_unit<8>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<HEADS_BYTES>(base, g, HEADS_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    constexpr uint32_t AT_64 = 0x54005400u, AT_1024 = 0x64006400u;   // codes from bit 4 and from bit 0 on are added to 64 and to 1024
    constexpr uint32_t FROM_64 = 0xD5A0u, FROM_1024 = 0xE41Au;       // -90 and -1050
    const float d = half_to_float(r.head & 0xFFFFu);
    const uint32_t halves = r.head >> (16 + 2 * (unit & 7)), q[6] = {r.q.x, r.q.y, r.q.z, r.q.w, r.high.x, r.high.y};
    s[0] = scaled(d, int8_t(r.scales));
    s[1] = scaled(d, int8_t(r.scales >> 8));
#pragma unroll
    for (int g = 0; g < 2; ++g) {  // see `iq6_k` of layouts/iq_k.py
      const bool second = !PRODUCTS && (halves >> g & 1u);
      const uint32_t* a = q + 3 * g;
      uint32_t v[8];
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        v[j] = iq6_pair<FROM_64>(logic<0xEA>(a[j], 0x03F003F0u, AT_64), second);   // 0xEA: the first and second, or the third
        v[3 + j] = iq6_pair<FROM_64>(logic<0xEA>(a[j] >> 6, 0x03F003F0u, AT_64), second);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[6 + j] = iq6_pair<FROM_1024>(logic<0xEA>(a[2] << (4 - 2 * j), 0x00300030u, logic<0xEA>(a[j], 0x000F000Fu, AT_1024)), second);
#pragma unroll
      for (int k = 0; k < 4; ++k) w[4 * g + k] = permute(v[2 * k], v[2 * k + 1], 0x6420);
    }
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) { return r.head >> (16 + 2 * (unit & 7)) & 3u; }
};
