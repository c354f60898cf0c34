// Tiles of the cache in shared memory: loading rows into them, and storing new rows in the cache.
#pragma once
#include "attention/encode.cuh"

#ifndef ON_HOST
// With LINES L2 takes in whole lines of 128 bytes.
template <bool LINES>
__device__ __forceinline__ void copy16(char* to, const u8* from) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    if constexpr (LINES) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// 4 or 8 bytes.
template <int BYTES>
__device__ __forceinline__ void copy_few(char* to, const u8* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N groups of copies of this thread are in flight.
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

// Rows first .. first+count-1 of the cache to a tile; `count` may be 0 or less.
template <int TYPE, int D, int STRIDE, int ROW>
__device__ __forceinline__ void load_tile(char* tile, const u8* cache, int first, int count, int head) {
    if constexpr (is_float(TYPE)) {
        constexpr int PARTS = ROW / 16;
        for (int i = threadIdx.x; i < count * PARTS; i += THREADS) {
            const int row = i / PARTS, part = i % PARTS;
            copy16<(ROW >= 128)>(tile + row * STRIDE + part * 16, in_cache<TYPE, D>(cache, first + row, head, HEADS_KV).low + part * 16);
        }
    } else {
        constexpr int PARTS = D / 8;
        for (int i = threadIdx.x; i < count * PARTS; i += THREADS) {
            const int row = i / PARTS, part = i % PARTS;
            float x[8];
            decode8<TYPE, D>(in_cache<TYPE, D>(cache, first + row, head, HEADS_KV), part, x);
            float4* to = (float4*)(tile + row * STRIDE + part * 32);
            to[0] = make_float4(x[0], x[1], x[2], x[3]);
            to[1] = make_float4(x[4], x[5], x[6], x[7]);
        }
    }
}

// The same encoded rows one after the other, each alone.
template <int TYPE, int D>
__device__ __forceinline__ void load_rows(char* to, const u8* cache, int first, int count, int head) {
    static_assert(!is_float(TYPE), "an encoded row");
    using At = Places<TYPE, D>;
    constexpr int ROW = row_bytes(TYPE, D), FIELDS = At::CODES | At::HIGHS | At::SCALES;
    constexpr int BYTES = FIELDS % 16 == 0 ? 16 : FIELDS % 8 == 0 ? 8 : FIELDS % 4 == 0 ? 4 : 2, PARTS = ROW / BYTES;  // that divide all fields
    for (int i = threadIdx.x; i < count * PARTS; i += THREADS) {
        const Fields<const u8> row = in_cache<TYPE, D>(cache, first + i / PARTS, head, HEADS_KV);
        const int at = i % PARTS * BYTES;
        const u8* from = at < At::CODES ? row.low + at : at < At::CODES + At::HIGHS ? row.high + (at - At::CODES) : row.scale + (at - At::CODES - At::HIGHS);
        if constexpr (BYTES == 16) copy16<true>(to + i * BYTES, from);
        else if constexpr (BYTES == 2) *(u16*)(to + i * BYTES) = *(const u16*)from;
        else copy_few<BYTES>(to + i * BYTES, from);
    }
}

// The first `count` rows of `load_rows` to a tile of halves.
template <int TYPE, int D, int STRIDE, int ROW>
__device__ __forceinline__ void decode_tile(char* tile, const char* rows, int count) {
    constexpr int PARTS = D / 8;
    for (int i = threadIdx.x; i < count * PARTS; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS;
        *(uint4*)(tile + row * STRIDE + part * 16) = decode_halves<TYPE, D>(fields_of<TYPE, D>((const u8*)rows + row * ROW), part);
    }
}

template <int TYPE>
__device__ __forceinline__ float widen(u32 bits) {  // low 16 bits
    return TYPE == BF16 ? __uint_as_float(bits << 16) : half_to_float((u16)bits);
}

// 4 elements of a tile row, from element i.
template <int TYPE>
__device__ __forceinline__ void read4(const char* row, int i, float (&x)[4]) {
    if constexpr (tile_bytes(TYPE) == 4) {
        const float4 w = *(const float4*)(row + 4 * i);
        x[0] = w.x, x[1] = w.y, x[2] = w.z, x[3] = w.w;
    } else {
        const uint2 w = *(const uint2*)(row + 2 * i);
        x[0] = widen<TYPE>(w.x), x[1] = widen<TYPE>(w.x >> 16), x[2] = widen<TYPE>(w.y), x[3] = widen<TYPE>(w.y >> 16);
    }
}

template <int TYPE>
__device__ __forceinline__ void read8(const char* row, int i, float (&x)[8]) {
    if constexpr (tile_bytes(TYPE) == 4) {
        const float4 a = *(const float4*)(row + 4 * i), b = *(const float4*)(row + 4 * i + 16);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        const uint4 w = *(const uint4*)(row + 2 * i);
        x[0] = widen<TYPE>(w.x), x[1] = widen<TYPE>(w.x >> 16), x[2] = widen<TYPE>(w.y), x[3] = widen<TYPE>(w.y >> 16);
        x[4] = widen<TYPE>(w.z), x[5] = widen<TYPE>(w.z >> 16), x[6] = widen<TYPE>(w.w), x[7] = widen<TYPE>(w.w >> 16);
    }
}

// Store one new row, prepared in `row` (float32), in the cache and, as it will be read back, in
// `kept` in the form of a tile row.
template <int TYPE, int D>
__device__ __forceinline__ void store_row(const float* row, const Fields<u8>& cache, char* kept, int lane) {
    encode_row<TYPE, D>(row, cache, lane, [&](int i, float back) {
        if constexpr (tile_bytes(TYPE) == 4) ((float*)kept)[i] = back;
        else ((u16*)kept)[i] = TYPE == BF16 ? float_to_bf16(back) : float_to_half(back);
    });
}

// New rows that fall into the tile of positions first .. first+TILE-1 come from where `store_row` kept them.
template <int STRIDE>
__device__ __forceinline__ void insert_new(char* tile, const char* kept, int first, int p0, int n) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = p0 + i - first;
        if (row < 0 || row >= n) continue;
        for (int part = threadIdx.x; part < STRIDE / 16 - 1; part += THREADS)
            *(uint4*)(tile + row * STRIDE + part * 16) = *(const uint4*)(kept + i * STRIDE + part * 16);
    }
}

