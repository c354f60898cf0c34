// The IQ_K types with one scale per unit and d in the row header.
#pragma once
#include "units/iq_k.cuh"

struct IQ2_KS : layout::IQ2_KS {
  static constexpr int SCALES = 1, SECOND = 5;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t scales, extra; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t extra = r.extra >> (unit & 7);  // bit 0: table half, bit 8: fifth bit of the scale
    s[0] = scale(r, unit);
    uint32_t t[1];
    table_words<IQ2NL_TABLE>(extra & 1u, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t codes = eight_pairs(r.q, k);
      w[2 * k] = lookup8(codes, t[0], t[0]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[0]);
    }
  }
  static __device__ __forceinline__ float scale(const Raw& r, int unit) {
    return scaled(r.d, int((r.scales >> (4 * (unit & 7)) & 15u) | (r.extra >> (unit & 7) >> 4 & 16u)) - 16);
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) { return r.extra >> (unit & 7) & 1u; }
  using Sixteen = IQ2NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return nibbles_of_pairs(r.q); }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    s[0] = scale(r, unit);
    c[0] = halves(r, unit) ? SECOND : 0.0f;
  }
};

struct IQ3_KS : layout::IQ3_KS {
  static constexpr int SCALES = 1, SECOND = 4;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t third, scales, extra; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, THIRD_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t extra = r.extra >> (unit & 7);  // bit 0: fifth bit of the scale, bit 8: table half
    s[0] = scale(r, unit);
    uint32_t t[2];
    table_words<IQ3NL_TABLE>(extra & 256u, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t codes = eight_pairs(r.q, k) | eight_singles(r.third, k);
      w[2 * k] = lookup8(codes, t[0], t[1]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[1]);
    }
  }
  static __device__ __forceinline__ float scale(const Raw& r, int unit) {
    return scaled(r.d, int((r.scales >> (4 * (unit & 7)) & 15u) | (r.extra >> (unit & 7) & 1u) << 4) - 16);
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int unit) { return r.extra >> (8 + (unit & 7)) & 1u; }
  using Sixteen = IQ3NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return nibbles_of_three(r.q, r.third); }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    s[0] = scale(r, unit);
    c[0] = halves(r, unit) ? SECOND : 0.0f;
  }
};

// A byte of scale whose lowest bit is the table half.
__device__ __forceinline__ float scale_of_byte(float d, uint32_t byte) { return scaled(d, int(byte & 254u) - 127); }

struct IQ4_KS : layout::IQ4_KS {
  static constexpr int SCALES = 1, SECOND = 4;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    sixteen_of_16(r.q.x, r.q.y, r.scale & 1u, w);
    sixteen_of_16(r.q.z, r.q.w, r.scale & 1u, w + 4);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[2][8], float (&s)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    signed_table_parts<IQ4NL_TABLE>(r.q, w);
  }
  using Sixteen = IQ4NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return r.q; }
  static __device__ __forceinline__ void terms(const Raw& r, int, float (&s)[2], float (&c)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    c[0] = r.scale & 1u ? SECOND : 0.0f;
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int) { return r.scale & 1u; }
};

