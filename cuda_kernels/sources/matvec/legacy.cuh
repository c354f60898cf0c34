// Format of Q8_0: 16 codes to a lane, so that neighbours load neighbouring bytes.
#include "matvec/formats.cuh"

template <> struct Format<Q8_0> : Planes<Q8_0> {
  static constexpr int G = 16, SUM0 = 1, SUM1 = 1, SUM = 1;
  static constexpr bool FLOAT_SUMS = false;
  struct Lane { __device__ __forceinline__ Lane(int) {} };
  struct Raw { int4 q; uint32_t d; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[CODES_PLANE] + 16 * lane + 512 * step), shared2(s.at[D_PLANE] + (lane >> 1) * 2 + 32 * step)};
  }
  struct Weights { int4 w; float d; };
  DEV Weights prepare(const Raw& r, const Lane&, int) { return {r.q, half_low(r.d)}; }
  struct Input { int4 x; float scale; };
  DEV Input input(uint32_t words, uint32_t records, int step) {
    return {shared16(words + 512 * step), __int_as_float(shared4(records + 256 * step))};
  }
  DEV float dot(const Weights& w, const Input& x) {
    int v = dp4a_ss(w.w.x, x.x.x, 0);
    v = dp4a_ss(w.w.y, x.x.y, v);
    v = dp4a_ss(w.w.z, x.x.z, v);
    v = dp4a_ss(w.w.w, x.x.w, v);
    return w.d * x.scale * (float)v;
  }
};
