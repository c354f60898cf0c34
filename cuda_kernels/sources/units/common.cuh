// What every unit header builds on.
//
// A unit is 32 consecutive elements of a row of weights. For each type there is a struct, named as the type, with
//
//   static constexpr int SCALES;    scales per unit: 1, or 2 (one per 16 elements)
//   static constexpr bool MINS;     whether something is taken off: value = s * w - m
//   struct Raw;                     a unit's bytes in registers
//   static Raw load(const uint8_t* base, const Geometry& g, int64_t row, int unit);     loads only, as wide as possible
//   static void unpack(const Raw&, int unit, int (&w)[8], float (&s)[2], float (&m)[2]);
//
// w are 32 signed bytes in element order, four to a word: element 4k+j is byte j of w[k], ready for __dp4a. s[g] and m[g] belong to
// elements 16g to 16g+15; with SCALES == 1 only index 0 is set, without MINS m is not set. s is rounded as formats/codecs do it, so that
// __fsub_rn(__fmul_rn(s, w), m) has the bits of formats.codecs.codec.decode(..., as_weights=True). Optional:
//
//   static constexpr float FACTOR;  multiplies every value at last (trellis types)
//   static constexpr bool OWN;      then decode(raw, unit, v) gives the exact values, where s * w - m has other bits (-0 and the like)
//   static constexpr bool FLOATS;   then there is `decode` only, as the values are not integers times a scale
//   bfloats(raw, unit, uint32_t (&pairs)[16]);   the values in bf16, if all are exact in it: fewer instructions than rounding floats (sm_90)
//   using Sixteen, codes(raw), terms(raw, unit, s, c);   codes of 4 bits by `nibbles`, four words, as indices of a table of 16 signed bytes:
//                                   value = s[g] * Sixteen's value + c[g] for elements 16g to 16g+15, c in units of s (tensor cores)
//   using Shared;                   a table that unpack reads in shared memory: kernels call prepare_unit<T>() before
//
// Kernels that multiply integers (PRODUCTS is true: the matrix-vector kernels) leave to sums of activations what many codes have in common.
// There `unpack` may give other numbers, and says which:
//
//   static constexpr int LESS;      w are unsigned bytes, LESS too large (`less_bytes`)
//   static constexpr int SECOND, halves(raw, unit);   w are all of the table's first half; the second half is SECOND more. Bits 0 and 1
//                                   of `halves` are those of elements 0..15 and 16..31 (with SCALES == 1 bit 0 is for all)
//   static constexpr int PARTS, parts(raw, unit, int (&w)[PARTS][8], s);   the sum of several signed bytes instead of one (of PARTS == 2:
//                                   the first less the second), where that takes fewer instructions than joining them
//   SIZES, sizes(raw, w), signs(raw);   with WHOLE: bytes 0 to 127 without their signs, and a word of these: bit l of its nibbles is set for the
//                                   elements 8l to 8l + 7 that are negative. Products take an activation or what is there negated
//   SPREAD, word(raw, e), scale(raw, unit);   instead of w, bytes whose sum is value e and SPREAD: multiplied by four times the activation
//   WHOLE, whole(raw, unit)         with SIZES or SPREAD: an integer that multiplies the sum of products instead of `s`, and what they both
//                                   lack. All sums times it are below 2^31
//   HEADER_PLANE                    what a row's header holds (of 2 bytes: f16, of 4: float32) is a factor of the row's sum: `row_header` is 1
//
// Matrices are packed (see layouts/table.py): `base` is the allocation, aligned to 256 bytes, `g` comes from T::geometry(rows, cols).
#pragma once

typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

constexpr int MAX_PLANES = 6;

#if defined(UNITS_IN_SHARED) && !defined(WHOLE_VALUES)  // WHOLE_VALUES: `unpack` gives the values themselves, but for a row's header
constexpr bool PRODUCTS = true;
#else
constexpr bool PRODUCTS = false;
#endif
#ifdef UNITS_IN_SHARED
constexpr bool HEADERS_APART = true;  // a row's header is left to the kernel
#else
constexpr bool HEADERS_APART = false;
#endif

// Of a packed matrix: blocks and units per row, and where its planes begin.
struct Geometry {
  int blocks, units;
  int64_t plane[MAX_PLANES];
};

__host__ __device__ constexpr int64_t align_plane(int64_t bytes) { return (bytes + 255) & ~int64_t(255); }

#include "units/instructions.cuh"

template <class T>
__device__ __forceinline__ T load_as(const uint8_t* at) {
  return load_shared_by_threads<T>(at);
}

// Where block `block` of a row is in a plane of `BYTES` per block, and what a row has in a plane of `BYTES` per row.
template <int BYTES>
__device__ __forceinline__ const uint8_t* in_plane(const uint8_t* base, const Geometry& g, int plane, int64_t row, int block) {
  return base + g.plane[plane] + (row * g.blocks + block) * BYTES;
}

// Where a unit is in a plane of `BYTES` per unit.
template <int BYTES>
__device__ __forceinline__ const uint8_t* of_unit(const uint8_t* base, const Geometry& g, int plane, int64_t row, int unit) {
  return base + g.plane[plane] + (row * g.units + unit) * BYTES;
}

