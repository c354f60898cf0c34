// Stamps: when warps pass certain points of a launch, for benchmarks/step_times.py, which defines STAMPS, the address of uint32[1024][warps][8]:
// nanoseconds of the device's timer, the lowest 32 bits. Lane 0 of each warp stores, for the first token and the first 1024 blocks. Without STAMPS nothing of it is compiled.
#pragma once
#define WAIT_ENDED 0    // the preceding launch has ended
#define INPUT_THERE 1   // activations have arrived
#define INPUT_READY 2   // they are rounded, by all warps
#define REQUESTED 3     // the first weights of experts are requested
#define WEIGHTS_THERE 4 // the first weights have arrived
#define FIRST_ITEM 5    // the warp's first row is multiplied
#define ENDED 6

#ifdef STAMPS
static __device__ __forceinline__ void stamp(int point) {
  unsigned now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now) :: "memory");
  if (threadIdx.x % 32 == 0 && blockIdx.x < 1024 && blockIdx.y == 0) ((unsigned*)STAMPS)[(blockIdx.x * WARPS + threadIdx.x / 32) * 8 + point] = now;
}
// A branch on what a load returns waits for it.
static __device__ __forceinline__ void wait_for(unsigned loaded) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fffdead; @p trap;}" :: "r"(loaded) : "memory");
}
#define STAMP(point) stamp(point)
#define STAMP_WITH(point, value) (wait_for((unsigned)(value)), stamp(point))
#else
#define STAMP(point) ((void)0)
#define STAMP_WITH(point, value) ((void)0)
#endif
