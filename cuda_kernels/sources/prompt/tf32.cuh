// Products of matrices in shared memory on tensor cores: factors rounded to TF32 (10 bits of mantissa), sums in float32.
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
#endif

__device__ __forceinline__ float4 rounded(float4 x) { return make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)); }

// Floats between rows of shared memory of at least `n`, a multiple of 16: rows begin in other banks, for rows that are read by fours (`by_fours`), of
// first factors that are read one by one, and of second factors that are read down their columns.
__device__ constexpr int fours_pitch(int n) { return n % 32 == 16 ? n : n + 16; }
__device__ constexpr int first_pitch(int n) { return n % 32 == 0 ? n + 4 : n + 20; }
__device__ constexpr int second_pitch(int n) { return n % 32 == 0 ? n + 8 : n + 24; }

// Where float `at` of row `row` is, if fours of every row are exchanged so that 8 rows of a column, or 4 rows two apart of 8 columns, are in
// different banks. Rows take `exchanged_pitch` floats.
__device__ __forceinline__ int exchanged(int row, int at) { return at ^ row / 2 % 4 * 8; }
__device__ constexpr int exchanged_pitch(int n) { return (n + 31) / 32 * 32 + 16; }

// d += the rows of a times the rows of b, K deep (a multiple of 16). The order of k is free: a lane takes four in a row for two instructions.
// EXCHANGED: b's floats are.
template <int BLOCKS, int K, bool EXCHANGED = false>
__device__ __forceinline__ void by_fours(float (&d)[BLOCKS][4], const float* a, int a_pitch, const float* b, int b_pitch) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 4;
    a += g * a_pitch + t, b += g * b_pitch;
#pragma unroll 4
    for (int k = 0; k < K; k += 16) {
        const float4 x = *(const float4*)(a + k), y = *(const float4*)(a + 8 * a_pitch + k);
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

// d += the rows of a times the columns of b, `depth` deep (a multiple of 8). TURNED: a's columns are in rows.
template <int BLOCKS, bool TURNED = false>
__device__ __forceinline__ void by_columns(float (&d)[BLOCKS][4], const float* a, int a_pitch, const float* b, int b_pitch, int depth) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = TURNED ? 1 : a_pitch, column = TURNED ? a_pitch : 1;
    a += g * row + t * column, b += t * b_pitch + g;
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
        const float x[4] = {a[k * column], a[k * column + 8 * row], a[(k + 4) * column], a[(k + 4) * column + 8 * row]};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const float y[2] = {b[k * b_pitch + 8 * i], b[(k + 4) * b_pitch + 8 * i]};
            mma(d[i], x, y);
        }
    }
}

// Rows of LENGTH floats to shared memory, `n` of them, by a block of THREADS.
template <int LENGTH, int THREADS>
__device__ __forceinline__ void copy_rows(float* to, int pitch, const float* from, int n) {
    for (int i = threadIdx.x; i < n * (LENGTH / 4); i += THREADS)
        copy_to_shared(to + i / (LENGTH / 4) * pitch + i % (LENGTH / 4) * 4, from + (long long)(i / (LENGTH / 4)) * LENGTH + i % (LENGTH / 4) * 4);
}

// Columns `from` to `to` (multiples of 4) of n rows become 0.
template <int THREADS>
__device__ __forceinline__ void clear_columns(float* rows, int pitch, int n, int from, int to) {
    const int fours = (to - from) / 4;
    if (!fours) return;
    for (int i = threadIdx.x; i < n * fours; i += THREADS) *(float4*)(rows + i / fours * pitch + from + i % fours * 4) = make_float4(0.f, 0.f, 0.f, 0.f);
}
