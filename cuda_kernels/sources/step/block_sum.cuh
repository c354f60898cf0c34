// The sum over the threads of a block, in a fixed order.
#pragma once

#include "step/common.cuh"

// Every thread gets the sum. sums: shared memory, which other threads may still read from the call before.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float (&sums)[WARPS]) {
    x = warp_sum(x);
    __syncthreads();  // the sums of the call before are read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) x += sums[i];
    return x;
}
