// Codebook i-quants whose grid is ternary: IQ1_S and IQ1_M, also with one d for the whole row.
#pragma once
#include "units/grid.cuh"

// The ternary grid, moved by an eighth: eight times the values, one more or less, and scales of an eighth (which is exact).
struct MovedGrid {
  static constexpr bool MINS = false;
  using Shared = IQ1_GRID;
  static __device__ __forceinline__ void eight(uint32_t entry, bool less, int l, int (&w)[8]) {
    const uint32_t table = less ? IQ1_GRID::less(0) : IQ1_GRID::more(0);
    w[2 * l] = __byte_perm(table, 0, entry);
    w[2 * l + 1] = __byte_perm(table, 0, entry >> 16);
  }
  // Four indices: low bytes, and nibbles with three high bits and the direction of the shift.
  static __device__ __forceinline__ void unit(uint32_t low, uint32_t nibbles, int (&w)[8]) {
#pragma unroll
    for (int l = 0; l < 4; ++l) eight(grid_entry<IQ1_GRID>(low, l, shifted(nibbles, 4 * l, 10) & 0x1C00u), nibbles >> (4 * l + 3) & 1u, l, w);
  }
  static __device__ __forceinline__ void unit_of_one_shift(uint32_t low, uint32_t head, int (&w)[8]) {
#pragma unroll
    for (int l = 0; l < 4; ++l) eight(grid_entry<IQ1_GRID>(low, l, shifted(head, 3 * l, 10) & 0x1C00u), head >> 15, l, w);
  }
  static __device__ __forceinline__ float odd_scale(float d, uint32_t three_bits) {
    return __fmul_rn(scaled(d, 2 * (three_bits & 7u) + 1), 0.125f);
  }
};

struct IQ1_S : layout::IQ1_S, MovedGrid {
  static constexpr int SCALES = 1;
  struct Raw { uint32_t q, head, d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, HEADS_PLANE, row, unit)),
            load_as<uint16_t>(in_plane<D_BYTES>(base, g, D_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = odd_scale(half_to_float(r.d), r.head >> 12);
    unit_of_one_shift(r.q, r.head, w);
  }
};

struct IQ1_S_R4 : layout::IQ1_S_R4, MovedGrid {
  static constexpr int SCALES = 1;
  struct Raw { uint32_t q, head; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, HEADS_PLANE, row, unit)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    s[0] = odd_scale(r.d, r.head >> 12);
    unit_of_one_shift(r.q, r.head, w);
  }
};

struct IQ1_M : layout::IQ1_M, MovedGrid {
  static constexpr int SCALES = 2;
  struct Raw { uint32_t q, nibbles; uint2 record; };  // d, and then three bits for every 16 elements
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, HEADS_PLANE, row, unit)),
            load_as<uint2>(in_plane<SCALES_BYTES>(base, g, SCALES_PLANE, row, unit / 8))};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int unit_number, int (&w)[8], float (&s)[2], float (&)[2]) {
    const uint32_t six = uint32_t((uint64_t(r.record.y) << 32 | r.record.x) >> (16 + 6 * (unit_number & 7)));
    const float d = half_to_float(r.record.x & 0xFFFFu);
    s[0] = odd_scale(d, six);
    s[1] = odd_scale(d, six >> 3);
    unit(r.q, r.nibbles, w);
  }
};

struct IQ1_M_R4 : layout::IQ1_M_R4, MovedGrid {
  static constexpr int SCALES = 2;
  struct Raw { uint32_t q, nibbles, scales; float d; };
  static __device__ __forceinline__ Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit) {
    return {load_as<uint32_t>(of_unit<4>(base, g, CODES_PLANE, row, unit)), load_as<uint16_t>(of_unit<2>(base, g, HEADS_PLANE, row, unit)),
            load_as<uint8_t>(of_unit<1>(base, g, SCALES_PLANE, row, unit)),
            row_header<HEADER_BYTES>(base, g, HEADER_PLANE, row)};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, int, int (&w)[8], float (&s)[2], float (&)[2]) {
    const float d = __fmul_rn(r.d, 0.125f);
    s[0] = scaled(d, r.scales & 15u);
    s[1] = scaled(d, r.scales >> 4);
    unit(r.q, r.nibbles, w);
  }
};
