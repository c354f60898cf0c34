// Formats of F32, F16 and BF16. A granule is 16 bytes of weights; activations stay float32, and so are products.
#include "matvec/formats.cuh"

template <class T> struct Floats : Planes<T> {
  static constexpr bool FLOATS = true;
  static constexpr int G = 16 / T::VALUES_BYTES;
  struct Lane { __device__ __forceinline__ Lane(int) {} };
  struct Raw { uint32_t word[4]; };
  DEV Raw load(const Stage& s, int step, int lane) {
    const int4 v = shared16(s.at[T::VALUES_PLANE] + 16 * lane + 512 * step);
    return {{(uint32_t)v.x, (uint32_t)v.y, (uint32_t)v.z, (uint32_t)v.w}};
  }
  typedef Raw Weights;
  DEV Weights prepare(const Raw& r, const Lane&, int) { return r; }
  struct Input { float x[G]; };
  DEV Input input(uint32_t words, uint32_t, int step) {
    Input in;
    #pragma unroll
    for (int q = 0; q < G / 4; q++) {
      const int4 v = shared16(words + q * (16 * 32 * STEPS) + 512 * step);
      in.x[4 * q] = __int_as_float(v.x), in.x[4 * q + 1] = __int_as_float(v.y);
      in.x[4 * q + 2] = __int_as_float(v.z), in.x[4 * q + 3] = __int_as_float(v.w);
    }
    return in;
  }
  DEV float dot(const Weights& w, const Input& in) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (G == 4) sum = fmaf(__uint_as_float(w.word[i]), in.x[i], sum);
      else sum = fmaf(T::high(w.word[i]), in.x[2 * i + 1], fmaf(T::low(w.word[i]), in.x[2 * i], sum));
    }
    return sum;
  }
};

template <> struct Format<F32> : Floats<F32> {};
template <> struct Format<F16> : Floats<F16> {};
template <> struct Format<BF16> : Floats<BF16> {};
