// Arithmetic of kernels that hold columns of a recurrent memory in registers: a lane has four columns of every 16th row.
#pragma once

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

__device__ __forceinline__ float4 scaled_sum(float4 a, float s, float4 sum) {
    return make_float4(fmaf(a.x, s, sum.x), fmaf(a.y, s, sum.y), fmaf(a.z, s, sum.z), fmaf(a.w, s, sum.w));
}

__device__ __forceinline__ float4 over_rows(float4 x) {  // the sum over the 16 lanes with the same columns
#pragma unroll
    for (int d = 2; d < 32; d *= 2) {
        x.x += __shfl_xor_sync(0xffffffff, x.x, d);
        x.y += __shfl_xor_sync(0xffffffff, x.y, d);
        x.z += __shfl_xor_sync(0xffffffff, x.z, d);
        x.w += __shfl_xor_sync(0xffffffff, x.w, d);
    }
    return x;
}