struct IQ4_KSS : layout::IQ4_KSS {
  static constexpr int SCALES = 1, SECOND = 4;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  // The scale, whose lowest bit is the table half: the lowest bits of the words of 16 bits, of word n at bit n, for odd n 15 bits higher.
  static __device__ __forceinline__ uint32_t scale(const Raw& r) {
    const uint32_t bits = (r.q.x & 0x00010001u) | (r.q.y & 0x00010001u) << 2 | (r.q.z & 0x00010001u) << 4 | (r.q.w & 0x00010001u) << 6;
    return (bits | bits >> 15) & 255u;
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int) { return scale(r) & 1u; }
  // Word n of 16 bits has the elements 2n, 2n + 16, 2n + 1, 2n + 17.
  static __device__ __forceinline__ uint32_t codes(uint32_t q) { return (q & 0xFFFEFFFEu) ^ (q >> 1 & 0x7FFF7FFFu); }
  using Sixteen = IQ4NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) {
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
    uint32_t c[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // the elements 2n and 2n + 1 are in one byte after the two in the middle have changed places
      const uint32_t word = codes(q[k]), moved = (word ^ word >> 4) & 0x00F000F0u;
      c[k] = word ^ moved ^ moved << 4;
    }
    return make_uint4(__byte_perm(c[0], c[1], 0x6420), __byte_perm(c[2], c[3], 0x6420), __byte_perm(c[0], c[1], 0x7531),
                      __byte_perm(c[2], c[3], 0x7531));
  }
  static __device__ __forceinline__ void terms(const Raw& r, int, float (&s)[2], float (&c)[2]) {
    const uint32_t byte = scale(r);
    s[0] = scale_of_byte(r.d, byte);
    c[0] = byte & 1u ? SECOND : 0.0f;
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w}, byte = scale(r);
    uint32_t t[4];
    s[0] = scale_of_byte(r.d, byte);
    table_words<IQ4NL_TABLE>(byte & 1u, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 v = lookup16(codes(q[k]), t);
      w[k] = __byte_perm(v.x, v.y, 0x6420);
      w[k + 4] = __byte_perm(v.x, v.y, 0x7531);
    }
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[2][8], float (&s)[2]) {
    s[0] = scale_of_byte(r.d, scale(r));
    int mixed[2][8];
    signed_table_parts<IQ4NL_TABLE>(make_uint4(codes(r.q.x), codes(r.q.y), codes(r.q.z), codes(r.q.w)), mixed);
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        w[p][k] = __byte_perm(mixed[p][2 * k], mixed[p][2 * k + 1], 0x6420);
        w[p][k + 4] = __byte_perm(mixed[p][2 * k], mixed[p][2 * k + 1], 0x7531);
      }
  }
};

struct IQ5_KS : layout::IQ5_KS {
  static constexpr int SCALES = 1, SECOND = 2;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t fifth, scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, FIFTH_PLANE, row, unit)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    sixteen_of_32(r.q.x, r.q.y, r.fifth, 0, r.scale & 1u, w);
    sixteen_of_32(r.q.z, r.q.w, r.fifth, 2, r.scale & 1u, w + 4);
  }
  static __device__ __forceinline__ uint32_t halves(const Raw& r, int) { return r.scale & 1u; }
  static constexpr int PARTS = 4;
  static __device__ __forceinline__ void parts(const Raw& r, int, int (&w)[4][8], float (&s)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    iq5_parts(r.q, r.fifth, w);
  }
};

struct IQ2_KL : layout::IQ2_KL {
#ifdef UNITS_IN_SHARED
  using Shared = IQ2KL_SHARED_TABLE;
#endif
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t fifth, scales, extra; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, FIFTH_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const int u = unit & 7;
    s[0] = scaled(r.d, int((r.scales >> (4 * u) & 15u) | (r.extra >> (2 * u) & 3u) << 4) - 32);
    if constexpr (PRODUCTS) {  // a look-up in shared memory for each pair: 16 permutations for eight elements are more
      const uint32_t table = IQ2KL_SHARED_TABLE::address();
      const uint32_t fifth = r.fifth | r.fifth << 15;  // bit 2k of its nibbles: codes 8k to 8k + 7
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t q = k ? r.q.y : r.q.x;
        const uint32_t low = (q & 0x0F0F0F0Fu) | (shifted(fifth, 2 * k, 4) & 0x10101010u);
        const uint32_t high = (q >> 4 & 0x0F0F0F0Fu) | (fifth >> 2 * k & 0x10101010u);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t a = IQ2KL_SHARED_TABLE::at(byte_times(low, j, 2, table)), b = IQ2KL_SHARED_TABLE::at(byte_times(high, j, 2, table));
          w[4 * k + j] = __byte_perm(a, b, 0x5410);
        }
      }
    } else {
      uint32_t even[8], odd[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) even[n] = IQ2KL_EVEN_TABLE::word(n), odd[n] = IQ2KL_ODD_TABLE::word(n);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // four codes: eight elements
        const uint32_t codes = (k < 2 ? r.q.x : r.q.y) >> (16 * (k % 2)), low = codes & 0x7777u;
        const uint32_t by3 = choosing((codes & 0x8888u) >> 1), by4 = choosing(shifted(r.fifth, k, 2) & 0x4444u);
        const uint32_t first = four_of_32(low, by3, by4, even), second = four_of_32(low, by3, by4, odd);
        w[2 * k] = __byte_perm(first, second, 0x5140);
        w[2 * k + 1] = __byte_perm(first, second, 0x7362);
      }
    }
  }
};
