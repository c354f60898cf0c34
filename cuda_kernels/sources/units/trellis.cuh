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

// The same sums, 126 larger. Every other word is shifted by two bits: what it has in a byte is four times as large, and 64 times its sum is a
// byte further up.
template <int FIRST>
__device__ __forceinline__ uint32_t four_sums(uint32_t x) {
  constexpr uint32_t LOW = 0x3F3F3F3Fu, HIGH = 0xFCFCFCFCu, ONE = 0x01010101u, MANY = 0x40404040u;
  const uint32_t a = dot_of_bytes(x * (4 * power(FIRST + 2)) & HIGH, MANY, dot_of_bytes(x * power(FIRST + 1) & LOW, ONE, 0));
  const uint32_t b = dot_of_bytes(x * (4 * power(FIRST + 4)) & HIGH, MANY, dot_of_bytes(x * power(FIRST + 3) & LOW, ONE, 0));
  return permute(a, b, 0x5410);
}

// Element e after the start x: four bytes of 6 bits, whose sum is the value and 126 more.
__device__ __forceinline__ uint32_t four_bytes(uint32_t x, int e) {
  constexpr uint32_t P1 = power(1), P2 = power(2), P3 = power(3), P4 = power(4), P5 = power(5), P6 = power(6), P7 = power(7), P8 = power(8);
  const uint32_t by = e == 0 ? P1 : e == 1 ? P2 : e == 2 ? P3 : e == 3 ? P4 : e == 4 ? P5 : e == 5 ? P6 : e == 6 ? P7 : P8;
  return x * by & 0x3F3F3F3Fu;
}

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
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale(r, 0);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      w[2 * l] = trellis::four_values<0>(start(r, l));
      w[2 * l + 1] = trellis::four_values<4>(start(r, l));
    }
  }
  static constexpr int SPREAD = 126;
  static constexpr float WHOLE = 1.0f;
  static __device__ __forceinline__ int whole(const Raw& r, int) { return trellis::scale_value(r.scale & 15u); }
  static __device__ __forceinline__ float scale(const Raw& r, int unit) { return scaled(r.d, whole(r, unit)); }
  static __device__ __forceinline__ uint32_t start(const Raw& r, int l) {
    // Bytes of the high bits of the four indices: four from `high`, the fifth from the upper half of the scale's byte.
    const uint32_t nibbles = __byte_perm(r.high & 0x0F0Fu, r.high >> 4 & 0x0F0Fu, 0x5140);
    const uint32_t high = nibbles | ((r.scale & 0xF0u) * 0x00204081u & 0x10101010u);
    return byte_times(r.q, l, 1, dot_of_halves(l % 2 ? 256u << 16 : 256u, l < 2 ? high : high >> 16, trellis::OFFSET));
  }
  static __device__ __forceinline__ uint32_t word(const Raw& r, int e) { return trellis::four_bytes(start(r, e / 8), e % 8); }
};

struct IQ2_KT : layout::IQ2_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  static constexpr float FACTOR = trellis::IQ2_KT_FACTOR;
  struct Raw { uint2 q; uint32_t scales; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale(r, unit);
    values(r.q, w);
  }
  static constexpr int SPREAD = 126;
  static constexpr float WHOLE = 1.0f;
  static __device__ __forceinline__ int whole(const Raw& r, int unit) { return trellis::scale_value(r.scales >> (4 * (unit & 7)) & 15u); }
  static __device__ __forceinline__ float scale(const Raw& r, int unit) { return scaled(r.d, whole(r, unit)); }
  static __device__ __forceinline__ uint32_t start(const uint2& q, int l) {
    const uint32_t two = l < 2 ? q.x : q.y;
    return l % 2 ? shifted_half(two, trellis::OFFSET) : lower_half(two, trellis::OFFSET);
  }
  static __device__ __forceinline__ uint32_t word(const Raw& r, int e) { return trellis::four_bytes(start(r.q, e / 8), e % 8); }
  static __device__ __forceinline__ void values(const uint2& q, int (&w)[8]) {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      w[2 * l] = trellis::four_values<0>(start(q, l));
      w[2 * l + 1] = trellis::four_values<4>(start(q, l));
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
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scaled(r.d, r.scales >> (4 * (unit & 7)) & 15u);
    magnitudes(r.q, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t negative = ones_of_signs(r.signs, k) * 255u, size = w[k];
      w[k] = (size & ~negative) | (((0x80808080u - size) ^ 0x80808080u) & negative);
    }
  }
  static constexpr bool SIZES = true;
  static constexpr float WHOLE = 1.0f;
  static __device__ __forceinline__ int whole(const Raw& r, int unit) { return r.scales >> (4 * (unit & 7)) & 15u; }
  static __device__ __forceinline__ uint32_t signs(const Raw& r) { return r.signs; }
  static __device__ __forceinline__ void sizes(const Raw& r, int (&w)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t start = IQ2_KT::start(r.q, k / 2);
      w[k] = distances(k % 2 ? trellis::four_sums<4>(start) : trellis::four_sums<0>(start), 0x7E7E7E7Eu);
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
      v[e] = __fmul_rn(r.signs >> (4 * (e % 8) + e / 8) & 1u ? -size : size, FACTOR);
    }
  }
};

struct IQ4_KT : layout::IQ4_KT {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale(r, 0);
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = trellis::four_values<0>(start(r, k));
  }
  static constexpr int SPREAD = 126;
  // The highest bits of the half words: the offset and bits 0..2 of the scale in the low ones, 3..6 in the high ones.
  static constexpr float WHOLE = 0.03125f;
  static __device__ __forceinline__ int whole(const Raw& r, int) {  // a product of the four highest bits of half words: 32 times the scale
    const uint32_t zw = logic<0xE4>(r.q.w, r.q.z >> 1, 0x80008000u), xy = logic<0xE4>(r.q.y, r.q.x >> 1, 0x80008000u);   // 0xE4: chosen by the third
    return dot_of_bytes(logic<0xE4>(zw, xy >> 2, 0xC000C000u) & 0xF000E000u, 0x10000100u, -32 * 64);
  }
  static __device__ __forceinline__ float scale(const Raw& r, int) {
    const uint32_t head = (r.q.x >> 15 & 0x00010001u) | (r.q.y >> 14 & 0x00020002u)
                          | (r.q.z >> 13 & 0x00040004u) | (r.q.w >> 12 & 0x00080008u);
    return scaled(r.d, int((head >> 1 & 7u) | (head >> 13 & 0x78u)) - 64);
  }
  static __device__ __forceinline__ uint32_t start(const Raw& r, int k) {
    const uint32_t two = k / 2 == 0 ? r.q.x : k / 2 == 1 ? r.q.y : k / 2 == 2 ? r.q.z : r.q.w;
    const uint32_t indices = two & 0x7FFF7FFFu, offset = trellis::OFFSET + (r.q.x & 0x8000u);
    return k % 2 ? shifted_half(indices, offset) : lower_half(indices, offset);
  }
  static __device__ __forceinline__ uint32_t word(const Raw& r, int e) { return trellis::four_bytes(start(r, e / 4), e % 4); }
};
