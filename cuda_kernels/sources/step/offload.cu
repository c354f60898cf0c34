// Experts on the host within a decoding step. `hand_over` writes what the host needs to its memory, and counts the exchange in `request`;
// `take_back` waits until the host has counted the same in `reply`, and adds what it has written. The memory is page-locked, and used by
// one exchange after the other: the host writes `y` only after the next request, which this stream makes after it has read `y`.
#include "step/block_sum.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

#ifndef ON_HOST

__device__ __forceinline__ u64 load_of_host(const u64* from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_to_host(u64* to, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ float4 written_by_host(const float* from) {  // never from a cache
    float4 x;
    asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

#endif

// x = norm(h) and what the router chose, to the host. One block. Experts that are left out have id -1, and get weight 0.
extern "C" __global__ void __launch_bounds__(THREADS)
hand_over(const float* h, const float* norm, float eps, const int* ids, const float* weights, int rows, int width, int used, float* x,
          long long* chosen, float* shares, u64* request, u64* number) {
    __shared__ float sums[WARPS];
    wait_for_inputs();
    start_dependents();
    for (int row = 0; row < rows; row++, h += width, x += width) {
        float sum = 0.f;
        for (int i = threadIdx.x; i < width; i += THREADS) {
            const float value = __ldcg(h + i);
            sum = fmaf(value, value, sum);
        }
        const float inverse = rsqrtf(block_sum(sum, sums) / (float)width + eps);
        for (int i = threadIdx.x; i < width; i += THREADS) x[i] = __ldcg(h + i) * inverse * norm[i];
    }
    for (int i = threadIdx.x; i < rows * used; i += THREADS) {
        const int id = __ldcg(ids + i);
        chosen[i] = id;
        shares[i] = id < 0 ? 0.f : __ldcg(weights + i);
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 next = *number + 1;
        *number = next;
        store_to_host(request, next);
    }
}

// to += y of the host, for n elements (a multiple of 4). One block. After `most` nanoseconds without a reply, `failed` becomes 1, and no
// later exchange waits: `reply` becomes the largest number, as it does if the host will not answer. What is added then means nothing.
extern "C" __global__ void __launch_bounds__(THREADS)
take_back(const float* y, float* to, int n, u64* reply, const u64* number, u32* failed, u64 most) {
    wait_for_inputs();
    start_dependents();
    if (threadIdx.x == 0) {
        const u64 awaited = *(volatile const u64*)number;
        u64 begun = 0;
        for (u32 tries = 1; load_of_host(reply) < awaited; tries++) {
            if (tries % 4096) continue;
            const u64 now = nanoseconds();
            if (!begun) begun = now;
            if (now - begun > most) {
                *(volatile u32*)failed = 1;
                __threadfence_system();
                store_to_host(reply, ~(u64)0);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < n; i += THREADS * 4) {
        const float4 found = written_by_host(y + i);
        float4 sum = __ldcg((const float4*)(to + i));
        sum.x += found.x, sum.y += found.y, sum.z += found.z, sum.w += found.w;
        *(float4*)(to + i) = sum;
    }
}
