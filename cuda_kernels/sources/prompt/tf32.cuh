// Products of matrices in shared memory on tensor cores: factors rounded to TF32 (10 bits of mantissa), sums in float32. Factors whose values are at
// most 1 may be float16 instead (u16), which has as many bits: above 2^-14 they are the same numbers, below off by 2^-25 at most.
//
// A warp computes 16 rows and 8 columns for each of BLOCKS: lane l has d[b][0], d[b][1] of row l / 4, columns 8 b + l % 4 * 2 and the next, and
// d[b][2], d[b][3] of the row 8 below.
#pragma once

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these
// x rounded to TF32, as a float.
__device__ __forceinline__ float rounded(float x) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

// d += 16 x 8 factors times 8 x 8. With g = lane / 4, t = lane % 4: a has row g and g + 8 of column t, the same of column t + 4; b rows t, t + 4 of column g.
__device__ __forceinline__ void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// d += 16 x 16 factors in float16 times 16 x 8. Registers of two, columns 2 t and the next: a has those of row g, of g + 8, and the same 8 columns on; b those
// of column g, and 8 on.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

__device__ __forceinline__ float4 rounded(float4 x) { return make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)); }

// Floats between rows of shared memory of at least `n`, a multiple of 16: rows begin in other banks, of first factors that are read one by one, and of
// second factors that are read down their columns.
__device__ constexpr int first_pitch(int n) { return n % 32 == 0 ? n + 4 : n + 20; }
__device__ constexpr int second_pitch(int n) { return n % 32 == 0 ? n + 8 : n + 24; }

// The same of float16, in halves: rows that are read by fours or down their columns, and first factors that are read one by one. Whole 16 bytes.
__device__ constexpr int halves_pitch(int n) { return 2 * (n / 2 + (40 - n / 2 % 32) % 32); }
__device__ constexpr int first_halves_pitch(int n) { return 2 * (n / 2 + (36 - n / 2 % 32) % 32); }

__device__ __forceinline__ float factor(const float* at) { return *at; }
__device__ __forceinline__ float factor(const u16* at) { return half_to_float(*at); }
__device__ __forceinline__ float4 four_factors(const float* at) { return *(const float4*)at; }
__device__ __forceinline__ float4 four_factors(const u16* at) {
    const uint2 x = *(const uint2*)at;
    return make_float4(half_to_float((u16)x.x), half_to_float((u16)(x.x >> 16)), half_to_float((u16)x.y), half_to_float((u16)(x.y >> 16)));
}
// Two factors of 10 bits, next to each other.
__device__ __forceinline__ void store_two(float* to, float x, float y) { *(float2*)to = make_float2(rounded(x), rounded(y)); }
__device__ __forceinline__ void store_two(u16* to, float x, float y) { *(u32*)to = float_to_half(x) | (u32)float_to_half(y) << 16; }

// Where float `at` of row `row` is, if fours of every row are exchanged so that 8 rows of a column, or 4 rows two apart of 8 columns, are in
// different banks. Rows take `exchanged_pitch` floats.
__device__ __forceinline__ int exchanged(int row, int at) { return at ^ row / 2 % 4 * 8; }
__device__ constexpr int exchanged_pitch(int n) { return (n + 31) / 32 * 32 + 16; }

// d += the rows of a times the rows of b, K deep (a multiple of 16). The order of k is free: a lane takes four in a row for two instructions.
// EXCHANGED: b's floats are.
template <int BLOCKS, int K, bool EXCHANGED = false, class A>
__device__ __forceinline__ void by_fours(float (&d)[BLOCKS][4], const A* a, int a_pitch, const float* b, int b_pitch) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 4;
    a += g * a_pitch + t, b += g * b_pitch;
#pragma unroll 4
    for (int k = 0; k < K; k += 16) {
        const float4 x = four_factors(a + k), y = four_factors(a + 8 * a_pitch + k);
        const float one[4] = {x.x, y.x, x.y, y.y}, two[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const float4 z = *(const float4*)(b + 8 * i * b_pitch + (EXCHANGED ? exchanged(g, k + t) : k + t));
            const float first[2] = {z.x, z.y}, second[2] = {z.z, z.w};
            mma(d[i], one, first);
            mma(d[i], two, second);
        }
    }
}

// The same, both in float16.
template <int BLOCKS, int K>
__device__ __forceinline__ void by_fours(float (&d)[BLOCKS][4], const u16* a, int a_pitch, const u16* b, int b_pitch) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 4;
    a += g * a_pitch + t, b += g * b_pitch + t;
#pragma unroll 4
    for (int k = 0; k < K; k += 16) {
        const uint2 x = *(const uint2*)(a + k), y = *(const uint2*)(a + 8 * a_pitch + k);
        const u32 rows[4] = {x.x, y.x, x.y, y.y};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const uint2 z = *(const uint2*)(b + 8 * i * b_pitch + k);
            const u32 column[2] = {z.x, z.y};
            mma_f16(d[i], rows, column);
        }
    }
}

// d += the rows of a times the columns of b, `depth` deep (a multiple of 8). TURNED: a's columns are in rows.
template <int BLOCKS, bool TURNED = false, class A, class B>
__device__ __forceinline__ void by_columns(float (&d)[BLOCKS][4], const A* a, int a_pitch, const B* b, int b_pitch, int depth) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = TURNED ? 1 : a_pitch, column = TURNED ? a_pitch : 1;
    a += g * row + t * column, b += t * b_pitch + g;
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
        const A* later = a + 4 * column;
        const float x[4] = {factor(a + k * column), factor(a + k * column + 8 * row), factor(later + k * column), factor(later + k * column + 8 * row)};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const float y[2] = {factor(b + k * b_pitch + 8 * i), factor(b + (k + 4) * b_pitch + 8 * i)};
            mma(d[i], x, y);
        }
    }
}

// Rows of COLUMNS elements (a multiple of 4) to shared memory, `n` of them, by a block of THREADS: 16 bytes at a time, or 8 where rows of float16
// do not begin at 16.
template <int COLUMNS, int THREADS, class T>
__device__ __forceinline__ void copy_rows(T* to, int pitch, const T* from, int n) {
    constexpr int EACH = sizeof(T) == 2 && COLUMNS % 8 ? 4 : 16 / sizeof(T), PARTS = COLUMNS / EACH;
    for (int i = threadIdx.x; i < n * PARTS; i += THREADS)
        copy_to_shared<EACH * sizeof(T)>(to + i / PARTS * pitch + i % PARTS * EACH, from + (long long)(i / PARTS) * COLUMNS + i % PARTS * EACH);
}

// Columns `from` to `to` (multiples of 4) of n rows become 0.
template <int THREADS, class T>
__device__ __forceinline__ void clear_columns(T* rows, int pitch, int n, int from, int to) {
    const int fours = (to - from) / 4;
    if (!fours) return;
    for (int i = threadIdx.x; i < n * fours; i += THREADS) {
        T* at = rows + i / fours * pitch + from + i % fours * 4;
        if constexpr (sizeof(T) == 4) *(float4*)at = make_float4(0.f, 0.f, 0.f, 0.f);
        else *(uint2*)at = make_uint2(0, 0);
    }
}
