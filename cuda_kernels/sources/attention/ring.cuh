// The ring of a warp in warps.cuh: how rows of the cache come there, and new ones into both; and what turns operands.
#pragma once

#ifndef ON_HOST
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

// BYTES (4, 8 or 16) from global memory, or zeros.
template <int BYTES>
__device__ __forceinline__ void copy_or_clear(char* to, const u8* from, bool there) {
    const u32 at = (u32)__cvta_generic_to_shared(to), n = there ? BYTES : 0;
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(n) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(n) : "memory");
}
#endif

__device__ constexpr int power_up_to(int n) { return n >= 32 ? 32 : n >= 16 ? 16 : n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1; }

// Rows of ROW bytes of the cache, in the ring. Where all heads of a position together are whole pieces of 16 bytes, and rows of all heads
// touch as many of them, these are copied, and `shift` bytes of the row before come with it. Otherwise rows are copied in smaller pieces.
template <int ROW>
struct Rows {
    static constexpr int UNIT = ROW % 16 == 0 ? 16 : ROW % 8 == 0 ? 8 : 4;  // of shifts
    static constexpr bool WHOLE_PIECES = HEADS_KV * ROW % 16 == 0 && (16 - UNIT + ROW + 15) / 16 == (ROW + 15) / 16;
    static constexpr int BYTES = WHOLE_PIECES ? 16 : UNIT, PIECES = (ROW + BYTES - 1) / BYTES;
    static constexpr int STEP = HEADS_KV * ROW, PITCH = padded_row(ROW);
    static constexpr int ALIGNED = WHOLE_PIECES ? UNIT : 16;  // where a row begins

    static __device__ __forceinline__ int shift(int head) { return WHOLE_PIECES ? head * ROW % 16 : 0; }

    // What is copied of the row of position `at`, and the bytes from the tile of a warp to its next.
    static __device__ __forceinline__ const u8* row(const u8* cache, int at, int head) { return cache + (long long)at * STEP + (head * ROW - shift(head)); }
    static constexpr int NEXT = WARPS * TILE * STEP;

    // TILE rows from `from` on, by a warp. Those from `count` on become 0. Lanes divide a row's pieces in powers of 2.
    static __device__ __forceinline__ void copy(char* to, const u8* from, int count) {
        if (count >= TILE) pieces<true>(to, from, TILE);
        else pieces<false>(to, from, count);
    }

    template <bool ALL, int DONE = 0>
    static __device__ __forceinline__ void pieces(char* to, const u8* from, int count) {
        if constexpr (DONE < PIECES) {
            constexpr int SIDE = power_up_to(PIECES - DONE), AT_ONCE = 32 / SIDE;
            const int lane = threadIdx.x % 32, first = lane / SIDE, at = (DONE + lane % SIDE) * BYTES;
            to += first * PITCH + at;
#pragma unroll(ALL ? TILE : 1)
            for (int i = 0; i < TILE; i += AT_ONCE) {
                if (AT_ONCE > TILE && first >= TILE) continue;
                const bool there = ALL || first + i < count;
                copy_or_clear<BYTES>(to + i * PITCH, there ? from + (first * STEP + at) + i * STEP : from, there);
            }
            pieces<ALL, DONE + SIDE>(to - first * PITCH - at, from, count);
        }
    }
};

// Store one new row, prepared in `row` (float32), in the cache, and a copy of its bytes in `kept`.
template <int TYPE, int D>
__device__ __forceinline__ void store_bytes(const float* row, u8* cache, char* kept, int lane) {
    if constexpr (is_float(TYPE)) {
#pragma unroll
        for (int i = lane; i < D; i += 32) ((u16*)kept)[i] = TYPE == BF16 ? float_to_bf16(row[i]) : float_to_half(row[i]);
    } else {
        encode_row<TYPE, D>(row, (u8*)kept, lane, [](int, float) {});
    }
    __syncwarp();
    for (int i = lane; i < row_bytes(TYPE, D) / 4; i += 32) ((u32*)cache)[i] = ((const u32*)kept)[i];
}