template <int BYTES>
__device__ __forceinline__ const uint8_t* of_row(const uint8_t* base, const Geometry& g, int plane, int64_t row) {
  return base + g.plane[plane] + row * BYTES;
}

__device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }

// The integer n as a float, for |n| < 2^22, by an addition instead of a conversion (which runs at a quarter of the pace).
__device__ __forceinline__ float small_float(int n) { return __fadd_rn(__uint_as_float(0x4B400000u + n), -12582912.0f); }

// d * n, rounded once.
__device__ __forceinline__ float scaled(float d, int n) { return PRODUCTS ? d * small_float(n) : __fmul_rn(d, small_float(n)); }

// A row's header of 2 (f16) or 4 bytes (float32).
template <int BYTES>
__device__ __forceinline__ float row_header(const uint8_t* base, const Geometry& g, int plane, int64_t row) {
  if (HEADERS_APART) return 1.0f;
  if constexpr (BYTES == 2) return half_to_float(load_as<uint16_t>(of_row<2>(base, g, plane, row)));
  else return load_as<float>(of_row<4>(base, g, plane, row));
}

// Per byte, value - N for bytes 0 <= value < 128, 0 <= N <= 128, as signed bytes.
template <int N>
__device__ __forceinline__ uint32_t minus_bytes(uint32_t bytes) { return (bytes + (128 - N) * 0x01010101u) ^ 0x80808080u; }

// The same; PRODUCTS: as they are, see LESS.
template <int N>
__device__ __forceinline__ uint32_t less_bytes(uint32_t bytes) { return PRODUCTS ? bytes : minus_bytes<N>(bytes); }

// Byte j of a word times `stride`, and `more`: a product of bytes, of which there are fewer than of shifts.
__device__ __forceinline__ uint32_t byte_times(uint32_t word, int j, uint32_t stride, uint32_t more = 0) {
  return dot_of_bytes(word, stride << (8 * j), more);
}

// Half a word, and `more`: a product of half words, of which there are fewer than of shifts.
__device__ __forceinline__ uint32_t lower_half(uint32_t word, uint32_t more) { return dot_of_halves(word, 0x0001u, more); }
__device__ __forceinline__ uint32_t upper_half(uint32_t word, uint32_t more = 0) { return dot_of_halves(word, 0x0100u, more); }

// Look-ups in tables of signed bytes, by byte permutation: codes are nibbles of a word. lookupN is for N entries; x of its result has the
// bytes for the first four codes, y for the other four.

// Four codes of 2 or 3 bits, one per nibble of the lower half of `codes`; bit 3 of each nibble is 0.
__device__ __forceinline__ uint32_t lookup8(uint32_t codes, uint32_t t0, uint32_t t1) {
  return PRODUCTS ? permute(held(t0), t1, codes) : __byte_perm(t0, t1, codes);
}

// Selectors that choose, byte by byte, the first of two words where bit 2 of the byte's nibble of `bits` is 0. Other bits are 0.
__device__ __forceinline__ uint32_t choosing(uint32_t bits) { return bits | 0x32103210u; }

// Four codes of 4 bits: `low` three bits each, and selectors by the fourth, both in the lower halves.
__device__ __forceinline__ uint32_t four_of_16(uint32_t low, uint32_t by3, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) {
  return __byte_perm(__byte_perm(t0, t1, low), __byte_perm(t2, t3, low), by3);
}

__device__ __forceinline__ uint32_t four_of_32(uint32_t low, uint32_t by3, uint32_t by4, const uint32_t* t) {
  return __byte_perm(four_of_16(low, by3, t[0], t[1], t[2], t[3]), four_of_16(low, by3, t[4], t[5], t[6], t[7]), by4);
}

__device__ __forceinline__ uint2 lookup16(uint32_t codes, const uint32_t (&t)[4]) {
  const uint32_t low = codes & 0x77777777u, by3 = choosing((codes & 0x88888888u) >> 1);
  return make_uint2(four_of_16(low, by3, t[0], t[1], t[2], t[3]), four_of_16(low >> 16, by3 >> 16, t[0], t[1], t[2], t[3]));
}

// The 32 codes of 4 bits of a unit, by `nibbles`, to bytes of a table without halves, or of its first one.
template <class TABLE>
__device__ __forceinline__ void lookup_unit(const uint4& q, int (&w)[8]) {
  const uint32_t codes[4] = {q.x, q.y, q.z, q.w}, t[4] = {TABLE::word(0), TABLE::word(1), TABLE::word(2), TABLE::word(3)};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint2 eight = lookup16(codes[k], t);
    w[2 * k] = eight.x;
    w[2 * k + 1] = eight.y;
  }
}

// `fifth`: the highest bits of the codes, in bit 2 of the nibbles.
__device__ __forceinline__ uint2 lookup32(uint32_t codes, uint32_t fifth, const uint32_t (&t)[8]) {
  const uint32_t low = codes & 0x77777777u, by3 = choosing((codes & 0x88888888u) >> 1), by4 = choosing(fifth);
  return make_uint2(four_of_32(low, by3, by4, t), four_of_32(low >> 16, by3 >> 16, by4 >> 16, t));
}

