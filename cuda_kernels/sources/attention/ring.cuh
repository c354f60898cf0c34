// The ring of a warp in warps.cuh: how rows of the cache come there, and new ones into both; and what turns operands.
#pragma once
#include "attention/encode.cuh"

#ifndef ON_HOST
#include "units/policy.cuh"
// 16 positions x 16 elements of V as the left operand, elements as rows.
__device__ __forceinline__ void load_a_turned(u32 (&a)[4], const char* at, int stride, int lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(at + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 16)));
}

// 8 x 8 halves, two of a row in each lane.
__device__ __forceinline__ u32 turned(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// The address of a place in shared memory, for copies with a policy: see units/policy.cuh.
__device__ __forceinline__ u32 lane_address(char* to) {
    u32 mine, lower;
    asm("mov.u32 %0, %%lanemask_eq;" : "=r"(mine));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
    return (u32)__cvta_generic_to_shared(to) | (mine & lower);
}

// BYTES (4, 8 or 16) from global memory, or zeros.
template <int BYTES>
__device__ __forceinline__ void copy_or_clear(u32 at, const u8* from, bool there) {
    const u32 n = there ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(at), "l"(from), "r"(n), "l"(evict_first()) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(n) : "memory");
}
#endif

__device__ constexpr int power_up_to(int n) { return n >= 32 ? 32 : n >= 16 ? 16 : n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1; }

// Rows of the cache in the ring.
template <int TYPE, int D>
struct Rows {
    using In = InRing<TYPE, D>;
    static constexpr int ROW = row_bytes(TYPE, D);
    static constexpr int NEXT = WARPS * TILE * HEADS_KV * ROW;  // bytes from the tile of a warp to its next

    // Where the tile that begins with position `at` is, a multiple of TILE.
    static __device__ __forceinline__ const u8* tile(const u8* cache, int at, int head) { return cache_tile<TYPE, D>(cache, at, head, HEADS_KV); }

    // TILE rows, by a warp. Those from `count` on become 0.
    static __device__ __forceinline__ void copy(char* to, const u8* from, int count) {
        if (count >= TILE) fields<true>(to, from, TILE);
        else fields<false>(to, from, count);
    }

    template <bool ALL>
    static __device__ __forceinline__ void fields(char* to, const u8* from, int count) {
        if constexpr (is_float(TYPE)) {
            field<ALL, ROW, HEADS_KV * ROW, TILE, In::PITCH>(to, from, count);
        } else {
            using At = Places<TYPE, D>;
#pragma unroll
            for (int first = 0; first < TILE; first += CACHE_TILE) {
                const u8 *codes = from + first * HEADS_KV * ROW, *highs = codes + CACHE_TILE * At::CODES, *scales = highs + CACHE_TILE * At::HIGHS;
                char* kept = to + first / CACHE_TILE * In::BYTES;
                field<ALL, At::CODES, At::CODES, CACHE_TILE, In::PITCH, In::TOGETHER>(kept, codes, count - first);
                field<ALL, At::HIGHS, At::HIGHS, CACHE_TILE, In::PITCH>(kept + At::CODES, highs, count - first);
                field<ALL, At::SCALES, At::SCALES, CACHE_TILE, In::SCALES_PITCH>(kept + In::SCALES, scales, count - first);
            }
        }
    }

    // N pieces of SIZE bytes, which are STEP bytes apart, to places PITCH bytes apart. Lanes divide a piece in powers of 2.
    template <bool ALL, int SIZE, int STEP, int N, int PITCH, bool SWAPPED = false, int DONE = 0>
    static __device__ __forceinline__ void field(char* to, const u8* from, int count) {
        if constexpr (DONE < SIZE) {
            constexpr int BYTES = SIZE % 16 == 0 ? 16 : SIZE % 8 == 0 ? 8 : 4, SIDE = power_up_to((SIZE - DONE) / BYTES), AT_ONCE = 32 / SIDE;
            const int lane = threadIdx.x % 32, first = lane / SIDE, at = DONE + lane % SIDE * BYTES, place = SWAPPED ? at ^ In::swap(first) : at;
            const u8* own = from + first * STEP + at;
            const auto base = lane_address(to + first * PITCH);
#pragma unroll(ALL ? N : 1)
            for (int i = 0; i < N; i += AT_ONCE) {
                if (AT_ONCE > N && first >= N) continue;
                const bool there = ALL || first + i < count;
                const int swapped = SWAPPED ? place ^ In::swap(i) : place;  // `swap` is linear in bits
                copy_or_clear<BYTES>(base + i * PITCH + swapped, there ? own + i * STEP : from, there);
            }
            field<ALL, SIZE, STEP, N, PITCH, SWAPPED, DONE + SIDE * BYTES>(to, from, count);
        }
    }
};

// Store one new row, prepared in `row` (float32), in the cache, and a copy of its bytes in `kept`.
template <int TYPE, int D>
__device__ __forceinline__ void store_bytes(const float* row, const Fields<u8>& cache, char* kept, int lane) {
    if constexpr (is_float(TYPE)) {
#pragma unroll
        for (int i = lane; i < D; i += 32) ((u16*)kept)[i] = TYPE == BF16 ? float_to_bf16(row[i]) : float_to_half(row[i]);
    } else {
        encode_row<TYPE, D>(row, fields_of<TYPE, D>((u8*)kept), lane, [](int, float) {});
    }
    __syncwarp();
    const Fields<u8> own = fields_of<TYPE, D>((u8*)kept);
    auto put = [&](u8* to, const u8* from, int size) {
        for (int i = lane; i < size / 4; i += 32) ((u32*)to)[i] = ((const u32*)from)[i];
    };
    if constexpr (is_float(TYPE)) {
        put(cache.low, own.low, row_bytes(TYPE, D));
    } else {
        using At = Places<TYPE, D>;
        put(cache.low, own.low, At::CODES), put(cache.high, own.high, At::HIGHS), put(cache.scale, own.scale, At::SCALES);
    }
}
