// Rows of F32, F16 and BF16 matrices, 16 bytes at a time. Macros: TYPE, WEIGHT_BYTES, COLS.
#pragma once

constexpr int E = 16 / WEIGHT_BYTES, VECTORS = COLS / E;   // weights of a vector, and vectors of a row
enum { F32, F16, BF16 };

DEV uint4 load_weights(const uint8_t* p) {
#ifdef UNITS_ON_HOST
  return *(const uint4*)p;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#endif
}

DEV float product(const uint4& w, const float* x) {
  const uint32_t v[4] = {w.x, w.y, w.z, w.w};
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    if (TYPE == F32) sum += __uint_as_float(v[i]) * x[i];
    else if (TYPE == F16) sum += half_low(v[i]) * x[2 * i] + half_high(v[i]) * x[(2 * i + 1) % E];
    else sum += __uint_as_float(v[i] << 16) * x[2 * i % E] + __uint_as_float(v[i] & 0xFFFF0000u) * x[(2 * i + 1) % E];
  }
  return sum;
}
