// Formats: how a lane multiplies its granule of a row of weights, in shared memory as it lay in its planes, with activations in 8 bits.
//
//   G                    elements of a granule: 16, 32 or 64
//   FLOAT_SUMS, SUM0, SUM1, SUM   which sums of activations are in their records (matvec/common.cuh)
//   struct Lane          what is the same in all steps of a lane
//   struct Raw, load     bytes of a granule, from a stage (matvec/ring.cuh)
//   struct Weights, prepare   signed bytes for dp4a and scales: once for all rows of activations
//   struct Input, input  a granule of activations
//   dot                  their product, float32
//   ROW_FACTOR, row_factor    whether a row has its own factor, which is read once, and not part of a stage: planes from STAGED on
//
// Sums of products of bytes are exact in int32, and so are they times a group's scale as far as that is an integer of 8 bits.
// `Generic` does it for every type by its unit (units/). Types that matter most have their own, with less arithmetic per weight: at
// 4.3 TB/s an H200's multiprocessor gets 33 weights of 4 bits per clock, and does 64 integer operations.
#include "matvec/common.cuh"

template <class T> struct Planes : T {
  // Of a row, and of `elements` elements of it.
  CONST int row_bytes(int p) { return T::plane_per_row(p) ? T::plane_bytes(p) : COLS / T::BLOCK * T::plane_bytes(p); }
  CONST int bytes(int p, int elements) { return T::plane_per_row(p) ? T::plane_bytes(p) : elements / T::BLOCK * T::plane_bytes(p); }
  static constexpr int STAGED = T::PLANES;
  static constexpr bool ROW_FACTOR = false;
  DEV float row_factor(const uint8_t*, int64_t, int64_t) { return 1; }
};

struct Stage { uint32_t at[MAX_PLANES]; };   // where the planes' pieces of a row of weights are in shared memory

// Of formats with G == 32: words of 32 activations and their record.
struct Input32 { int4 a, b, record; };
DEV Input32 input32(uint32_t words, uint32_t records, int step) {
  constexpr int PART = 16 * 32 * STEPS;
  return {shared16(words + 512 * step), shared16(words + PART + 512 * step), shared16(records + 512 * step)};
}

// The units' own unpacking.
template <class T> struct Generic : Planes<T> {
  static constexpr int G = 32, SUM0 = 1, SUM1 = 1, SUM = 1;
  static constexpr bool FLOAT_SUMS = true;
  struct Lane { __device__ __forceinline__ Lane(int) {} };
  typedef typename T::Raw Raw;
  DEV Raw load(const Stage& s, int step, int lane) {
    Geometry g;
    g.blocks = COLS / T::BLOCK;
    g.units = COLS / 32;
    #pragma unroll
    for (int p = 0; p < T::PLANES; p++) g.plane[p] = s.at[p] - shared_address(shared_memory);
    return T::load(shared_memory, g, 0, 32 * step + lane);   // UNITS_IN_SHARED
  }
  struct Weights { int w[8]; float s[2], m[2]; };
  DEV Weights prepare(const Raw& r, const Lane&, int lane) {
    Weights w;
    T::unpack(r, lane, w.w, w.s, w.m);   // a step begins at a block of 256
    return w;
  }
  typedef Input32 Input;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32(words, records, step); }
  DEV float dot(const Weights& w, const Input& x) {
    int first = 0, second = 0;
    first = dp4a_ss(w.w[0], x.a.x, first); first = dp4a_ss(w.w[1], x.a.y, first);
    first = dp4a_ss(w.w[2], x.a.z, first); first = dp4a_ss(w.w[3], x.a.w, first);
    if (T::SCALES == 1) second = first;
    second = dp4a_ss(w.w[4], x.b.x, second); second = dp4a_ss(w.w[5], x.b.y, second);
    second = dp4a_ss(w.w[6], x.b.z, second); second = dp4a_ss(w.w[7], x.b.w, second);
    float scale = __int_as_float(x.record.x);
    float v = T::SCALES == 1 ? w.s[0] * (float)second : w.s[0] * (float)first + w.s[1] * (float)second;
    v *= scale;
    if (T::MINS) {
      if (T::SCALES == 1) v -= w.m[0] * __int_as_float(x.record.w);
      else v -= w.m[0] * __int_as_float(x.record.y) + w.m[1] * __int_as_float(x.record.z);
    }
    return UnitFactor<T>::value != 1.0f ? v * UnitFactor<T>::value : v;
  }
};

template <class T> struct Format : Generic<T> {};   // specialised in formats/


// The 16 values of IQ4_NL, IQ4_K and their kin: the first eight are negative, the others positive. So two lookups of eight do it, each
// with 0 for the other's codes (a selector with bit 3 set repeats a sign bit), and one product more instead of a third lookup.
// `minus` holds the negated values of codes 0..7.
struct SignedTable {
  uint32_t minus, plus;
  CONST uint32_t negated(uint32_t word) { return ((~word & 0x7F7F7F7Fu) + 0x01010101u) ^ (~word & 0x80808080u); }
  __device__ __forceinline__ SignedTable() : minus(in_register(negated(IQ4NL_TABLE::word(0)))), plus(in_register(IQ4NL_TABLE::word(2))) {}
  __device__ __forceinline__ uint32_t low(uint32_t codes) const { return permute(minus, negated(IQ4NL_TABLE::word(1)), codes); }
  __device__ __forceinline__ uint32_t high(uint32_t flipped) const { return permute(plus, IQ4NL_TABLE::word(3), flipped); }
};

// 32 codes of 4 bits as dp4a wants them: as the two parts above where they are multiplied once or twice (USES), else as whole bytes.
struct Signed32 {
  static constexpr bool PARTS = USES <= 2;
  uint32_t w[PARTS ? 16 : 8];
  __device__ __forceinline__ void unpack(const uint4& q, const SignedTable& t) {
    const uint32_t codes[4] = {q.x, q.y, q.z, q.w};
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      if (PARTS) {
        uint32_t flipped = codes[k] ^ 0x88888888u;
        w[4 * k] = t.low(codes[k]);
        w[4 * k + 1] = t.high(flipped);
        w[4 * k + 2] = t.low(codes[k] >> 16);
        w[4 * k + 3] = t.high(flipped >> 16);
      } else {
        const uint32_t whole[4] = {IQ4NL_TABLE::word(0), IQ4NL_TABLE::word(1), IQ4NL_TABLE::word(2), IQ4NL_TABLE::word(3)};
        uint2 both = lookup16(codes[k], whole);
        w[(2 * k) % 8] = both.x;
        w[(2 * k + 1) % 8] = both.y;
      }
    }
  }
  // first + products of the first (second) 16.
  __device__ __forceinline__ int dot(int half, const int4& x, int first) const {
    if (PARTS) {
      const uint32_t* v = w + 8 * half;
      int minus = dp4a_ss(v[0], x.x, 0), plus = dp4a_ss(v[1], x.x, first);
      minus = dp4a_ss(v[2], x.y, minus); plus = dp4a_ss(v[3], x.y, plus);
      minus = dp4a_ss(v[4 % 16], x.z, minus); plus = dp4a_ss(v[5 % 16], x.z, plus);
      minus = dp4a_ss(v[6 % 16], x.w, minus); plus = dp4a_ss(v[7 % 16], x.w, plus);
      return plus - minus;
    }
    const uint32_t* v = w + 4 * half;
    first = dp4a_ss(v[0], x.x, first); first = dp4a_ss(v[1], x.y, first);
    first = dp4a_ss(v[2], x.z, first); return dp4a_ss(v[3], x.w, first);
  }
};
