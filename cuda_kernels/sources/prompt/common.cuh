// Common code of the prompt path's kernels: 16-bit floats without headers, and sums in a fixed
// order.
//
// The spec defines HALF as the activations' type: 1 is float16, 0 is bfloat16. A unit is 8 consecutive elements, 16 bytes.
#pragma once

typedef unsigned int u32;

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these two

template <bool F16> __device__ __forceinline__ u32 pack2(float low, float high) {
    u32 packed;
    if constexpr (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <bool F16> __device__ __forceinline__ float2 unpack2(u32 packed) {
    if constexpr (F16) {
        float2 pair;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(pair.x), "=f"(pair.y) : "r"(packed));
        return pair;
    } else {
        return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
    }
}

#endif

template <bool F16> __device__ __forceinline__ void unpack8(uint4 packed, float (&x)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack2<F16>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}

template <bool F16> __device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack2<F16>(x[0], x[1]), pack2<F16>(x[2], x[3]), pack2<F16>(x[4], x[5]), pack2<F16>(x[6], x[7]));
}

__device__ __forceinline__ void load8(const float* at, float (&x)[8]) {
    const float4 low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void store8(float* at, const float (&x)[8]) {
    reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Sum over the lanes of a warp, by halves: the same order every time, the same result in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
