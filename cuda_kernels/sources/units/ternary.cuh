// One- and two-bit types: codes less 1, or two signs, times one scale.
#pragma once
#include "units/common.cuh"

struct Q1_0_G128 : layout::Q1_0_G128 {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint32_t q, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 4))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = less_bytes<1>((k == 0 ? r.q << 1 : r.q >> (k - 1)) & 0x02020202u);
  }
};

// Eight bytes of a unit by pairs_by_byte: the codes less 1.
__device__ __forceinline__ void ternary_pairs(const uint2& q, int (&w)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) w[k] = less_bytes<1>((k < 4 ? q.x : q.y) >> (2 * (k % 4)) & 0x03030303u);
}

struct Q2_0 : layout::Q2_0 {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 2))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    ternary_pairs(r.q, w);
  }
};

struct TQ2_0 : layout::TQ2_0 {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    ternary_pairs(r.q, w);
  }
};

struct IQ2_BN : layout::IQ2_BN {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint2 q; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = r.d;
    ternary_pairs(r.q, w);
  }
};

// Digits 0, 1 or 2 of four bytes that hold five each as a fraction of 256; `power` is 3 to the digit's number.
__device__ __forceinline__ uint32_t ternary_digits(uint32_t bytes, uint32_t power) {
  const uint32_t even = ((bytes & 0x00FF00FFu) * power & 0x00FF00FFu) * 3u;  // digits in the upper bytes of half words
  const uint32_t odd = (__byte_perm(bytes, 0, 0x4341) * power & 0x00FF00FFu) * 3u;
  return __byte_perm(even, odd, 0x7351);
}

struct TQ1_0 : layout::TQ1_0 {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 a, b; uint2 tail; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const bool early = (unit & 7) < 5;
    const uint8_t* first = in_plane<CODES_BYTES>(base, g, CODES_PLANE, row, unit / 8);
    const uint8_t* later = in_plane<LATER_BYTES>(base, g, LATER_PLANE, row, unit / 8);
    return {load_as<uint4>(early ? first : later), load_as<uint4>(early ? first + 16 : later),
            load_as<uint2>(in_plane<TAIL_BYTES>(base, g, TAIL_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.tail.y);
    const uint32_t u = unit & 7;  // digits of its halves: 00 11 22 33 44 01 23 4 and the last four bytes
    const uint32_t first = __byte_perm(0x1B090301u, 0x51090151u, u) & 255u, next = __byte_perm(0x1B090301u, 0x011B0351u, u) & 255u;
    const uint32_t a[4] = {r.a.x, r.a.y, r.a.z, r.a.w}, b[4] = {r.b.x, r.b.y, r.b.z, r.b.w}, powers[4] = {1, 3, 9, 27};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      w[k] = less_bytes<1>(ternary_digits(a[k], first));
      w[k + 4] = less_bytes<1>(ternary_digits(u == 7 ? r.tail.x : b[k], u == 7 ? powers[k] : next));
    }
  }
};

// Runs of 16 elements: five digits of each of three bytes, and one of a byte that four runs share.
struct IQ1_BN : layout::IQ1_BN {
  static constexpr int SCALES = 1, LESS = 1;
  static constexpr bool MINS = false;
  struct Raw { uint32_t q[3], last; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<6>(base, g, CODES_PLANE, row, unit);
    return {{load_as<uint16_t>(at), load_as<uint16_t>(at + 2), load_as<uint16_t>(at + 4)},
            load_as<uint8_t>(in_plane<LAST_BYTES>(base, g, LAST_PLANE, row, unit / 2)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = r.d;
    const uint32_t bytes[6] = {r.q[0] & 255u, r.q[0] >> 8, r.q[1] & 255u, r.q[1] >> 8, r.q[2] & 255u, r.q[2] >> 8};
    uint32_t four[6], fifth[6];  // digits of a byte, the highest power first; the last one in byte 1
#pragma unroll
    for (int n = 0; n < 6; ++n) {
      four[n] = __byte_perm(two_digits(bytes[n], 81u | 27u << 16), two_digits(bytes[n], 9u | 3u << 16), 0x7531);
      fifth[n] = bytes[n] * 3u;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* a = four + 3 * h;
      const uint32_t* e = fifth + 3 * h;
      const uint32_t last = two_digits(r.last, unit % 2 ? (h ? 3u : 9u) : (h ? 27u : 81u));
      w[4 * h] = less_bytes<1>(a[0]);
      w[4 * h + 1] = less_bytes<1>(__byte_perm(e[0], a[1], 0x6541));
      w[4 * h + 2] = less_bytes<1>(__byte_perm(__byte_perm(a[1], e[1], 0x0053), a[2], 0x5410));
      w[4 * h + 3] = less_bytes<1>(__byte_perm(a[2], __byte_perm(e[2], last, 0x0051), 0x5432));
    }
  }
  // Digits of one byte in bytes 1 and 3; powers of 3 in the half words of `powers`.
  static __device__ __forceinline__ uint32_t two_digits(uint32_t byte, uint32_t powers) {
    return (byte * powers & 0x00FF00FFu) * 3u;
  }
};
