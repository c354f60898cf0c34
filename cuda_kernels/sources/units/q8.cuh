// Signed bytes with a scale per row or per 256 elements.
#pragma once
#include "units/common.cuh"

struct SignedBytes {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 a, b; uint32_t d; };
  template <uint32_t FLIP, class RAW>
  static __device__ __forceinline__ void bytes(const RAW& r, int (&w)[8]) {
    w[0] = r.a.x ^ FLIP, w[1] = r.a.y ^ FLIP, w[2] = r.a.z ^ FLIP, w[3] = r.a.w ^ FLIP;
    w[4] = r.b.x ^ FLIP, w[5] = r.b.y ^ FLIP, w[6] = r.b.z ^ FLIP, w[7] = r.b.w ^ FLIP;
  }
};

struct Q8_KV : layout::Q8_KV, SignedBytes {
  struct Raw { uint4 a, b; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<32>(base, g, CODES_PLANE, row, unit);
    return {load16(at), load16(at + 16), row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = r.d;
    bytes<0u>(r, w);
  }
};

struct Q8_K_R8 : layout::Q8_K_R8, SignedBytes {
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<32>(base, g, CODES_PLANE, row, unit);
    return {load16(at), load16(at + 16), load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    bytes<0u>(r, w);
  }
};

// 128 is added to the stored codes, and 128 * d taken off the products: zeros are +0.
struct Q8_K_R16 : layout::Q8_K_R16, SignedBytes {
  static constexpr bool OWN = true;
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    const uint8_t* at = of_unit<32>(base, g, CODES_PLANE, row, unit);
    return {load16(at), load16(at + 16), load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = half_to_float(r.d);
    bytes<0x80808080u>(r, w);
  }
  static __device__ __forceinline__ void decode(const Raw& r, int unit, float (&v)[32]) {
    int w[8];
    float s[2], m[2];
    unpack(r, unit, w, s, m);
#pragma unroll
    for (int e = 0; e < 32; ++e) v[e] = __fsub_rn(__fmul_rn(s[0], __fadd_rn(byte_float(w[e / 4], e % 4), 128.0f)), __fmul_rn(128.0f, s[0]));
  }
};
