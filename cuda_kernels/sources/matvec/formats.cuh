// Formats: how a lane multiplies its granule of a row of weights, in shared memory as it lay in its planes, with activations in 8 bits or, of floats, in float32.
//
//   G                    elements of a granule: 4, 8, 16, 32 or 64
//   FLOAT_SUMS, SUM0, SUM1, SUM   which sums of activations are in their records (matvec/common.cuh)
//   struct Lane          what is the same in all steps of a lane
//   struct Raw, load     bytes of a granule, from a stage (matvec/ring.cuh)
//   struct Weights, prepare   signed bytes for dp4a and scales: once for all rows of activations
//   struct Input, input  a granule of activations
//   dot                  their product, float32
//   SPREAD, dots         instead: activations are in four bytes each, and a product is with several rows of weights
//   FLOATS               activations stay float32, and the words of a granule are its activations, four to an int4
//   HEADER_STAGED        whether a row's header comes with its first stage: measured, faster for headers of 2 bytes, slower for 4
//   ROW_FACTOR, row_factor    whether a row's header (the plane after the STAGED ones) is a factor of its sum, and what its bits mean
//
// Sums of products of bytes are exact in int32, and so are they times a group's scale as far as that is an integer of 8 bits.
// `Generic` does it for every type of integers by what its unit says (units/). Types that matter most have their own, with less arithmetic per weight: at
// 4.3 TB/s an H200's multiprocessor gets 33 weights of 4 bits per clock, and does 64 integer operations.
#include "matvec/common.cuh"

template <class T> struct Planes : T {
  // Of a row, and of `elements` elements of it, in a plane that is not of row headers.
  CONST int row_bytes(int p) { return COLS / T::BLOCK * T::plane_bytes(p); }
  CONST int bytes(int p, int elements) { return elements / T::BLOCK * T::plane_bytes(p); }
  static constexpr int STAGED = T::PLANES;
  static constexpr bool ROW_FACTOR = false, HEADER_STAGED = false, SPREAD = false, NEGATED = false, FLOATS = false;
  DEV float row_factor(uint32_t) { return 1; }
};

// The bits of a row's header, read once for a row. They become a number where it is needed: doing it here would wait for memory.
template <class F> DEV uint32_t row_header_bits(const uint8_t* base, int64_t stored, int64_t row) {
  if constexpr (F::ROW_FACTOR) {
    const uint8_t* at = base + F::geometry(stored, COLS).plane[F::HEADER_PLANE] + row * F::HEADER_BYTES;
    if constexpr (F::HEADER_BYTES == 2) return __ldg((const uint16_t*)at);
    else return __ldg((const uint32_t*)at);
  }
  return 0;
}

struct Stage { uint32_t at[MAX_PLANES]; };   // where the planes' pieces of a row of weights are in shared memory

// Of formats with G == 32: words of 32 activations and their record, or of that the scale alone: a quarter of the reading, which takes as
// long as the arithmetic where codes are looked up.
struct Input32 { int4 a, b, record; };
template <bool SUMS = true> DEV Input32 input32(uint32_t words, uint32_t records, int step) {
  constexpr int PART = 16 * 32 * STEPS;
  const uint32_t at = records + 512 * step;
  return {shared16(words + 512 * step), shared16(words + PART + 512 * step), SUMS ? shared16(at) : make_int4(shared4(at), 0, 0, 0)};
}

