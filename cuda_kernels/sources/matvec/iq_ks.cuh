// Format of IQ4_KS.
#include "matvec/formats.cuh"

template <> struct Format<IQ4_KS> : Planes<IQ4_KS> {
  static constexpr int G = 32, SUM0 = 1, SUM1 = 1, SUM = 4;   // the second half of the table is the first one plus 4
  static constexpr bool FLOAT_SUMS = false, ROW_FACTOR = true;
  static constexpr int STAGED = HEADER_PLANE;
  DEV float row_factor(uint32_t header) { return __int_as_float(header); }
  struct Lane {
    SignedTable table;
    __device__ __forceinline__ Lane(int) {}
  };
  struct Raw { int4 q; uint32_t scale; };
  DEV Raw load(const Stage& s, int step, int lane) {
    return {shared16(s.at[CODES_PLANE] + 16 * lane + 512 * step), shared1(s.at[SCALES_PLANE] + lane + 32 * step)};
  }
  struct Weights { Signed32 w; int s, e; };
  DEV Weights prepare(const Raw& r, const Lane& c, int) {
    Weights o;
    o.e = r.scale & 1;
    o.s = (int)(r.scale & 254) - 127;
    o.w.unpack(make_uint4(r.q.x, r.q.y, r.q.z, r.q.w), c.table);
    return o;
  }
  typedef Input32 Input;
  DEV Input input(uint32_t words, uint32_t records, int step) { return input32(words, records, step); }
  DEV float dot(const Weights& w, const Input& x) {
    int first = w.w.dot(0, x.a, w.e * x.record.w), second = w.w.dot(1, x.b, 0);   // independent of one another
    return __int_as_float(x.record.x) * (float)(w.s * (first + second));
  }
};
