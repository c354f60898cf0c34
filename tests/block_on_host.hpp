// A thread block of CUDA on the CPU, for g++: each thread is a fiber that runs to its next barrier,
// and lanes exchange data at barriers.
//
// Copies to shared memory that continue next to a thread (cp.async) arrive as late as possible, and
// their destination is overwritten when they start. So a missing wait, or a slot that is filled
// while it is still read, gives wrong results. Every other block runs its warps and lanes from the
// last to the first, so that a missing barrier is found in either direction.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>
#include <functional>
#include <vector>
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
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct float4 { float x, y, z, w; };
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
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
template <class T> inline T __ldcg(const T* at) { return *at; }

constexpr int SHARED_MEMORY = 227 << 10;
alignas(256) uint8_t shared_memory[SHARED_MEMORY + 4096];   // after the end is what must stay as it is

struct Copy { uint32_t to; const uint8_t* from; };
struct Fiber {
  ucontext_t context;
  std::vector<std::vector<Copy>> groups{1};
  void* stack;
  int waits = 0;   // 0: runs, 1: for its warp, 2: for the block, 3: has ended
  uint32_t given;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static std::function<void()> body;

static void run_fiber() { body(); fibers[current].waits = 3; swapcontext(&fibers[current].context, &scheduler); }
static void wait_in(int what) { fibers[current].waits = what; swapcontext(&fibers[current].context, &scheduler); }
inline void __syncwarp() { wait_in(1); }
inline void __syncthreads() { wait_in(2); }

// `thread_body` by `threads` threads of one block. False if some wait at a barrier that others have left out.
static bool run_block(int threads, std::function<void()> thread_body) {
  constexpr size_t STACK = 256 << 10;
  body = std::move(thread_body);
  fibers.clear();
  fibers.resize(threads);
  for (int t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    f.context.uc_stack.ss_size = STACK;
    makecontext(&f.context, run_fiber, 0);
  }
  bool good = true;
  const bool backwards = (blockIdx.x + blockIdx.y) % 2;
  for (int at_block = 0, ended = 0; ended < threads && good;) {
    at_block = ended = 0;
    for (int w = 0; w < threads / 32; ++w) {
      const int warp = backwards ? threads / 32 - 1 - w : w;
      bool go = true;
      while (go) {   // until all lanes wait for the block, or have ended
        int counts[4] = {0, 0, 0, 0};
        for (int lane = 0; lane < 32; ++lane) {
          current = 32 * warp + (backwards ? 31 - lane : lane);
          threadIdx.x = current;
          if (fibers[current].waits == 0) swapcontext(&scheduler, &fibers[current].context);
          ++counts[fibers[current].waits];
        }
        go = counts[1] == 32;
        if (go) for (int lane = 0; lane < 32; ++lane) fibers[32 * warp + lane].waits = 0;
        else if (counts[2] != 32 && counts[3] != 32) good = false;
      }
      at_block += fibers[32 * warp].waits == 2 ? 32 : 0;
      ended += fibers[32 * warp].waits == 3 ? 32 : 0;
    }
    if (good && at_block == threads) for (Fiber& f : fibers) f.waits = 0;
    else if (ended != threads) good = false;
  }
  for (Fiber& f : fibers) munmap(f.stack, STACK);
  return good;
}

template <class T> inline T exchange(T mine, int from) {
  static_assert(sizeof(T) == 4, "words are exchanged");
  memcpy(&fibers[current].given, &mine, 4);
  wait_in(1);
  T theirs;
  memcpy(&theirs, &fibers[current / 32 * 32 + (from & 31)].given, 4);
  wait_in(1);
  return theirs;
}
template <class T> inline T __shfl_sync(uint32_t, T v, int from) { return exchange(v, from); }
template <class T> inline T __shfl_xor_sync(uint32_t, T v, int by) { return exchange(v, (current & 31) ^ by); }

// What matvec/instructions.cuh has.
inline void wait_for_predecessor() {}
inline void allow_successor() {}
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
inline int dp4a_ss(int a, int b, int c) { return __dp4a(a, b, c); }
inline int dp4a_us(uint32_t a, int b, int c) {
  for (int j = 0; j < 4; ++j) c += int(a >> (8 * j) & 255) * int(int8_t(b >> (8 * j)));
  return c;
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
  fibers[current].groups.back().push_back({to, from});
}
inline void commit_copies() { fibers[current].groups.emplace_back(); }
template <int PENDING> inline void wait_for_copies() {
  auto& groups = fibers[current].groups;
  while (groups.size() > PENDING + 1) {   // the last one is open
    for (const Copy& c : groups.front()) memcpy(shared_memory + c.to, c.from, 16);
    groups.erase(groups.begin());
  }
}
