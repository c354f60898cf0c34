// Codebook i-quants, whose codes are entries of a grid, in shared memory (see `prepare_unit` in common.cuh); and IQ4_XS.
#pragma once
#include "units/common.cuh"
#include "units/grids.cuh"

// Bytes of `values`, none of which is 0, negated where bit k of the bytes of `signs` is set.
__device__ __forceinline__ uint32_t with_signs(uint32_t values, uint32_t signs, int k) {
  const uint32_t ones = signs >> k & 0x01010101u;
  return (values ^ ones * 255u) + ones;
}

// The entry whose number is byte l of a word, and `more`, the higher bits of the number times the bytes of an entry.
template <class GRID>
__device__ __forceinline__ uint32_t grid_entry(uint32_t numbers, int l, uint32_t more = 0) {
  return GRID::at(byte_times(numbers, l, GRID::ENTRY_BYTES, GRID::ALIGNED ? more | GRID::address() : more + GRID::address()));
}

template <class GRID>
__device__ __forceinline__ void eight_parts(uint32_t entry, uint32_t signs, int l, int (&w)[2][8]) {
  signed_parts(permute(held(GRID::value(0)), 0, entry), signs, 2 * l, w[0][2 * l], w[1][2 * l]);
  signed_parts(permute(held(GRID::value(0)), 0, upper_half(entry)), signs, 2 * l + 1, w[0][2 * l + 1], w[1][2 * l + 1]);
}

// The signs of a unit from those of seven of eight elements: the number of negative ones is even. Four other bits are in the places of
// the missing ones: bits 25, 27, 29 and 31.
__device__ __forceinline__ uint32_t even_signs(uint32_t word) {
  const uint32_t known = word & 0x55FFFFFFu, halves = known ^ known >> 16, sums = halves ^ halves >> 8;
  return known | ((sums ^ sums >> 1) & 0x55u) << 25;
}

__device__ __forceinline__ uint32_t other_bits(uint32_t word) {
  const uint32_t apart = word >> 25 & 0x55u, pairs = (apart | apart >> 1) & 0x33u;
  return (pairs | pairs >> 2) & 15u;
}

// Four or eight elements of a grid.
template <class GRID>
__device__ __forceinline__ uint32_t grid_values(uint32_t entry) {
  return PRODUCTS ? permute(held(GRID::value(0)), GRID::value(1), entry) : __byte_perm(GRID::value(0), GRID::value(1), entry);
}

template <class GRID>
__device__ __forceinline__ void signed_eight(uint32_t index, uint32_t signs, int l, int (&w)[8]) {
  const uint32_t entry = GRID::entry(index);
  w[2 * l] = with_signs(__byte_perm(GRID::value(0), 0, entry), signs, 2 * l);
  w[2 * l + 1] = with_signs(__byte_perm(GRID::value(0), 0, entry >> 16), signs, 2 * l + 1);
}

// d * (n + 1/2) * FRACTION, where FRACTION is a power of two.
__device__ __forceinline__ float half_more(float d, uint32_t n, float fraction) {
  return __fmul_rn(__fmul_rn(d, small_float(n) + 0.5f), fraction);
}

struct IQ2_XXS : layout::IQ2_XXS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  using Shared = IQ2_XXS_GRID;
  struct Raw { uint2 q; uint32_t d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    s[0] = half_more(half_to_float(r.d), other_bits(r.q.y), 0.25f);
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.q.y);
#pragma unroll
    for (int l = 0; l < 4; ++l) signed_eight<IQ2_XXS_GRID>(r.q.x >> (8 * l) & 255u, signs, l, w);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.q.y);
#pragma unroll
    for (int l = 0; l < 4; ++l) eight_parts<IQ2_XXS_GRID>(grid_entry<IQ2_XXS_GRID>(r.q.x, l), signs, l, w);
  }
};

struct IQ2_XS : layout::IQ2_XS {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  using Shared = IQ2_XS_GRID;
  struct Raw { uint2 q; uint32_t scales, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    s[0] = half_more(half_to_float(r.d), r.scales & 15u, 0.25f);
    s[1] = half_more(half_to_float(r.d), r.scales >> 4, 0.25f);
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.q.y);
#pragma unroll
    for (int l = 0; l < 4; ++l) signed_eight<IQ2_XS_GRID>((r.q.x >> (8 * l) & 255u) | (r.q.y >> (17 + 2 * l) & 256u), signs, l, w);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.q.y);
#pragma unroll
    for (int l = 0; l < 4; ++l)
      eight_parts<IQ2_XS_GRID>(grid_entry<IQ2_XS_GRID>(r.q.x, l, shifted(r.q.y, 25 + 2 * l, 10) & 0x400u), signs, l, w);
  }
};

