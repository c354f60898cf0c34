// Rows of the key/value cache: one head of one position, as floats or encoded. An encoded row has the fields of ggml's blocks of 32
// (formats/codecs/legacy.py and q8.py), those of one kind together: codes (their low bits) of all blocks, high bits of all, scales with
// minima of all; Q8_KV has a header instead of scales: the scale of the row, and the sum of its codes.
// Encoded rows of CACHE_TILE positions of a head stand together: codes of all rows, high bits of all, scales of all, so that codes begin where
// lines of memory do. Rows of latent attention stand alone, one after the other.
#pragma once
#include "step/common.cuh"

#ifndef MMA
#define MMA 0  // tensor cores
#endif

enum CacheType { F32, F16, BF16, Q8_0, Q6_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL, Q8_KV };

__device__ constexpr int block_bytes(int type) {  // of 32 elements
    return type == F32 ? 128 : type == F16 || type == BF16 ? 64 : type == Q8_0 ? 34 : type == Q8_KV ? 32 : type == Q6_0 ? 26
         : type == Q5_1 ? 24 : type == Q5_0 ? 22 : type == Q4_1 ? 20 : 18;
}

__device__ constexpr int header_bytes(int type) { return type == Q8_KV ? 8 : 0; }  // of a row

__device__ constexpr bool is_float(int type) { return type <= BF16; }

constexpr int CACHE_TILE = 16;  // positions; as in runtime/state/cache_tiles.py

// Where the fields of a row begin: codes, high bits, scales. A row of floats has one.
template <class Byte>
struct Fields {
    Byte *low, *high, *scale;
};

// Bytes of the fields of an encoded row of N elements, and where those of block b are in their field.
template <int TYPE, int N>
struct Places {
    static constexpr bool BYTES = TYPE == Q8_0 || TYPE == Q8_KV, MIN = TYPE == Q4_1 || TYPE == Q5_1, FIFTHS = TYPE == Q5_0 || TYPE == Q5_1;
    static constexpr int BLOCKS = N / 32;
    static constexpr int LOW = BYTES ? 32 : 16, HIGH = TYPE == Q6_0 ? 8 : FIFTHS ? 4 : 0, SCALE = block_bytes(TYPE) - LOW - HIGH;
    static_assert(SCALE == (TYPE == Q8_KV ? 0 : MIN ? 4 : 2), "scales and minima are halves");

    static constexpr int CODES = BLOCKS * LOW, HIGHS = BLOCKS * HIGH, SCALES = TYPE == Q8_KV ? 8 : BLOCKS * SCALE;

    static __device__ constexpr int low(int b) { return b * LOW; }
    static __device__ constexpr int high(int b) { return b * HIGH; }
    static __device__ constexpr int scale(int b) { return b * SCALE; }
};

// Bytes of a row in global memory, and of an element in the tile. Encoded types are decoded there:
// to float16 for tensor cores (MMA), otherwise to float32.
__device__ constexpr int row_bytes(int type, int n) { return header_bytes(type) + n * block_bytes(type) / 32; }
__device__ constexpr int tile_bytes(int type) { return type == F16 || type == BF16 || (MMA && !is_float(type)) ? 2 : 4; }

// A row that stands alone.
template <int TYPE, int N, class Byte>
__device__ __forceinline__ Fields<Byte> fields_of(Byte* row) {
    if constexpr (is_float(TYPE)) return {row, row, row};
    else return {row, row + Places<TYPE, N>::CODES, row + Places<TYPE, N>::CODES + Places<TYPE, N>::HIGHS};
}

// The first row of the tile that has a position. Of floats: of that position.
template <int TYPE, int N, class Byte>
__device__ __forceinline__ Byte* cache_tile(Byte* cache, int position, int head, int heads) {
    constexpr int TOGETHER = is_float(TYPE) ? 1 : CACHE_TILE;
    return cache + ((long long)(position / TOGETHER) * heads + head) * (TOGETHER * row_bytes(TYPE, N));
}

