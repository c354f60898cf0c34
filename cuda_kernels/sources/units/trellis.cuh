// Trellis types: values come from a generator started by an index. It multiplies by a constant, so
// element j is the start times the (j + 1)th power of it, and no element waits for the previous
// one.
#pragma once
#include "units/common.cuh"
#include "units/trellis_constants.cuh"

namespace trellis {

__host__ __device__ constexpr uint32_t power(int n) { return n == 0 ? 1u : MULTIPLIER * power(n - 1); }

// The value of a word in its highest byte: the sum of its four bytes of 6 bits less 126. (Lower bytes of the product do not carry.)
__device__ __forceinline__ uint32_t value_in_top_byte(uint32_t x) { return (x & 0x3F3F3F3Fu) * 0x01010101u + (256u - 126u << 24); }

// Four values, from element FIRST after the start x on.
template <int FIRST>
__device__ __forceinline__ uint32_t four_values(uint32_t x) {
  const uint32_t a = value_in_top_byte(x * power(FIRST + 1)), b = value_in_top_byte(x * power(FIRST + 2));
  const uint32_t c = value_in_top_byte(x * power(FIRST + 3)), d = value_in_top_byte(x * power(FIRST + 4));
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// A value of IQ4NL_VALUES.
__device__ __forceinline__ int scale_value(uint32_t code) {
  const uint32_t low = __byte_perm(IQ4NL_TABLE::word(0), IQ4NL_TABLE::word(1), code & 7u);
  const uint32_t high = __byte_perm(IQ4NL_TABLE::word(2), IQ4NL_TABLE::word(3), code & 7u);
  return int8_t(code & 8u ? high : low);
}

}  // namespace trellis

struct IQ1_KT : layout::IQ1_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint32_t q, high, scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scaled(r.d, trellis::scale_value(r.scale & 15u));
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const uint32_t index = (r.q >> (8 * l) & 255u) | (r.high >> (4 * l) & 15u) << 8 | (r.scale >> (4 + l) & 1u) << 12;
      w[2 * l] = trellis::four_values<0>(index + trellis::OFFSET);
      w[2 * l + 1] = trellis::four_values<4>(index + trellis::OFFSET);
    }
  }
};

struct IQ2_KT : layout::IQ2_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  static constexpr float FACTOR = trellis::IQ2_KT_FACTOR;
  struct Raw { uint2 q; uint32_t scales; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scaled(r.d, trellis::scale_value(r.scales >> (4 * (unit & 7)) & 15u));
    values(r.q, w);
  }
  static __device__ __forceinline__ void values(const uint2& q, int (&w)[8]) {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const uint32_t two = l < 2 ? q.x : q.y, x = (l % 2 ? two >> 16 : two & 0xFFFFu) + trellis::OFFSET;
      w[2 * l] = trellis::four_values<0>(x);
      w[2 * l + 1] = trellis::four_values<4>(x);
    }
  }
};

// Magnitudes from the generator, separate signs; a negated 0 is -0, which a product of integers does not give.
struct IQ3_KT : layout::IQ3_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  static constexpr bool OWN = true;
  static constexpr float FACTOR = trellis::IQ3_KT_FACTOR;
  struct Raw { uint2 q; uint32_t signs, scales; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, SIGNS_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scaled(r.d, r.scales >> (4 * (unit & 7)) & 15u);
    magnitudes(r.q, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t negative = (r.signs >> k & 0x01010101u) * 255u, size = w[k];
      w[k] = (size & ~negative) | (((0x80808080u - size) ^ 0x80808080u) & negative);
    }
  }
  static __device__ __forceinline__ void magnitudes(const uint2& q, int (&w)[8]) {
    IQ2_KT::values(q, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t value = w[k], ones = value >> 7 & 0x01010101u;  // of negative bytes, which are not 0
      w[k] = (value ^ ones * 255u) + ones;
    }
  }
  static __device__ __forceinline__ void decode(const Raw& r, int unit, float (&v)[32]) {
    int w[8];
    magnitudes(r.q, w);
    const float s = scaled(r.d, r.scales >> (4 * (unit & 7)) & 15u);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const float size = __fmul_rn(s, byte_float(w[e / 4], e % 4));
      v[e] = __fmul_rn(r.signs >> (8 * (e % 4) + e / 4) & 1u ? -size : size, FACTOR);
    }
  }
};

struct IQ4_KT : layout::IQ4_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    // The highest bits of the half words: the offset and bits 0..2 of the scale in the low ones, 3..6 in the high ones.
    const uint32_t head = (r.q.x >> 15 & 0x00010001u) | (r.q.y >> 14 & 0x00020002u)
                          | (r.q.z >> 13 & 0x00040004u) | (r.q.w >> 12 & 0x00080008u);
    s[0] = scaled(r.d, int((head >> 1 & 7u) | (head >> 13 & 0x78u)) - 64);
    const uint32_t offset = trellis::OFFSET + (head & 1u) * 32768u, q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      w[2 * k] = trellis::four_values<0>((q[k] & 0x7FFFu) + offset);
      w[2 * k + 1] = trellis::four_values<0>((q[k] >> 16 & 0x7FFFu) + offset);
    }
  }
};
