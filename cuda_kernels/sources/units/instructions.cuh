// Single instructions and loads that units want by name. The test that compiles unit headers for the CPU has its own.
#pragma once

#ifndef UNITS_ON_HOST

__device__ __forceinline__ float half_to_float(uint32_t bits) {
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
  return value;
}

// Two floats to two halves in a word, the first one low; rounded to nearest even, too large becomes infinity.
__device__ __forceinline__ uint32_t to_halves(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selectors) {  // unlike __byte_perm keeps bit 3 of a
  uint32_t r;                                                                                  // selector: repeat the sign
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selectors));
  return r;
}

// A constant in a register of every lane. From a uniform register, where the compiler would keep it, permutations have it moved before
// each use; so its value is made to look as if it depended on the lane.
__device__ __forceinline__ uint32_t held(uint32_t constant) {
  uint32_t mine, lower;
  asm("mov.u32 %0, %%lanemask_eq;" : "=r"(mine));
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
  return constant | (mine & lower);
}

// Bit by bit the function of three that has this table of truth, as `lop3` counts it: for a, b, c of 0xF0, 0xCC, 0xAA it gives TRUTH.
template <int TRUTH>
__device__ __forceinline__ uint32_t logic(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(TRUTH));
  return r;
}

// The lower half of a word times byte 0 of `by`, and the upper half times byte 1, and `more`.
__device__ __forceinline__ uint32_t dot_of_halves(uint32_t halves, uint32_t by, uint32_t more) {
  uint32_t sum;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(halves), "r"(by), "r"(more));
  return sum;
}

__device__ __forceinline__ uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t c) {  // unsigned ones
  uint32_t d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The upper half of a word and `more`, on the pipe of shifts. As one block it keeps what was masked before as it is.
__device__ __forceinline__ uint32_t shifted_half(uint32_t word, uint32_t more) {
  uint32_t sum;
  asm("{.reg .u32 h; shr.u32 h, %1, 16; add.u32 %0, h, %2;}" : "=r"(sum) : "r"(word), "r"(more));
  return sum;
}

// Per byte, |a - b| of unsigned ones.
__device__ __forceinline__ uint32_t distances(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0));
  return d;
}

__device__ __forceinline__ uint32_t to_bfloats(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Two halves in a word: a + b, and a * b + c, each rounded once.
__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

#ifndef UNITS_IN_SHARED  // the matrix-vector kernels bring packed rows to shared memory first

// Weights are read once: they do not stay in L1. What is next to them is wanted soon: L2 fetches whole lines.
__device__ __forceinline__ uint4 load16(const uint8_t* at) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

__device__ __forceinline__ uint2 load8(const uint8_t* at) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}

// What several threads share, of 1 to 16 bytes.
template <class T>
__device__ __forceinline__ T load_shared_by_threads(const uint8_t* at) {
  return __ldg(reinterpret_cast<const T*>(at));
}

#else

__device__ __forceinline__ uint4 load16(const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); }
__device__ __forceinline__ uint2 load8(const uint8_t* at) { return *reinterpret_cast<const uint2*>(at); }
template <class T>
__device__ __forceinline__ T load_shared_by_threads(const uint8_t* at) { return *reinterpret_cast<const T*>(at); }

#endif
#endif