// x shifted so that bit `from` comes to bit `to`; both are known once loops are unrolled.
__device__ __forceinline__ uint32_t shifted(uint32_t x, int from, int to) { return from < to ? x << (to - from) : x >> (from - to); }

// Word n of a table in the half that is chosen; PRODUCTS: in the first one, see SECOND.
template <class TABLE, int N>
__device__ __forceinline__ void table_words(uint32_t second, uint32_t (&t)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) t[n] = second && !PRODUCTS ? TABLE::second(n) : TABLE::word(n);
}

// Byte by byte: a - b, and -a. No byte of a is less than b's.
__host__ __device__ constexpr uint32_t bytes_less(uint32_t a, uint32_t b) { return ((a | 0x80808080u) - (b & 0x7F7F7F7Fu)) ^ ((a ^ ~b) & 0x80808080u); }
__host__ __device__ constexpr uint32_t bytes_negated(uint32_t a) { return bytes_less(0, a); }

// The 32 codes of a unit by `nibbles`, as two bytes whose difference is the value, for a table of 16 of which one half is negative and the
// other is not. Two look-ups of eight, each with 0 for the codes of the other half (a selector with bit 3 set repeats a sign bit).
template <class TABLE>
__device__ __forceinline__ void signed_table_parts(const uint4& q, int (&w)[2][8]) {
  constexpr bool DOWN = int8_t(TABLE::word(0) >> 8) < 0;   // the first half is the negative one
  constexpr uint32_t A = TABLE::word(0), B = TABLE::word(1), C = TABLE::word(2), D = TABLE::word(3);
  const uint32_t codes[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t first = codes[k], second = codes[k] ^ 0x88888888u, up = DOWN ? second : first, down = DOWN ? first : second;
    constexpr uint32_t P = DOWN ? C : A, Q = DOWN ? D : B, M = bytes_negated(DOWN ? A : C), N = bytes_negated(DOWN ? B : D);
    w[0][2 * k] = permute(held(P), Q, up);
    w[0][2 * k + 1] = permute(held(P), Q, upper_half(up));
    w[1][2 * k] = permute(held(M), N, down);
    w[1][2 * k + 1] = permute(held(M), N, upper_half(down));
  }
}

// Bytes of `values`, negated where bit k of the bytes of `signs` is set, as two bytes whose difference that is.
__device__ __forceinline__ void signed_parts(uint32_t values, uint32_t signs, int k, int& value, int& taken) {
  const uint32_t negative = permute(signs << (7 - k), 0, 0xBA98);  // repeats the highest bit of each byte
  value = values ^ negative;
  taken = negative;
}

// Of the signs of a unit (see SIZES): selectors that choose, byte by byte, the second of two words where elements 8l to 8l + 3 are negative;
// those of the other four are in the upper half.
__device__ __forceinline__ uint32_t sign_selectors(uint32_t signs, int l) { return choosing(shifted(signs, l, 2) & (PRODUCTS ? held(0x44444444u) : 0x44444444u)); }

// 1 in the bytes where elements 4k to 4k + 3 are negative.
__device__ __forceinline__ uint32_t ones_of_signs(uint32_t signs, int k) {
  const uint32_t selectors = sign_selectors(signs, k / 2);
  return __byte_perm(0, 0x01010101u, k % 2 ? selectors >> 16 : selectors);
}

#include "units/traits.cuh"

// Brings the table of a type, if it has one, to shared memory, where `unpack` reads it. All threads of the block call it, once, before
// the first `unpack` of the type; no weight or activation is read, so it may come before griddepcontrol.wait.
template <class T>
__device__ __forceinline__ void prepare_unit() {
  UnitShared<T>::prepare(threadIdx.x, blockDim.x);
}

// The signed byte j of a word as a float.
__device__ __forceinline__ float byte_float(uint32_t word, int j) {
  const uint32_t biased = word ^ 0x80808080u;  // 0 .. 255
  return __fadd_rn(__uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7440u + j)), -8388736.0f);
}

// The 32 values of a unit, all bits as formats.codecs.codec.decode(..., as_weights=True) gives them.
template <class T>
__device__ __forceinline__ void decode_unit(const typename T::Raw& raw, int unit, float (&v)[32]) {
  if constexpr (UnitOwn<T>::value) {
    T::decode(raw, unit, v);
  } else {
    int w[8];
    float s[2], m[2];
    T::unpack(raw, unit, w, s, m);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int g = T::SCALES == 2 ? e / 16 : 0;
      v[e] = __fmul_rn(s[g], byte_float(w[e / 4], e % 4));
      if constexpr (T::MINS) v[e] = __fsub_rn(v[e], m[g]);
      if constexpr (UnitFactor<T>::value != 1.0f) v[e] = __fmul_rn(v[e], UnitFactor<T>::value);
    }
  }
}

#include "units/geometry.cuh"
#include "units/tables.cuh"