// What a type's unit says (units/common.cuh) as a format: every type has one.
template <class T> struct Generic : Planes<T> {
  static constexpr int LESS = UnitLess<T>::value, SECOND = UnitSecond<T>::value;
  static constexpr int G = 32, SUM0 = SECOND - LESS, SUM1 = SUM0, SUM = SUM0;
  static constexpr bool FLOAT_SUMS = T::MINS, ROW_FACTOR = UnitHeader<T>::value, HEADER_STAGED = UnitHeader<T>::bytes == 2;
  static constexpr int PARTS = USES <= 2 ? UnitParts<T>::value : 1;   // several parts are faster to make, and slower to multiply
  static constexpr int STAGED = T::PLANES - ROW_FACTOR;               // the header's plane is the last one
  static_assert(!(LESS && (SECOND || T::MINS || PARTS > 1)) && !(SECOND && T::MINS), "one sum of activations serves one purpose");
  static constexpr float LACKING = SPREAD_X || NEGATED_X ? UnitWhole<T>::lacking : 1.0f;
  static_assert((UnitFactor<T>::value == 1.0f && LACKING == 1.0f) || ROW_FACTOR, "a factor of all values goes with that of a row");
  struct Lane { __device__ __forceinline__ Lane(int) {} };
  typedef typename T::Raw Raw;
  DEV Raw load(const Stage& s, int step, int lane) {
    Geometry g;
    g.blocks = COLS / T::BLOCK;
    g.units = COLS / 32;
    #pragma unroll
    for (int p = 0; p < STAGED; p++) g.plane[p] = s.at[p] - shared_address(shared_memory);
    return T::load(shared_memory, g, 0, 32 * step + lane);   // UNITS_IN_SHARED
  }
  DEV float row_factor(uint32_t header) {
    if constexpr (ROW_FACTOR)
      return UnitFactor<T>::value * LACKING * (T::HEADER_BYTES == 2 ? half_low(header) : __int_as_float(header));
    return 1;
  }
  struct Weights { int w[PARTS][8]; float s[2], m[2]; uint32_t halves; };
  DEV Weights prepare(const Raw& r, const Lane&, int lane) {   // a step begins at a block of 256
    Weights w;
    if constexpr (PARTS > 1) T::parts(r, lane, w.w, w.s);
    else T::unpack(r, lane, w.w[0], w.s, w.m);
    if constexpr (SECOND != 0) w.halves = T::halves(r, lane);
    return w;
  }
  typedef Input32 Input;
  static constexpr bool TAKES_SUMS = LESS || SECOND || T::MINS;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32<TAKES_SUMS>(words, records, step); }
  DEV int of_four(int w, int x, int sum) { return LESS ? dp4a_us(w, x, sum) : dp4a_ss(w, x, sum); }
  DEV float dot(const Weights& w, const Input& x) {
    int first = 0, second = 0, taken0 = 0, taken1 = 0;
    if (LESS || SECOND) {
      const int h0 = LESS ? 1 : w.halves & 1, h1 = LESS ? 1 : w.halves >> 1;
      first = T::SCALES == 1 ? h0 * x.record.w : h0 * x.record.y;
      if (T::SCALES == 2) second = h1 * x.record.z;
    }
    #pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const bool minus = PARTS == 2 && p == 1;
      int& a = minus ? taken0 : first;
      int& b = minus ? taken1 : second;
      a = of_four(w.w[p][0], x.a.x, a); a = of_four(w.w[p][1], x.a.y, a);
      a = of_four(w.w[p][2], x.a.z, a); a = of_four(w.w[p][3], x.a.w, a);
      b = of_four(w.w[p][4], x.b.x, b); b = of_four(w.w[p][5], x.b.y, b);
      b = of_four(w.w[p][6], x.b.z, b); b = of_four(w.w[p][7], x.b.w, b);
    }
    if (PARTS == 2) first -= taken0, second -= taken1;
    const float scale = __int_as_float(x.record.x);
    float v = T::SCALES == 1 ? w.s[0] * (float)(first + second) : w.s[0] * (float)first + w.s[1] * (float)second;
    v *= scale;
    if (T::MINS) {
      if (T::SCALES == 1) v -= w.m[0] * __int_as_float(x.record.w);
      else v -= w.m[0] * __int_as_float(x.record.y) + w.m[1] * __int_as_float(x.record.z);
    }
    return v;
  }
};

