// Parts of a result that blocks leave in memory for others of the same launch, who wait for them. They come in pairs of floats, stored at once, and every
// pair says itself whether it is there: NOT_THERE stands in its place before, so that neither fences nor counters are needed. Whoever takes a pair
// puts NOT_THERE in its place again. Each pair has one taker, and later launches store when this one has ended.
#pragma once
#include "step/common.cuh"

constexpr u32 NOT_THERE = 0xffffffff;  // as bits of the first float: a NaN, for which `put_part` stores another one

__device__ __forceinline__ float low_float(u64 pair) { return __uint_as_float((u32)pair); }
__device__ __forceinline__ float high_float(u64 pair) { return __uint_as_float((u32)(pair >> 32)); }
__device__ __forceinline__ bool is_there(u64 pair) { return (u32)pair != NOT_THERE; }

struct alignas(16) TwoPairs {
    u64 x, y;
};
__device__ __forceinline__ bool is_there(const TwoPairs& two) { return is_there(two.x) && is_there(two.y); }

#ifndef ON_HOST
__device__ __forceinline__ void put_pair(float* to, u64 pair) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(pair) : "memory"); }

__device__ __forceinline__ void get_pairs(u64& pair, const float* from) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(pair) : "l"(from) : "memory");
}

__device__ __forceinline__ void get_pairs(TwoPairs& two, const float* from) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(two.x), "=l"(two.y) : "l"(from) : "memory");
}

__device__ __forceinline__ void none_there(float* to, const TwoPairs*) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %1};" ::"l"(to), "l"(~0ull) : "memory");
}
#else
__device__ __forceinline__ void put_pair(float* to, u64 pair) { *(u64*)to = pair; }
template <typename Pairs>
__device__ __forceinline__ void get_pairs(Pairs& pairs, const float* from) { pairs = *(const Pairs*)from; }
__device__ __forceinline__ void none_there(float* to, const TwoPairs*) { *(TwoPairs*)to = {~0ull, ~0ull}; }
#endif
__device__ __forceinline__ void none_there(float* to, const u64*) { put_pair(to, ~0ull); }

__device__ __forceinline__ void put_part(float* to, float x, float y) {
    const u32 bits = __float_as_uint(x);
    put_pair(to, (bits == NOT_THERE ? 0x7fffffff : bits) | (u64)__float_as_uint(y) << 32);
}

// What `count` of N parts have, `step` floats apart, as far as it is there. The others are 0.
template <int N, typename Pairs>
__device__ __forceinline__ void ask(Pairs (&x)[N], const float* from, long long step, int count) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = Pairs{};
        if (i < count) get_pairs(x[i], from + i * step);
    }
}

// Take them, once asked. What is missing is asked for again, all at a time.
template <int N, typename Pairs>
__device__ __forceinline__ void take(Pairs (&x)[N], float* from, long long step, int count) {
    bool missing;
#pragma unroll 1
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!is_there(x[i])) get_pairs(x[i], from + i * step), missing = true;
    } while (missing);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < count) none_there(from + i * step, &x[i]);
}