// The row of a position in the cache.
template <int TYPE, int N, class Byte>
__device__ __forceinline__ Fields<Byte> in_cache(Byte* cache, int position, int head, int heads) {
    Byte* tile = cache_tile<TYPE, N>(cache, position, head, heads);
    if constexpr (is_float(TYPE)) {
        return {tile, tile, tile};
    } else {
        using At = Places<TYPE, N>;
        const int i = position % CACHE_TILE;
        return {tile + i * At::CODES, tile + CACHE_TILE * At::CODES + i * At::HIGHS, tile + CACHE_TILE * (At::CODES + At::HIGHS) + i * At::SCALES};
    }
}

__device__ const signed char IQ4NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

#ifndef ON_HOST  // the test has its own of these: two halves at a time
__device__ __forceinline__ u32 minus_halves(u32 a, u32 b) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ __forceinline__ u32 times_halves(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

__device__ __forceinline__ u32 two_bytes(const u8* p) { return *(const u16*)p; }

// Elements 8 part .. 8 part + 7 of a row of N.
template <int TYPE, int N>
__device__ __forceinline__ void decode8(const Fields<const u8>& row, int part, float (&out)[8]) {
    using At = Places<TYPE, N>;
    const int b = part / 4, c = part % 4;
    const u8 *codes = row.low + At::low(b), *scale = row.scale + At::scale(b);
    const float d = TYPE == Q8_KV ? *(const float*)row.scale : half_to_float((u16)two_bytes(scale));
    const float m = At::MIN ? half_to_float((u16)two_bytes(scale + 2)) : 0.f;
    if constexpr (At::BYTES) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const u32 w = two_bytes(codes + 8 * c + j);
            out[j] = d * (float)(signed char)(w & 255);
            out[j + 1] = d * (float)(signed char)(w >> 8);
        }
    } else {
        constexpr int ZERO = TYPE == Q6_0 ? 32 : TYPE == Q5_0 ? 16 : TYPE == Q4_0 ? 8 : 0;
        const u8* highs = row.high + At::high(b);
        const int shift = 4 * (c >> 1);
        u32 fifths = 0;
        if constexpr (At::FIFTHS) fifths = two_bytes(highs + (c & 2)) >> 8 * (c & 1);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const u32 w = two_bytes(codes + 8 * (c & 1) + j) >> shift;
            u32 high = 0;
            if constexpr (TYPE == Q6_0) high = two_bytes(highs + j) >> (4 * (c & 1) + 2 * (c >> 1));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int q = w >> 8 * k & 15;
                if constexpr (At::FIFTHS) q |= (fifths >> (j + k) & 1) << 4;
                if constexpr (TYPE == Q6_0) q |= (high >> 8 * k & 3) << 4;
                if constexpr (TYPE == IQ4_NL) out[j + k] = d * (float)IQ4NL[q];
                else if constexpr (At::MIN) out[j + k] = __fadd_rn(__fmul_rn(d, (float)q), m);
                else out[j + k] = d * (float)(q - ZERO);
            }
        }
    }
}

// Two float32 as halves, the first one low.
__device__ __forceinline__ u32 two_halves(float low, float high) {
#ifndef ON_HOST
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return float_to_half(low) | (u32)float_to_half(high) << 16;
#endif
}

// Elements 8 part .. 8 part + 7 of a row of N, rounded to half precision.
template <int TYPE, int N>
__device__ __forceinline__ uint4 decode_halves(const Fields<const u8>& row, int part) {
    if constexpr (TYPE == Q8_0) {
        // 1024 + code + 128 has the code in the low byte; the difference and the product are exact and rounded once.
        const u8* codes = row.low + Places<TYPE, N>::low(part / 4) + part % 4 * 8;
        const u32 d = two_bytes(row.scale + Places<TYPE, N>::scale(part / 4));
        u32 out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 word;
            if constexpr (row_bytes(TYPE, N) % 4 == 0) word = ((const u32*)codes)[j / 2] >> j % 2 * 16;
            else word = two_bytes(codes + 2 * j);
            out[j] = times_halves(minus_halves(__byte_perm(word ^ 0x8080u, 0x64646464u, 0x4140), 0x64806480u), d | d << 16);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
    float x[8];
    if constexpr (TYPE == F32) *(float4*)x = ((const float4*)row.low)[2 * part], *(float4*)(x + 4) = ((const float4*)row.low)[2 * part + 1];
    else decode8<TYPE, N>(row, part, x);
    return make_uint4(two_halves(x[0], x[1]), two_halves(x[2], x[3]), two_halves(x[4], x[5]), two_halves(x[6], x[7]));
}
