// Instructions of prompt/few.cu on the CPU. Copies arrive when they are waited for; products are done when they are issued.
#pragma once
#include "block_on_host.hpp"

#define ON_HOST
static uint8_t* const shared = shared_memory;
static bool MULTIPLIES, JOINS;   // what a launch does: blocks run one after the other, and cannot wait for each other

struct HostBarrier { uint16_t expected, left; uint32_t phase; };
static unsigned named_arrivals[16];   // at barriers by number, of this block
inline HostBarrier* host_barrier(uint32_t at) { return (HostBarrier*)(shared_memory + int32_t(at)); }
inline void barrier_init(uint32_t at, uint32_t count) {
  *host_barrier(at) = {uint16_t(count), uint16_t(count), 0};
  memset(named_arrivals, 0, sizeof named_arrivals);
}
inline void barrier_arrive(uint32_t at) {
  HostBarrier* b = host_barrier(at);
  if (!--b->left) b->left = b->expected, b->phase++;
}
inline void barrier_wait(uint32_t at, uint32_t phase) {
  wait_until([=] { return (host_barrier(at)->phase & 1) != phase; });
}
template <int THREADS> void named_sync(int number) {
  const unsigned mine = named_arrivals[number]++ / THREADS;
  wait_until([=] { return named_arrivals[number] / THREADS > mine; });
}
inline void show_barriers() {}
template <int COUNT> void fewer_registers() {}
template <int COUNT> void more_registers() {}
inline void copy_sixteen(uint32_t to, const void* from) { copy16(to, (const uint8_t*)from, true, false); }
inline void end_of_copies() { commit_copies(); }
template <int LATER> void show_copies() { wait_for_copies<LATER>(); }

inline void announce_part(uint32_t* arrived) { ++*arrived; }
inline void wait_for_parts(const uint32_t* arrived, uint32_t n) {
  if ((*arrived & 0xffff) != n) __builtin_trap();
}
inline uint32_t count_reader(uint32_t* arrived) { return ((*arrived += 65536) >> 16) - 1; }
inline void wait_for_launch_before() { wait_for_predecessor(); }
inline void let_next_launch_start() {}

inline uint32_t to_halves(float low, float high) { return rounded_half(low) | rounded_half(high) << 16; }
inline uint4 shared_sixteen(uint32_t at) { return shared_as<uint4>(at); }
// Lane 8 m + c has the address of column c of matrix m; a lane holds two columns of one of its rows.
inline void store_matrices(uint32_t at, const uint32_t (&r)[4]) {
  exchange(at, [&](const uint32_t (&to)[32], int lane) {
    for (int m = 0; m < 4; ++m)
      for (int n = 0; n < 2; ++n) {
        const uint16_t half = r[m] >> (16 * n);
        memcpy(shared_memory + to[8 * m + lane % 4 * 2 + n] + lane / 4 * 2, &half, 2);
      }
    return 0;
  });
  wait_for_warp(true);
}

// Products of a warpgroup: the first factor in registers, 16 columns in four lanes; of the second one, rows of 128 bytes where the descriptor says.
inline float half_number(uint32_t bits) { return HALF ? half_to_float(bits) : __uint_as_float(bits << 16); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING> void wgmma_wait() { __syncwarp(); }
template <int N> struct Wgmma {
  template <class D> static void run(D& d, const uint32_t (&a)[4], uint64_t b, bool add) {
    struct Given { uint32_t a[4]; };
    exchange(Given{{a[0], a[1], a[2], a[3]}}, [&](const Given (&w)[32], int lane) {
      for (int i = 0; i < N / 2; ++i) {
        const int row = i / 2 % 2, column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
        double sum = add ? d[i] : 0.0;
        for (int k = 0; k < 16; ++k) {
          uint32_t at = ((b & 0x3fff) << 4) + column / 8 * ((b >> 32 & 0x3fff) << 4) + column % 8 * 128 + 2 * k;
          at ^= (at >> 7 & 7) << 4;
          const uint32_t pair = w[lane / 4 * 4 + k % 8 / 2].a[row + k / 8 * 2];
          sum += double(half_number(pair >> (16 * (k % 2)) & 0xffff)) * half_number(shared_as<uint16_t>(at));
        }
        d[i] = float(sum);
      }
      return 0;
    });
  }
};
