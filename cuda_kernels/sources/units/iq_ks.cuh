// The IQ_K types with one scale per unit and d in the row header.
#pragma once
#include "units/iq_k.cuh"

struct IQ2_KS : layout::IQ2_KS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t scales, extra, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            load_as<uint16_t>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t extra = r.extra >> (unit & 7);  // bit 0: table half, bit 8: fifth bit of the scale
    s[0] = scaled(half_to_float(r.d), int((r.scales >> (4 * (unit & 7)) & 15u) | (extra >> 4 & 16u)) - 16);
    const uint32_t t = extra & 1u ? IQ2NL_TABLE::second(0) : IQ2NL_TABLE::word(0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t codes = eight_pairs(r.q, k);
      w[2 * k] = lookup8(codes, t, t);
      w[2 * k + 1] = lookup8(codes >> 16, t, t);
    }
  }
};

struct IQ3_KS : layout::IQ3_KS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t third, scales, extra, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, THIRD_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            load_as<uint16_t>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t extra = r.extra >> (unit & 7);  // bit 0: fifth bit of the scale, bit 8: table half
    s[0] = scaled(half_to_float(r.d), int((r.scales >> (4 * (unit & 7)) & 15u) | (extra & 1u) << 4) - 16);
    uint32_t t[2];
    table_words<IQ3NL_TABLE>(extra & 256u, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t codes = eight_pairs(r.q, k) | eight_singles(r.third, k);
      w[2 * k] = lookup8(codes, t[0], t[1]);
      w[2 * k + 1] = lookup8(codes >> 16, t[0], t[1]);
    }
  }
};

// A byte of scale whose lowest bit is the table half.
__device__ __forceinline__ float scale_of_byte(float d, uint32_t byte) { return scaled(d, int(byte & 254u) - 127); }

struct IQ4_KS : layout::IQ4_KS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    sixteen_of_16(r.q.x, r.q.y, r.scale & 1u, w);
    sixteen_of_16(r.q.z, r.q.w, r.scale & 1u, w + 4);
  }
};

struct IQ4_KSS : layout::IQ4_KSS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t q[4] = {r.q.x, r.q.y, r.q.z, r.q.w};
    uint32_t bits = 0, t[4];  // the lowest bits of the words of 16 bits: of word n at bit n, for odd n 15 bits higher
#pragma unroll
    for (int k = 0; k < 4; ++k) bits |= (q[k] & 0x00010001u) << (2 * k);
    const uint32_t byte = (bits | bits >> 15) & 255u;
    s[0] = scale_of_byte(r.d, byte);
    table_words<IQ4NL_TABLE>(byte & 1u, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // word n has the elements 2n, 2n + 16, 2n + 1, 2n + 17
      const uint2 v = lookup16((q[k] & 0xFFFEFFFEu) ^ (q[k] >> 1 & 0x7FFF7FFFu), t);
      w[k] = __byte_perm(v.x, v.y, 0x6420);
      w[k + 4] = __byte_perm(v.x, v.y, 0x7531);
    }
  }
};

struct IQ5_KS : layout::IQ5_KS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint32_t fifth, scale; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, FIFTH_PLANE, row, unit)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<float>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = scale_of_byte(r.d, r.scale);
    sixteen_of_32(r.q.x, r.q.y, r.fifth, 0, r.scale & 1u, w);
    sixteen_of_32(r.q.z, r.q.w, r.fifth, 2, r.scale & 1u, w + 4);
  }
};

struct IQ2_KL : layout::IQ2_KL {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t fifth, scales, extra, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, FIFTH_PLANE, row, unit)),
            load_as<uint32_t>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8)),
            load_as<uint16_t>(in_plane<EXTRA_BYTES>(base, g, EXTRA_PLANE, row, unit / 8)),
            load_as<uint16_t>(of_row<HEADER_BYTES>(base, g, HEADER_PLANE, row))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const int u = unit & 7;
    s[0] = scaled(half_to_float(r.d), int((r.scales >> (4 * u) & 15u) | (r.extra >> (2 * u) & 3u) << 4) - 32);
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
};
