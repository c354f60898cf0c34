// Codes of encoded cache rows in registers, as operands of mma. Codes become halves through the
// bits of 1024 + code, whose difference to 1024 + ZERO is exact.
#pragma once
#include "attention/fragments.cuh"

#ifndef ON_HOST
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

template <int TYPE>
struct Codes {
    static constexpr int BLOCK = block_bytes(TYPE), HEADER = header_bytes(TYPE);
    static constexpr bool BYTES = TYPE == Q8_0 || TYPE == Q8_KV;
    static constexpr bool MIN = TYPE == Q4_1 || TYPE == Q5_1;
    static constexpr bool FIFTHS = TYPE == Q5_0 || TYPE == Q5_1;
    static constexpr int LOW = TYPE == Q8_KV ? 0 : TYPE == Q6_0 ? 10 : TYPE == Q5_1 ? 8 : TYPE == Q5_0 ? 6 : TYPE == Q4_1 ? 4 : 2;
    static constexpr u32 ZERO = BYTES || TYPE == IQ4_NL ? 128 : TYPE == Q6_0 ? 32 : TYPE == Q5_0 ? 16 : TYPE == Q4_0 ? 8 : 0;

    static __device__ __forceinline__ u16 scale(const char* block) { return *(const u16*)block; }
    // The scale of block b of a row.
    static __device__ __forceinline__ float factor(const char* row, int b) {
        if constexpr (TYPE == Q8_KV) return *(const float*)row;
        else return half_to_float(scale(row + b * BLOCK));
    }
    static __device__ __forceinline__ u16 minimum(const char* block) { return *(const u16*)(block + 2); }

    // 4 bytes at p + at; `place`: where `at` is in the row, but for multiples of 4. Rows are multiples of 16.
    static __device__ __forceinline__ u32 word(const char* p, int place) {
        if (place % 4 == 0) return *(const u32*)p;
        return *(const u16*)p | (u32) * (const u16*)(p + 2) << 16;
    }

    // The bytes that 4-bit codes stand for, one in each byte of x.
    static __device__ __forceinline__ u32 looked_up(u32 x) {
        if constexpr (TYPE != IQ4_NL) return x;
        // Pairs of codes as nibbles; bit 3 chooses between halves of the table (values + 128).
        const u32 pairs = x | x >> 4, codes = (pairs & 0xff) | (pairs >> 8 & 0xff00), which = codes & 0x7777;
        const u32 low = __byte_perm(0x3f2d1801u, 0x766a5d4fu, which), high = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, which);
        return __byte_perm(low, high, 0x3210 | (codes & 0x8888) >> 1);
    }

    // Codes of elements 16 h + 4 t .. + 3 of block b of a row, for h = 0 and 1.
    static __device__ __forceinline__ void of_row(const char* row, int b, int t, u32 (&codes)[2]) {
        const char* block = row + HEADER + b * BLOCK;
        if constexpr (BYTES) {
#pragma unroll
            for (int h = 0; h < 2; h++) codes[h] = word(block + LOW + 16 * h + 4 * t, HEADER + b * BLOCK + LOW) ^ 0x80808080u;
        } else {
            const u32 low = word(block + LOW + 4 * t, b * BLOCK + LOW);
            u32 high = 0;
            if constexpr (TYPE == Q6_0) high = word(block + 2 + t % 2 * 4, b * BLOCK + 2) >> t / 2 * 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 x = low >> 4 * h & 0x0f0f0f0fu;
                if constexpr (FIFTHS) x |= ((u32) * (const u16*)(block + LOW - 4 + 2 * h) >> 4 * t & 15) * 0x00204081u << 4 & 0x10101010u;
                if constexpr (TYPE == Q6_0) x |= (high >> 2 * h & 0x03030303u) << 4;
                codes[h] = looked_up(x);
            }
        }
    }

    // Codes of elements 16 h + 2 j, + 1 of a block of two rows: those of the first one are the low bytes.
    static __device__ __forceinline__ void of_rows(const char* first, const char* second, int j, u32 (&codes)[2]) {
        auto both = [&](int at) { return *(const u16*)(first + at) | (u32) * (const u16*)(second + at) << 16; };
        if constexpr (BYTES) {
#pragma unroll
            for (int h = 0; h < 2; h++) codes[h] = both(LOW + 16 * h + 2 * j) ^ 0x80808080u;
        } else {
            const u32 low = both(LOW + 2 * j);
            u32 high = 0;
            if constexpr (TYPE == Q6_0) high = both(2 + (2 * j & 7)) >> j / 4 * 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 x = low >> 4 * h & 0x0f0f0f0fu;
                if constexpr (FIFTHS) {
                    const u32 bits = both(LOW - 4 + 2 * h) >> 2 * j;
                    x |= (bits & 0x00010001u) << 4 | (bits & 0x00020002u) << 11;
                }
                if constexpr (TYPE == Q6_0) x |= (high >> 2 * h & 0x03030303u) << 4;
                codes[h] = looked_up(x);
            }
        }
    }

    // Codes in bytes 0, 1 (low) or 2, 3 of x.
    static __device__ __forceinline__ u32 low_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4140), 0x64006400u | ZERO << 16 | ZERO); }
    static __device__ __forceinline__ u32 high_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4342), 0x64006400u | ZERO << 16 | ZERO); }
    // Codes in bytes 0, 2 (even) or 1, 3.
    static __device__ __forceinline__ u32 even_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4240), 0x64006400u | ZERO << 16 | ZERO); }
    static __device__ __forceinline__ u32 odd_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4341), 0x64006400u | ZERO << 16 | ZERO); }
};
