// What the kernels of recurrent layers over many tokens share: halves of activations, copies to shared memory, and the memory of a head in registers.
//
// HALF: activations are float16 (1) or bfloat16 (0).
#pragma once
#include "step/common.cuh"
#include "prompt/overlap.cuh"

__device__ __forceinline__ float from_half(u32 bits) { return HALF ? half_to_float((u16)bits) : bf16_to_float((u16)bits); }
__device__ __forceinline__ u32 to_half(float x) { return HALF ? float_to_half(x) : float_to_bf16(x); }

__device__ __forceinline__ float4 load4(const u16* at) {
    const uint2 x = *(const uint2*)at;
    return make_float4(from_half(x.x & 0xffff), from_half(x.x >> 16), from_half(x.y & 0xffff), from_half(x.y >> 16));
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

#ifndef ON_HOST
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
template <int BYTES>
inline void copy_to_shared(void* to, const void* from) { memcpy(to, from, BYTES); }
#endif

#include "prompt/tf32.cuh"

constexpr int CHUNK = 64;  // tokens whose products are taken together
constexpr int SLICE = 32;  // columns of the memory of a block

// What a warp of 8 has of a memory of ROWS: pair h of block i of band b is columns 8 i + lane % 4 * 2 and the next, of row 128 b + 16 warp + lane / 4 + 8 h.
template <int ROWS>
using Memory = float[(ROWS + 127) / 128][SLICE / 8][4];

// work(x, y, row, column, whether that is a part of the memory) for each pair of columns that a warp has of the ROWS, of which the memory has DEPTH, and of the
// columns from `slice` on, of WIDTH.
template <int ROWS, int DEPTH, int WIDTH, class Work>
__device__ __forceinline__ void each_pair(Memory<ROWS>& s, int slice, Work work) {
#pragma unroll
    for (int b = 0; b < (ROWS + 127) / 128; b++)
#pragma unroll
        for (int i = 0; i < SLICE / 8; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = 128 * b + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h, column = 8 * i + threadIdx.x % 4 * 2;
                if (row < ROWS) work(s[b][i][2 * h], s[b][i][2 * h + 1], row, column, row < DEPTH && slice + column < WIDTH);
            }
}

// By what a memory decays: one factor, or BY_ROW those of a thread's rows.
template <int ROWS, bool BY_ROW>
struct Decay {
    float one;
    __device__ __forceinline__ float of(int, int) const { return one; }
    // from: the factors at all tokens of a chunk.
    template <int DEPTH>
    __device__ __forceinline__ void load(const float* from) { one = from[CHUNK - 1]; }
};
template <int ROWS>
struct Decay<ROWS, true> {
    float rows[(ROWS + 127) / 128][2];
    __device__ __forceinline__ float of(int band, int h) const { return rows[band][h]; }
    // from: the factors of DEPTH rows; others are zero.
    template <int DEPTH>
    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int b = 0; b < (ROWS + 127) / 128; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = 128 * b + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
                rows[b][h] = row < DEPTH ? from[row] : 0.f;
            }
    }
};

// s <- decay s + the columns of a, which has CHUNK rows, times the rows of b[CHUNK][SLICE].
template <int ROWS, bool BY_ROW>
__device__ __forceinline__ void decay_and_write(Memory<ROWS>& s, const Decay<ROWS, BY_ROW>& decay, const u16* a, int a_pitch, const float* b, int b_pitch) {
#pragma unroll
    for (int n = 0; n < (ROWS + 127) / 128; n++) {
        const int band = 128 * n + threadIdx.x / 32 * 16;
        if (band >= ROWS) continue;
#pragma unroll
        for (int i = 0; i < SLICE / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][i][e] *= decay.of(n, e / 2);
        by_columns<SLICE / 8, true>(s[n], a + band, a_pitch, b, b_pitch, CHUNK);
    }
}

// The memory of a head before its first token: that part of `from`, float32[DEPTH, WIDTH], or zeros.
template <int ROWS, int DEPTH, int WIDTH>
__device__ __forceinline__ void load_memory(Memory<ROWS>& s, int slice, const float* from) {
    each_pair<ROWS, DEPTH, WIDTH>(s, slice, [&](float& x, float& y, int row, int column, bool inside) {
        x = y = 0.f;
        if (from != nullptr && inside) {
            const float2 both = *(const float2*)(from + row * WIDTH + slice + column);
            x = both.x, y = both.y;
        }
    });
}

template <int ROWS, int DEPTH, int WIDTH>
__device__ __forceinline__ void store_memory(Memory<ROWS>& s, int slice, float* to) {
    each_pair<ROWS, DEPTH, WIDTH>(s, slice, [&](float x, float y, int row, int column, bool inside) {
        if (inside) *(float2*)(to + row * WIDTH + slice + column) = make_float2(x, y);
    });
}
