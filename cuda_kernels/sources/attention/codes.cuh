// Codes of encoded cache rows in registers: keys as bytes for products of integers, values as halves.
#pragma once
#include "attention/fragments.cuh"

#ifndef ON_HOST
// d = a b + c for 16 x 32 and 32 x 8 signed bytes.
__device__ __forceinline__ void mma_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
#endif

// BYTES of shared memory at an address that is a multiple of ALIGNED.
template <int BYTES, int ALIGNED = BYTES>
__device__ __forceinline__ void load_words(const char* at, u32 (&words)[(BYTES + 3) / 4]) {
    if constexpr (BYTES == 2) {
        words[0] = *(const u16*)at;
    } else if constexpr (ALIGNED >= 16 && BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 w = ((const uint4*)at)[i];
            words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
        }
    } else if constexpr (ALIGNED >= 8 && BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; i++) {
            const uint2 w = ((const uint2*)at)[i];
            words[2 * i] = w.x, words[2 * i + 1] = w.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) words[i] = ((const u32*)at)[i];
    }
}

__device__ constexpr int padded_row(int n) { return ((n + 15) / 16 | 1) * 16; }  // rows start in other banks
__device__ constexpr int alignment(int n) { return n % 16 ? n % 8 ? 4 : 8 : 16; }

// How 16 rows of N elements stand in the ring of a warp. Where codes are bytes and those of a row fill all banks, there are codes of all rows, then
// scales of all, as in the cache. Every 16 bytes of codes are at their place XOR `swap` of the row, so that lanes that read at once find other
// banks without padding. Other rows stand alone, PITCH bytes after the one before.
template <int TYPE, int N>
struct InRing {
    using At = Places<is_float(TYPE) ? Q8_0 : TYPE, is_float(TYPE) ? 32 : N>;  // not used by floats
    static constexpr bool TOGETHER = (TYPE == Q8_0 || TYPE == Q8_KV) && N % 128 == 0;
    static constexpr int ROW = row_bytes(TYPE, N), PITCH = TOGETHER ? At::CODES : padded_row(ROW), SCALES_PITCH = TOGETHER ? At::SCALES : PITCH;
    static constexpr int SCALES = TOGETHER ? 16 * At::CODES : At::CODES + At::HIGHS, BYTES = 16 * (TOGETHER ? ROW : PITCH);

    // Keys are read in pieces of 32 bytes of rows 0 .. 3 and 4 .. 7, values in 16 (32 for N = 256) of rows 0, 2, 4, 6 and 1, 3, 5, 7.
    static __device__ constexpr int swap(int row) { return TOGETHER ? (row & 2) << 5 | ((row ^ row >> 2) & 1) << 5 | (row & 4) << 2 : 0; }

    // Where byte `at` of a row is, of one or several times 16 rows.
    static __device__ constexpr int place(int row, int at) {
        const int i = row % 16, first = row / 16 * BYTES;
        if (!TOGETHER) return first + i * PITCH + at;
        return first + (at < At::CODES ? i * PITCH + (at ^ swap(i)) : SCALES + i * SCALES_PITCH + at - At::CODES);
    }
};

// The codes of rows of N elements, which begin at multiples of 16 bytes.
template <int TYPE, int N>
struct Codes {
    using At = Places<TYPE, N>;
    static constexpr int HIGHS = At::CODES;  // where they begin
    static constexpr bool BYTES = At::BYTES, MIN = At::MIN, FIFTHS = At::FIFTHS, SIGNED = BYTES || TYPE == IQ4_NL;
    static constexpr int ZERO = TYPE == Q6_0 ? 32 : TYPE == Q5_0 ? 16 : TYPE == Q4_0 ? 8 : 0;  // the code of 0, where codes are not signed
    static constexpr u32 SIGNS = 0x80808080u;

    // Codes of IQ4_NL are looked up as they stand: the low and the high one of a byte become neighbours.
    static constexpr bool NEIGHBOURS = TYPE == IQ4_NL;

