// Formats of Q4_K and Q6_K.
#include "matvec/formats.cuh"

// High nibbles stay where they are, as bytes 16 times as large: their sum of products is divided, not each of them shifted.
template <> struct Format<Q4_K> : Planes<Q4_K> {
  static constexpr int G = 32, SUM0 = 1, SUM1 = 1, SUM = 1;
  static constexpr bool FLOAT_SUMS = true;
  struct Lane {
    uint32_t unit;
    __device__ __forceinline__ Lane(int lane) : unit(lane & 7) {}
  };
  struct Raw { int4 q, s; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[CODES_PLANE] + 16 * lane + 512 * step), shared16(s.at[SCALES_PLANE] + (lane >> 3) * 16 + 64 * step)};
  }
  struct Weights { uint32_t low[4], high[4]; float scale, minimum; };
  DEV Weights prepare(const Raw& r, const Lane& c, int) {
    Weights o;
    const uint32_t q[4] = {(uint32_t)r.q.x, (uint32_t)r.q.y, (uint32_t)r.q.z, (uint32_t)r.q.w};
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      o.low[k] = q[k] & 0x0F0F0F0Fu;
      o.high[k] = q[k] & 0xF0F0F0F0u;
    }
    uint32_t low = permute(r.s.y, r.s.z, c.unit), high = (uint32_t)r.s.w >> 4 * c.unit;
    o.scale = half_low(r.s.x) * (float)(low & 63u);
    o.minimum = half_high(r.s.x) * (float)((low >> 6 & 3u) | (high & 15u) << 2);
    return o;
  }
  typedef Input32 Input;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32(words, records, step); }
  DEV float dot(const Weights& w, const Input& x) {
    int low = dp4a_us(w.low[0], x.a.x, 0), high = dp4a_us(w.high[0], x.a.y, 0);
    low = dp4a_us(w.low[1], x.a.z, low); high = dp4a_us(w.high[1], x.a.w, high);
    low = dp4a_us(w.low[2], x.b.x, low); high = dp4a_us(w.high[2], x.b.y, high);
    low = dp4a_us(w.low[3], x.b.z, low); high = dp4a_us(w.high[3], x.b.w, high);
    return w.scale * __int_as_float(x.record.x) * (float)(low + (high >> 4)) - w.minimum * __int_as_float(x.record.w);
  }
};

// The 32 that is taken off every code is 32 times the sum of the activations.
template <> struct Format<Q6_K> : Planes<Q6_K> {
  static constexpr int G = 32, SUM0 = -32, SUM1 = -32, SUM = 1;
  static constexpr bool FLOAT_SUMS = false;
  struct Lane { __device__ __forceinline__ Lane(int) {} };
  struct Raw { int4 low; int2 high; uint32_t scales, d; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[LOW_PLANE] + 16 * lane + 512 * step), shared8(s.at[HIGH_PLANE] + 8 * lane + 256 * step),
            shared2(s.at[SCALES_PLANE] + 2 * lane + 64 * step), shared2(s.at[D_PLANE] + (lane >> 3) * 2 + 8 * step)};
  }
  struct Weights { uint32_t w[8]; int s0, s1; float d; };
  DEV Weights prepare(const Raw& r, const Lane&, int) {
    Weights o;
    const uint32_t low[4] = {(uint32_t)r.low.x, (uint32_t)r.low.y, (uint32_t)r.low.z, (uint32_t)r.low.w};
    #pragma unroll
    for (int k = 0; k < 8; k++) {
      uint32_t high = k < 4 ? r.high.x : r.high.y, at = k % 4;
      uint32_t top = (at == 0 ? high << 4 : at == 1 ? high << 2 : at == 2 ? high : high >> 2) & 0x30303030u;
      o.w[k] = (k % 2 ? low[k / 2] >> 4 : low[k / 2]) & 0x0F0F0F0Fu | top;
    }
    o.s0 = (signed char)(r.scales & 255);
    o.s1 = (signed char)(r.scales >> 8);
    o.d = half_low(r.d);
    return o;
  }
  typedef Input32 Input;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32(words, records, step); }
  DEV float dot(const Weights& w, const Input& x) {
    int first = dp4a_us(w.w[0], x.a.x, x.record.y), second = dp4a_us(w.w[4], x.b.x, x.record.z);
    first = dp4a_us(w.w[1], x.a.y, first); second = dp4a_us(w.w[5], x.b.y, second);
    first = dp4a_us(w.w[2], x.a.z, first); second = dp4a_us(w.w[6], x.b.z, second);
    first = dp4a_us(w.w[3], x.a.w, first); second = dp4a_us(w.w[7], x.b.w, second);
    return w.d * __int_as_float(x.record.x) * (float)(w.s0 * first + w.s1 * second);
  }
};
