// Barriers in shared memory and among warpgroups, for kernels in which some warps copy and others multiply.
#pragma once

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these
__device__ __forceinline__ uint32_t shared_address(const void* at) { return uint32_t(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}"
      ::"r"(barrier), "r"(phase) : "memory");
}
// Whether `barrier_wait` would return at once.
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t phase) {
  uint32_t done;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
               : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  return done;
}

// A barrier by number, of so many threads: wait for all of them, or arrive without waiting.
template <int THREADS>
__device__ __forceinline__ void named_sync(int number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }
template <int THREADS>
__device__ __forceinline__ void named_arrive(int number) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }

// Sixteen bytes to shared memory; the end of a group of such copies; until the tensor cores can see all but the last LATER groups.
__device__ __forceinline__ void copy_sixteen(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void show_copies() {
  asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(LATER) : "memory");
}

// After barriers have been initialized.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// How many registers the threads of a warpgroup have from here on.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
#endif

// A place in a ring of PLACES, and how often the ring has been gone through, of which barriers see the last bit.
template <int PLACES>
struct Ring {
  int stage = 0;
  uint32_t round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == PLACES) stage = 0, round ^= 1;
  }
};