    // What the lower four of 8 neighbouring codes stand for, plus 128 or signed.
    template <bool PLUS_128>
    static __device__ __forceinline__ u32 looked_up(u32 codes) {
        constexpr u32 FLIP = PLUS_128 ? 0 : SIGNS;
        const u32 which = codes & 0x7777;  // bit 3 chooses between halves of the table
        const u32 low = __byte_perm(0x3f2d1801u ^ FLIP, 0x766a5d4fu ^ FLIP, which), high = __byte_perm(0xa6998d81u ^ FLIP, 0xf1d9c5b5u ^ FLIP, which);
        return __byte_perm(low, high, 0x3210 | (codes & 0x8888) >> 1);
    }

    // Four neighbouring bits as bit TO of the bytes of a word.
    template <int TO>
    static __device__ __forceinline__ u32 spread(u32 bits) { return (bits & 15) * (0x00204081u << TO) & 0x01010101u << TO; }

    // Keys. `of_row` gives lane t of 4 the codes of block b at places 8 t .. 8 t + 7, signed or from 0 on. Codes whose 0 is in the middle take the
    // high bits of their bytes, with the highest one inverted: they are signed, and LARGER times as large.
    static constexpr int LARGER = ZERO ? 128 / ZERO : 1;
    static __device__ __forceinline__ int place_of(int element) {  // of a block
        if (BYTES) return element;
        const int byte = element % 16, half = element / 16;
        return NEIGHBOURS ? 2 * byte + half : byte / 4 * 8 + half * 4 + byte % 4;
    }
    static __device__ __forceinline__ void of_row(const char* row, int b, int t, u32 (&codes)[2], int swap) {
        if constexpr (BYTES) {
            load_words<8>(row + ((At::low(b) + 8 * t) ^ swap), codes);
        } else {
            const u32 low = *(const u32*)(row + At::low(b) + 4 * t);
            u32 high = 0;
            if constexpr (TYPE == Q6_0) high = *(const u32*)(row + HIGHS + At::high(b) + t % 2 * 4) << (4 - t / 2 * 4);
            if constexpr (FIFTHS) high = *(const u32*)(row + HIGHS + At::high(b)) >> 4 * t;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if constexpr (NEIGHBOURS) codes[h] = looked_up<false>(low >> 16 * h);
                else if constexpr (TYPE == Q4_0) codes[h] = ((h ? low : low << 4) & 0xf0f0f0f0u) ^ SIGNS;
                else if constexpr (TYPE == Q5_0) codes[h] = ((h ? low >> 1 : low << 3) & 0x78787878u) | (~spread<7>(high >> 16 * h) & SIGNS);
                else if constexpr (TYPE == Q6_0) codes[h] = ((h ? low >> 2 : low << 2) & 0x3c3c3c3cu) | (((h ? high : high << 2) & 0xc0c0c0c0u) ^ SIGNS);
                else codes[h] = (low >> 4 * h & 0x0f0f0f0fu) | (FIFTHS ? spread<4>(high >> 16 * h) : 0);
            }
        }
    }

    // The scales of a row, with minima: halves as they are stored, or the one float of Q8_KV.
    struct Scales {
        static constexpr int BYTES = TYPE == Q8_KV ? 4 : At::SCALES;
        u32 words[(BYTES + 3) / 4];

        __device__ __forceinline__ explicit Scales(const char* scales) {
            if constexpr (BYTES % 4 == 0) {
                load_words<BYTES, alignment(InRing<TYPE, N>::SCALES | InRing<TYPE, N>::SCALES_PITCH)>(scales, words);
            } else {  // rows of an odd number of blocks
#pragma unroll
                for (int i = 0; i < (BYTES + 3) / 4; i++) {
                    const u8* at = (const u8*)scales + 4 * i;
                    words[i] = two_bytes(at) | (4 * i + 2 < BYTES ? two_bytes(at + 2) << 16 : 0);
                }
            }
        }
        __device__ __forceinline__ float half(int i) const { return half_to_float((u16)(words[i / 2] >> i % 2 * 16)); }
        __device__ __forceinline__ float factor(int b) const { return TYPE == Q8_KV ? __int_as_float((int)words[0]) : half(MIN ? 2 * b : b); }
        __device__ __forceinline__ float minimum(int b) const { return half(2 * b + 1); }
    };

    // Values. Lane j of 8 takes 4 WORDS neighbouring elements of every 32 WORDS (of 4-bit codes: halves of each byte), all in one block: word k of
    // its group g has elements `element(g, k, j, 0 .. 3)`.
    static constexpr int WORDS = N % 256 == 0 ? 8 : N % 128 == 0 ? 4 : N % 64 == 0 ? 2 : 1, GROUPS = N / 32 / WORDS;
    static constexpr int TAKEN = (BYTES ? 4 : 2) * WORDS;  // bytes of a lane
    static constexpr bool TWO = !BYTES && WORDS == 1;      // bytes have both nibbles of one word
    static_assert(!TWO || MIN, "rows of other types are no multiples of 4 bytes");

    static __device__ __forceinline__ int element(int g, int k, int j, int i) {
        if constexpr (BYTES) return (8 * g + j) * 4 * WORDS + 4 * k + i;
        const int byte = (8 * g + j) * TAKEN + (TWO ? i % 2 : NEIGHBOURS ? k * 2 + i / 2 : k / 2 * 4 + i);
        const int half = TWO ? i / 2 : NEIGHBOURS ? i % 2 : k % 2;
        return byte / 16 * 32 + byte % 16 + 16 * half;
    }
    static __device__ __forceinline__ int block_of(int g, int j) { return g * WORDS + j * WORDS / 8; }

    // The codes of a row, with 128 added to signed ones.
    static __device__ __forceinline__ void of_group(const char* row, int g, int j, u32 (&codes)[WORDS], int swap) {
        u32 low[(TAKEN + 3) / 4];
        const int at = (8 * g + j) * TAKEN;
        if constexpr (TAKEN > 16) {
#pragma unroll
            for (int i = 0; i < TAKEN / 16; i++) load_words<16>(row + ((at + 16 * i) ^ swap), *(u32(*)[4])(low + 4 * i));
        } else {
            load_words<TAKEN>(row + (at ^ swap), low);
        }
        if constexpr (BYTES) {
#pragma unroll
            for (int k = 0; k < WORDS; k++) codes[k] = low[k] ^ SIGNS;
            return;
        }
        const int first = j * TAKEN % 16;  // byte of the block
        const char* highs = row + HIGHS + At::high(block_of(g, j));
        u32 fifths = 0;
        if constexpr (FIFTHS) fifths = *(const u32*)highs >> first;
        if constexpr (TWO) {
            u32 x = (low[0] & 0x0f0f) | (low[0] & 0xf0f0) << 12;
            if constexpr (FIFTHS) x |= (fifths & 1) << 4 | (fifths & 2) << 11 | (fifths & 0x10000) << 4 | (fifths & 0x20000) << 11;
            codes[0] = x;
        } else {
#pragma unroll
            for (int w = 0; w < WORDS / 2; w++) {
                u32 high = 0;
                const int at = first + 4 * w;
                if constexpr (TYPE == Q6_0) high = *(const u32*)(highs + at % 8) << (4 - at / 8 * 4);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 x = low[w] >> 4 * h & 0x0f0f0f0fu;
                    if constexpr (FIFTHS) x |= spread<4>(fifths >> (16 * h + 4 * w));
                    if constexpr (TYPE == Q6_0) x |= high >> 2 * h & 0x30303030u;
                    codes[2 * w + h] = NEIGHBOURS ? looked_up<true>(low[w] >> 16 * h) : x;
                }
            }
        }
    }

    // Two codes of `of_group`, in bytes 0, 1 (low) or 2, 3 of x, as halves: 1024 + code has the code in its low byte, and the difference is exact.
    static constexpr u32 NOTHING = 0x6400u + (SIGNED ? 128 : ZERO);
    static __device__ __forceinline__ u32 low_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4140), NOTHING << 16 | NOTHING); }
    static __device__ __forceinline__ u32 high_pair(u32 x) { return minus_halves(__byte_perm(x, 0x64646464u, 0x4342), NOTHING << 16 | NOTHING); }
};