// Each code is a sum of bytes, which is not worked out: the bytes are multiplied, by an activation that is there four times.
template <class T> struct Spread : Generic<T> {
  typedef Generic<T> Base;
  static constexpr int SUM0 = 0, SUM1 = 0, SUM = -UnitSpread<T>::value;
  static constexpr bool SPREAD = true;
  struct Weights { typename T::Raw raw; int scale; };
  DEV Weights prepare(const typename T::Raw& r, const typename Base::Lane&, int lane) { return {r, T::whole(r, lane)}; }
  struct Input { uint32_t words, record; };
  DEV Input input(uint32_t words, uint32_t records, int step) { return {words + 512 * step, records + 512 * step}; }
  template <int ROWS> DEV void dots(const Weights (&w)[ROWS], const Input& in, float (&v)[ROWS]) {
    const int4 record = shared16(in.record);
    int sum[ROWS][2];
    #pragma unroll
    for (int k = 0; k < ROWS; k++) sum[k][0] = record.w, sum[k][1] = 0;
    #pragma unroll
    for (int e = 0; e < 32; e += 4) {
      const int4 x = shared16(in.words + e / 4 * (16 * 32 * STEPS));
      #pragma unroll
      for (int k = 0; k < ROWS; k++) {
        sum[k][0] = dp4a_us(T::word(w[k].raw, e), x.x, sum[k][0]);
        sum[k][1] = dp4a_us(T::word(w[k].raw, e + 1), x.y, sum[k][1]);
        sum[k][0] = dp4a_us(T::word(w[k].raw, e + 2), x.z, sum[k][0]);
        sum[k][1] = dp4a_us(T::word(w[k].raw, e + 3), x.w, sum[k][1]);
      }
    }
    #pragma unroll
    for (int k = 0; k < ROWS; k++) v[k] = __int_as_float(record.x) * (float)(w[k].scale * (sum[k][0] + sum[k][1]));
  }
};

// Sizes of codes, and their signs, which choose between the four bytes of a word of activations and those of what is negated: one permutation
// and one product for four codes, where negating codes takes two of each.
template <class T> struct Signed : Generic<T> {
  typedef Generic<T> Base;
  static constexpr bool NEGATED = true;
  static_assert(T::SIZES && T::SCALES == 1 && !Base::TAKES_SUMS, "sizes, with a whole scale for all of them");
  struct Weights { int w[8], scale; uint32_t signs; };
  DEV Weights prepare(const typename T::Raw& r, const typename Base::Lane&, int lane) {
    Weights w;
    T::sizes(r, w.w);
    w.scale = T::whole(r, lane);
    w.signs = T::signs(r);
    return w;
  }
  typedef typename Spread<T>::Input Input;   // where it is: words are read when they are multiplied
  DEV Input input(uint32_t words, uint32_t records, int step) { return {words + 512 * step, records + 512 * step}; }
  template <int ROWS> DEV void dots(const Weights (&w)[ROWS], const Input& in, float (&v)[ROWS]) {
    constexpr int PART = 16 * 32 * STEPS;
    int sum[ROWS][2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int4 x = shared16(in.words + PART * half), negated = shared16(in.words + PART * (2 + half));
      #pragma unroll
      for (int k = 0; k < ROWS; k++) {
        sum[k][half] = of_eight(w[k], 2 * half, x.x, x.y, negated.x, negated.y, 0);
        sum[k][half] = of_eight(w[k], 2 * half + 1, x.z, x.w, negated.z, negated.w, sum[k][half]);
      }
    }
    const float scale = __int_as_float(shared4(in.record));
    #pragma unroll
    for (int k = 0; k < ROWS; k++) v[k] = scale * (float)(w[k].scale * (sum[k][0] + sum[k][1]));
  }
  DEV int of_eight(const Weights& w, int l, int x0, int x1, int negated0, int negated1, int sum) {
    const uint32_t selectors = sign_selectors(w.signs, l);
    sum = dp4a_ss(w.w[2 * l], permute(x0, negated0, selectors), sum);
    return dp4a_ss(w.w[2 * l + 1], permute(x1, negated1, upper_half(selectors)), sum);
  }
};

template <class T, int HOW> struct Chosen { typedef Generic<T> Format; };
template <class T> struct Chosen<T, 1> { typedef Spread<T> Format; };
template <class T> struct Chosen<T, 2> { typedef Signed<T> Format; };
template <class T> struct Format : Chosen<T, SPREAD_X ? 1 : NEGATED_X ? 2 : 0>::Format {};   // specialised in matvec/*.cuh

// Of several rows of weights, with one granule of activations.
template <class F, int ROWS> DEV void products(const typename F::Weights (&w)[ROWS], const typename F::Input& in, float (&v)[ROWS]) {
  if constexpr (F::SPREAD || F::NEGATED) F::dots(w, in, v);
  else
    #pragma unroll
    for (int k = 0; k < ROWS; k++) v[k] = F::dot(w[k], in);
}


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
        w[4 * k + 2] = t.low(upper_half(codes[k]));
        w[4 * k + 3] = t.high(upper_half(flipped));
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
