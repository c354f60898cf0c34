// A thread block of CUDA on the CPU, for g++, with what matrix-vector products need.
//
// Copies to shared memory that continue next to a thread (cp.async) arrive as late as possible, and
// their destination is overwritten when they start. So a missing wait, or a slot that is filled
// while it is still read, gives wrong results.
#pragma once
#include <vector>
#include "fibers_on_host.hpp"
#define threadIdx units_thread
#define blockDim units_block
#define __syncthreads units_barrier
#include "units_on_host.hpp"
#undef threadIdx
#undef blockDim
#undef __syncthreads

#define __global__
#define __launch_bounds__(...)
#define __align__(n)
#define __restrict__

struct dim3_ { int x, y; };
static dim3_ threadIdx, blockDim, blockIdx, gridDim;
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
inline float __int_as_float(int v) { return __uint_as_float(v); }
inline int __float_as_int(float v) { return __float_as_uint(v); }
inline int __float2int_rn(float v) { return int(lrintf(v)); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
template <class T> inline T __ldcg(const T* at) { return *at; }

constexpr int SHARED_MEMORY = 227 << 10;
alignas(256) uint8_t shared_memory[SHARED_MEMORY + 4096];   // after the end is what must stay as it is

struct Copy { uint32_t to; const uint8_t* from; };
typedef std::vector<Copy> Group;
static std::vector<Group> copies[MOST_FIBERS];   // of each thread; the last group is open
struct Overlap { bool waited, early, late; };    // has waited for the launch before; has let the next one start before, and after that
static Overlap overlaps[MOST_FIBERS];            // of each thread of the last block
extern "C" bool starts_early(int thread) { return overlaps[thread].early; }
extern "C" bool starts_late(int thread) { return overlaps[thread].late; }

inline void __syncwarp() { wait_for_warp(true); }
inline void __syncthreads() { wait_for_block(); }
UNSEEN static void set_index(int thread) { threadIdx.x = thread; }

// body() by `threads` threads of one block. False if some wait at a barrier that others have left out.
template <class F> static bool run_block(int threads, F body) {
  for (int t = 0; t < threads; ++t) {
    copies[t].assign(1, {});
    overlaps[t] = {};
  }
  return run_threads(threads, (blockIdx.x + blockIdx.y) % 2, body, set_index);
}

template <class T> inline T __shfl_sync(uint32_t, T v, int from) {
  return exchange(v, [=](const T (&w)[32], int) { return w[from & 31]; });
}
inline uint32_t __ballot_sync(uint32_t, int v) {
  return exchange(v, [](const int (&w)[32], int) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(w[lane] != 0) << lane;
    return bits;
  });
}
template <class T> inline T __shfl_xor_sync(uint32_t, T v, int by) {
  return exchange(v, [=](const T (&w)[32], int lane) { return w[lane ^ by]; });
}

// What matvec/instructions.cuh has.
inline void wait_for_predecessor() { overlaps[threadIdx.x].waited = true; }
inline void allow_successor() {
  Overlap& mine = overlaps[threadIdx.x];
  (mine.waited ? mine.late : mine.early) = true;
}
inline float4 load_now(const float4* at) { return *at; }
inline void prefetch(const float*) {}
inline uint32_t shared_address(const void* p) { return uint32_t((const uint8_t*)p - shared_memory); }
template <class T> inline T shared_as(uint32_t at) {
  if (at + sizeof(T) > SHARED_MEMORY) __builtin_trap();
  return aligned_load<T>(shared_memory + at);
}
inline int4 shared16(uint32_t at) { return shared_as<int4>(at); }
inline int2 shared8(uint32_t at) { return shared_as<int2>(at); }
inline int shared4(uint32_t at) { return shared_as<int>(at); }
inline uint32_t shared2(uint32_t at) { return shared_as<uint16_t>(at); }
inline uint32_t shared1(uint32_t at) { return shared_as<uint8_t>(at); }
inline uint32_t in_register(uint32_t constant) { return constant; }
template <int BYTES> inline void advance_address(uint32_t& at) { at += BYTES; }
inline float half_low(uint32_t v) { return half_to_float(v & 0xFFFF); }
inline float half_high(uint32_t v) { return half_to_float(v >> 16); }
inline uint32_t to_bfloats(float low, float high) {
  const auto rounded = [](float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
inline float reciprocal(float v) { return fabsf(v) >= 0x1p126f ? 0.0f : 1.0f / v; }
inline float larger(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline int dp4a_ss(uint32_t a, int b, int c) { return __dp4a(a, b, c); }
inline int dp4a_us(uint32_t a, int b, int c) {
  for (int j = 0; j < 4; ++j) c += int(a >> (8 * j) & 255) * int(int8_t(b >> (8 * j)));
  return c;
}
template <bool UNSIGNED> inline void multiply_bytes(int (&d)[4], const int (&a)[4], const int (&b)[2]) {
  struct Given { int a[4], b[2]; };
  exchange(Given{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, [&](const Given (&w)[32], int lane) {
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 8; ++k)
        d[i] = (UNSIGNED ? dp4a_us : dp4a_ss)(w[lane / 4 * 4 + k % 4].a[i / 2 + k / 4 * 2], w[(lane % 4 * 2 + i % 2) * 4 + k % 4].b[k / 4], d[i]);
    return 0;
  });
}
static unsigned group_arrivals[16];   // at barriers by number, of all blocks
template <int COUNT> inline void group_barrier(int number) {
  const unsigned mine = group_arrivals[number]++ / COUNT;
  wait_until([=] { return group_arrivals[number] / COUNT > mine; });
}
static const uint8_t *memory_begin[4], *memory_end[4];   // what copies may read
static bool is_known(const uint8_t* from, size_t bytes) {
  for (int n = 0; n < 4; ++n) if (from >= memory_begin[n] && from + bytes <= memory_end[n]) return true;
  return false;
}
inline void copy16(uint32_t to, const uint8_t* from, bool wanted, bool) {
  if (!wanted) return;
  if (!is_known(from, 16) || to % 16 || to + 16 > SHARED_MEMORY || uintptr_t(from) % 16) __builtin_trap();
  memset(shared_memory + to, 0xC5, 16);
  copies[current].back().push_back({to, from});
}
inline void copy16_read_again(uint32_t to, const uint8_t* from) { copy16(to, from, true, true); }
inline void commit_copies() { copies[current].emplace_back(); }
template <int PENDING> inline void wait_for_copies() {
  auto& groups = copies[current];
  while (groups.size() > PENDING + 1) {   // the last one is open
    for (const Copy& c : groups.front()) memcpy(shared_memory + c.to, c.from, 16);
    groups.erase(groups.begin());
  }
}