struct IQ2_S : layout::IQ2_S {
  static constexpr int SCALES = 2;
  static constexpr bool MINS = false;
  using Shared = IQ2_S_GRID;
  struct Raw { uint2 q; uint32_t scales, d; };  // scales, and then the high bits of the indices
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, SCALES_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    s[0] = half_more(half_to_float(r.d), r.scales & 15u, 0.25f);
    s[1] = half_more(half_to_float(r.d), r.scales >> 4 & 15u, 0.25f);
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    scales(r, unit, s);
#pragma unroll
    for (int l = 0; l < 4; ++l) signed_eight<IQ2_S_GRID>((r.q.x >> (8 * l) & 255u) | (r.scales >> (8 + 2 * l) & 3u) << 8, r.q.y, l, w);
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
#pragma unroll
    for (int l = 0; l < 4; ++l)
      eight_parts<IQ2_S_GRID>(grid_entry<IQ2_S_GRID>(r.q.x, l, shifted(r.scales, 8 + 2 * l, 10) & 0xC00u), r.q.y, l, w);
  }
};

struct IQ3_XXS : layout::IQ3_XXS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  using Shared = IQ3_XXS_GRID;
  struct Raw { uint2 q; uint32_t signs, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, SIGNS_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    s[0] = half_more(half_to_float(r.d), other_bits(r.signs), 0.5f);
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.signs);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t index = (k < 4 ? r.q.x : r.q.y) >> (8 * (k % 4)) & 255u;
      w[k] = with_signs(grid_values<IQ3_XXS_GRID>(IQ3_XXS_GRID::entry(index)), signs, k);
    }
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
    const uint32_t signs = even_signs(r.signs);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t entry = grid_entry<IQ3_XXS_GRID>(k < 4 ? r.q.x : r.q.y, k % 4);
      signed_parts(grid_values<IQ3_XXS_GRID>(entry), signs, k, w[0][k], w[1][k]);
    }
  }
};

struct IQ3_S : layout::IQ3_S {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  using Shared = IQ3_S_GRID;
  struct Raw { uint2 q; uint32_t signs; uint4 record; };  // ninth bits of the indices, scales, d
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load8(of_unit<8>(base, g, CODES_PLANE, row, unit)), load_as<uint32_t>(of_unit<4>(base, g, SIGNS_PLANE, row, unit)),
            load_as<uint4>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    s[0] = scaled(half_to_float(r.record.w), 2 * (r.record.z >> (4 * (unit & 7)) & 15u) + 1);
  }
  static __device__ __forceinline__ uint32_t ninth_bits(const Raw& r, int unit) {
    return permute(r.record.x, r.record.y, unit & 7);  // in the lowest byte
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t high = ninth_bits(r, unit);
    scales(r, unit, s);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t index = ((k < 4 ? r.q.x : r.q.y) >> (8 * (k % 4)) & 255u) | (high >> k & 1u) << 8;
      w[k] = with_signs(grid_values<IQ3_S_GRID>(IQ3_S_GRID::entry(index)), r.signs, k);
    }
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
    const uint32_t high = ninth_bits(r, unit);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t entry = grid_entry<IQ3_S_GRID>(k < 4 ? r.q.x : r.q.y, k % 4, shifted(high, k, 9) & 0x200u);
      signed_parts(grid_values<IQ3_S_GRID>(entry), r.signs, k, w[0][k], w[1][k]);
    }
  }
};

struct IQ4_XS : layout::IQ4_XS {
  static constexpr int SCALES = 1;
  static constexpr bool MINS = false;
  struct Raw { uint4 q; uint2 record; };  // d, high pairs of the scales; their low nibbles
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load16(of_unit<16>(base, g, CODES_PLANE, row, unit)),
            load_as<uint2>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit, int (&w)[8], float (&s)[2], float (&)[2]) {
    scales(r, unit, s);
    lookup_unit<IQ4NL_TABLE>(r.q, w);
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, float (&s)[2]) {
    const uint32_t u = unit & 7;
    const int scale = (r.record.y >> (4 * u) & 15u) | (r.record.x >> (16 + 2 * u) & 3u) << 4;
    s[0] = scaled(half_to_float(r.record.x & 0xFFFFu), scale - 32);
  }
  using Sixteen = IQ4NL_TABLE;
  static __device__ __forceinline__ uint4 codes(const Raw& r) { return r.q; }
  static __device__ __forceinline__ void terms(const Raw& r, int unit, float (&s)[2], float (&c)[2]) {
    scales(r, unit, s);
    c[0] = 0.0f;
  }
  static constexpr int PARTS = 2;
  static __device__ __forceinline__ void parts(const Raw& r, int unit, int (&w)[2][8], float (&s)[2]) {
    scales(r, unit, s);
    signed_table_parts<IQ4NL_TABLE>(r.q, w);
  }
};
