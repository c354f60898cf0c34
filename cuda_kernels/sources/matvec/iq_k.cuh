// Formats of IQ4_K and IQ2_K.
#include "matvec/formats.cuh"

// The second half of the table is the first one plus 4: a product with the sum of the activations instead of another table.
template <> struct Format<IQ4_K> : Planes<IQ4_K> {
  static constexpr int G = 32, SUM0 = 4, SUM1 = 2, SUM = 1;   // bit 1 of the halves is worth 2 already
  static constexpr bool FLOAT_SUMS = false;
  // Selectors of the unit's own byte, followed by its sign, and of the three bytes with its second scale; where that one is in them.
  struct Lane {
    SignedTable table;
    uint32_t own, four, second;
    __device__ __forceinline__ Lane(int lane)
        : own((lane & 7) * 0x1111 | 0x8880), four(lane & 4 ? 0x763 : 0x210), second(26 - 6 * (lane & 3)) {}
  };
  struct Raw { int4 q, s; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[CODES_PLANE] + 16 * lane + 512 * step), shared16(s.at[SCALES_PLANE] + (lane >> 3) * 16 + 64 * step)};
  }
  struct Weights { Signed32 w; int s0, s1, e0, e1; float d; };
  DEV Weights prepare(const Raw& r, const Lane& c, int) {
    Weights o;
    const int own = permute(r.s.z, r.s.w, c.own);
    o.s0 = own >> 2;
    o.s1 = (int)(permute(r.s.y, r.s.x, c.four) << c.second) >> 26;
    o.e0 = own & 1;
    o.e1 = own & 2;
    o.d = half_low(r.s.x);
    o.w.unpack(make_uint4(r.q.x, r.q.y, r.q.z, r.q.w), c.table);
    return o;
  }
  typedef Input32 Input;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32(words, records, step); }
  DEV float dot(const Weights& w, const Input& x) {
    int first = w.w.dot(0, x.a, w.e0 * x.record.y), second = w.w.dot(1, x.b, w.e1 * x.record.z);
    return w.d * __int_as_float(x.record.x) * (float)(w.s0 * first + w.s1 * second);
  }
};

// A granule is four groups of 16. Bit 2 of a selector is the table's half.
template <> struct Format<IQ2_K> : Planes<IQ2_K> {
  static constexpr int G = 64, SUM0 = 1, SUM1 = 1, SUM = 1;
  static constexpr bool FLOAT_SUMS = false;
  struct Lane {
    uint32_t shift, table;
    __device__ __forceinline__ Lane(int lane) : shift(16 + 4 * (lane & 3)), table(in_register(IQ2NL_TABLE::word(0))) {}
  };
  struct Raw { int4 q; uint32_t scales, head; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[CODES_PLANE] + 16 * lane + 512 * step), shared2(s.at[SCALES_PLANE] + 2 * lane + 64 * step),
            (uint32_t)shared4(s.at[HEADS_PLANE] + (lane >> 2) * 4 + 32 * step)};
  }
  struct Weights { uint32_t w[16]; int s[4]; float d; };
  DEV Weights prepare(const Raw& r, const Lane& c, int) {
    Weights o;
    const uint32_t q[4] = {(uint32_t)r.q.x, (uint32_t)r.q.y, (uint32_t)r.q.z, (uint32_t)r.q.w};
    uint32_t halves = r.head >> c.shift;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t half = k < 3 ? (halves & 1u << k) * (0x44444444u >> k) : (halves >> 3 & 1u) * 0x44444444u;
      uint32_t first = q[k] & 0x33333333u | half, next = q[k] >> 2 & 0x33333333u | half;
      o.w[4 * k] = permute(c.table, IQ2NL_TABLE::second(0), first);
      o.w[4 * k + 1] = permute(c.table, IQ2NL_TABLE::second(0), first >> 16);
      o.w[4 * k + 2] = permute(c.table, IQ2NL_TABLE::second(0), next);
      o.w[4 * k + 3] = permute(c.table, IQ2NL_TABLE::second(0), next >> 16);
      o.s[k] = (int)(r.scales >> 4 * k & 15u) - 8;
    }
    o.d = half_low(r.head);
    return o;
  }
  struct Input { int4 x[4]; int2 scale; };
  DEV Input input(uint32_t words, uint32_t records, int step) {
    constexpr int PART = 16 * 32 * STEPS;
    Input x;
    #pragma unroll
    for (int k = 0; k < 4; k++) x.x[k] = shared16(words + k * PART + 512 * step);
    x.scale = shared8(records + 256 * step);
    return x;
  }
  DEV float dot(const Weights& w, const Input& x) {
    int sum[2] = {0, 0};
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      int v = dp4a_ss(w.w[4 * k], x.x[k].x, 0);
      v = dp4a_ss(w.w[4 * k + 1], x.x[k].y, v);
      v = dp4a_ss(w.w[4 * k + 2], x.x[k].z, v);
      v = dp4a_ss(w.w[4 * k + 3], x.x[k].w, v);
      sum[k / 2] += w.s[k] * v;
    }
    return w.d * (__int_as_float(x.scale.x) * (float)sum[0] + __int_as_float(x.scale.y) * (float)sum[1]);
  }
};
