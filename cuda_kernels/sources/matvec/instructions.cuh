// Single instructions that the matrix-vector kernels want by name. The test that runs them on the CPU has its own
// (tests/block_on_host.hpp).
#pragma once
#ifndef UNITS_ON_HOST
#include "units/policy.cuh"

DEV void wait_for_predecessor() {   // before anything that an earlier kernel wrote is read, and before anything is written
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void allow_successor() {        // the next kernel may start; it waits for this one's end before it reads its results
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of memory that no kernel writes, in front of the wait above: loads that are not strong move past it when they are compiled.
DEV float4 load_now(const float4* at) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}

// Memory that is read soon, into L2.
DEV void prefetch(const float* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

DEV int4 shared16(uint32_t at) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
DEV int shared4(uint32_t at) { int v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at)); return v; }
DEV uint32_t shared2(uint32_t at) { uint16_t v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at)); return v; }
DEV uint32_t shared1(uint32_t at) { uint32_t v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at)); return v; }
DEV uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV int2 shared8(uint32_t at) { int2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at)); return v; }

// The constant in a register of every lane. From a uniform register, where the compiler would keep it, permutations have it moved before
// each use; so its value is made to look as if it depended on the lane.
DEV uint32_t in_register(uint32_t constant) {
  uint32_t mine, lower;
  asm volatile("mov.u32 %0, %%lanemask_eq;" : "=r"(mine));
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
  return constant | (mine & lower);
}
// To the place of the next stage. As an addition that the compiler of C++ cannot take apart: it would add a uniform multiple of BYTES to
// where all stages begin (see units/policy.cuh).
template <int BYTES> DEV void advance_address(uint32_t& at) { asm volatile("add.u32 %0, %0, %1;" : "+r"(at) : "n"(BYTES)); }
DEV float half_low(uint32_t v) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v)); return f; }
DEV float half_high(uint32_t v) { float f; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(v)); return f; }
DEV float larger(float a, float b) { float m; asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b)); return m; }   // NaN if either is
// 1 / v to the last bits; 0 from 2^126 on, infinite below 2^-126.
DEV float reciprocal(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// Unsigned bytes times signed bytes.
DEV int dp4a_us(uint32_t a, int b, int c) { int d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEV int dp4a_ss(int a, int b, int c) { int d; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }

// d += 16 rows of 32 signed bytes (or UNSIGNED ones) times 8 columns of 32 signed bytes. A lane has of rows lane / 4 and that + 8 the bytes 4 (lane % 4) to 4 (lane % 4) + 3 in a[0] and
// a[1], and the same of the upper 16 in a[2] and a[3]; so of column lane / 4 in b; and of the result columns 2 (lane % 4) and the next one.
template <bool UNSIGNED> DEV void multiply_bytes(int (&d)[4], const int (&a)[4], const int (&b)[2]) {
#define PRODUCT_OF_BYTES(TYPE)                                                                                                                   \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPE ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (UNSIGNED) PRODUCT_OF_BYTES("u8");
  else PRODUCT_OF_BYTES("s8");
#undef PRODUCT_OF_BYTES
}
// A barrier by number, of so many threads.
template <int COUNT> DEV void group_barrier(int number) { asm volatile("bar.sync %0, %1;" :: "r"(number), "n"(COUNT) : "memory"); }

// Copies from global to shared memory that continue while the thread does: started (by lanes with `wanted`, without a branch), put in groups,
// waited for but for the last PENDING groups. With `lines`, L2 takes in whole lines of 128 bytes: the
// fastest on an H200, where asking for 256 loses a tenth of the bandwidth (benchmarks/reads.py). Nobody reads weights a second time in a step,
// so L2 replaces them first; but with READ_AGAIN, for experts of several tokens, other tokens may.
#if READ_AGAIN
#define COPY_OF_WEIGHTS "cp.async.cg.shared.global"
#define WITH_POLICY ""
#define POLICY 0ull
#else
#define COPY_OF_WEIGHTS "cp.async.cg.shared.global.L2::cache_hint"
#define WITH_POLICY ", %3"
#define POLICY evict_first()
#endif
DEV void copy16(uint32_t to, const uint8_t* from, bool wanted, bool lines) {
  if (lines)
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p " COPY_OF_WEIGHTS ".L2::128B [%0], [%1], 16" WITH_POLICY ";}"
                 :: "r"(to), "l"(from), "r"((uint32_t)wanted), "l"(POLICY) : "memory");
  else
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p " COPY_OF_WEIGHTS " [%0], [%1], 16" WITH_POLICY ";}"
                 :: "r"(to), "l"(from), "r"((uint32_t)wanted), "l"(POLICY) : "memory");
}
DEV void copy16_read_again(uint32_t to, const uint8_t* from) {   // by other blocks
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

#endif
