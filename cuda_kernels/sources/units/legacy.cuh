// Blocks of 32 elements with a scale each, Q4_1 and Q5_1 also with a number that is added.
#pragma once
#include "units/common.cuh"

// Sixteen bytes of a unit by nibbles_by_byte: bytes of word k of the result are in the low (k even) or high nibbles.
__device__ __forceinline__ uint32_t nibbles_of(const uint32_t (&q)[4], int k) { return (k % 2 ? q[k / 2] >> 4 : q[k / 2]) & 0x0F0F0F0Fu; }

// Bit k of the bytes of a word, at bit 4 of the bytes of the result.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t high, int k) { return shifted(high, k, 4) & 0x10101010u; }

struct Q4_0 : layout::Q4_0 {
  static constexpr int SCALES = 1, LESS = 8;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, D_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = less_bytes<8>(nibbles_of(q, k));
  }
};

struct Q4_1 : layout::Q4_1 {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = true;
  struct Raw { uint4 q; uint32_t scales; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&m)[2]) {
    s[0] = half_to_float(r.scales & 0xFFFFu);
    m[0] = -half_to_float(r.scales >> 16);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = nibbles_of(q, k);
  }
};

struct Q5_0 : layout::Q5_0 {
  static constexpr int SCALES = 1, LESS = 16;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t high, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint16_t>(of_unit<2>(base, g, D_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = less_bytes<16>(nibbles_of(q, k) | fifth_bits(r.high, k));
  }
};

struct Q5_1 : layout::Q5_1 {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = true;
  struct Raw { uint4 q; uint32_t high, scales; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint32_t>(of_unit<4>(base, g, SCALES_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&m)[2]) {
    s[0] = half_to_float(r.scales & 0xFFFFu);
    m[0] = -half_to_float(r.scales >> 16);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = nibbles_of(q, k) | fifth_bits(r.high, k);
  }
};

struct Q6_0 : layout::Q6_0 {
  static constexpr int SCALES = 1, LESS = 32;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint2 high; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load8(of_unit<8>(base, g, HIGH_PLANE, row, unit)),
            load_as<uint16_t>(of_unit<2>(base, g, D_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w}, high[2] = {r.high.x, r.high.y};
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = less_bytes<32>(nibbles_of(q, k) | (shifted(high[k / 4], 2 * (k % 4), 4) & 0x30303030u));
  }
};

// d * q - N * d, as the reference reads the rows of interleaved types: a zero is +0 where d * (q - N) gives -0 for a negative d.
template <class T, int N>
__device__ __forceinline__ void decode_less(const typename T::Raw& r, int unit, float (&v)[32]) {
  int w[8];
  float s[2], m[2];
  T::unpack(r, unit, w, s, m);
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const float code = __fadd_rn(byte_float(w[e / 4], e % 4), float(N));
    v[e] = __fsub_rn(__fmul_rn(s[0], code), __fmul_rn(float(N), s[0]));
  }
}

struct Q5_0_R4 : Q5_0 {
  static constexpr bool OWN = true;
  static __device__ __forceinline__ void decode(const Raw& r, int unit, float (&v)[32]) { decode_less<Q5_0, 16>(r, unit, v); }
};

struct Q6_0_R4 : Q6_0 {
  static constexpr bool OWN = true;
  static __device__ __forceinline__ void decode(const Raw& r, int unit, float (&v)[32]) { decode_less<Q6_0, 32>(r, unit, v); }
};

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

struct IQ4_NL : layout::IQ4_NL {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  using Raw = Q4_0::Raw;
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, D_PLANE, row, unit))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    lookup_unit<IQ4NL_TABLE>(r.q, w);
  }
  using Sixteen = IQ4NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return r.q; }
  static __device__ __forceinline__ void terms(const Raw& r, int, float (&s)[2], float (&c)[2]) {
    s[0] = half_to_float(r.d);
    c[0] = 0.0f;
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[2][8], float (&s)[2]) {
    s[0] = half_to_float(r.d);
    signed_table_parts<IQ4NL_TABLE>(r.q, w);
  }
};
