// Common code of the decode step's kernels: dependent launches, half precision without headers,
// reductions of a warp in a fixed order.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of what follows

#define INFINITY __int_as_float(0x7f800000)

// A kernel launched as a dependent may start before the kernel it follows has ended.
// `start_dependents` lets the next kernel start as soon as every block of this one runs. Before its
// own `wait_for_inputs`, that kernel may only read what no kernel of the step writes (weights,
// cache rows of earlier steps), and the position. The draw at the end of a step advances the
// position, so the first launch of a step is not a dependent one. `wait_for_inputs` returns when
// the previous kernel has ended, and with it all kernels before, as each waited as well. Without
// the launch attribute, and before sm_90, both do nothing.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x) {  // to nearest, ties to even
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 float_to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    u32 b = __float_as_uint(x);
    if ((b & 0x7fffffff) > 0x7f800000) return (u16)(b >> 16 | 0x40);
    return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Butterflies: every lane gets the same bits, because each level adds the same two numbers in both lanes of a pair.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffff, x, d);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, d));
    return x;
}

#endif

// Blocks of a cluster store in each other's shared memory: each arrives before and waits, so that all run; stores; arrives and waits
// again, so that all is stored.
#if !defined(ON_HOST) && __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 address_in_block(float* to, int block) {
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(to)), "r"(block));
    return at;
}

__device__ __forceinline__ void store_in_block(float* to, int block, float4 x) {
    const u32 at = address_in_block(to, block);
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

__device__ __forceinline__ void store_in_block(float* to, int block, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_block(to, block)), "f"(x) : "memory");
}
#else
#define HAS_CLUSTERS 0
__device__ __forceinline__ void arrive_in_cluster() {}
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ void store_in_block(float*, int, float4) {}
__device__ __forceinline__ void store_in_block(float*, int, float) {}
#endif

// Count one more at a counter of the device and return how many that are. What the thread has written before, or seen written at a barrier,
// is visible to whoever counts later.
#ifndef ON_HOST
__device__ __forceinline__ u32 count_arrival(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before + 1;
}
#else
__device__ __forceinline__ u32 count_arrival(u32* counter) { return atomicAdd(counter, 1) + 1; }
#endif

// Return true for the last of `count` blocks that arrive at a counter, which is reset to 0. The
// earlier writes of the others are visible to this block. The counter decides only which block does
// the rest of the work, not the order of additions.
__device__ __forceinline__ bool last_to_arrive(u32* counter, u32 count) {
    __shared__ u32 arrived;
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = count_arrival(counter);
        if (arrived == count) *counter = 0;
    }
    __syncthreads();
    return arrived == count;
}
