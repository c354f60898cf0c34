// Products of prompts in 8 bits: rows rounded to signed bytes, and sums of their products back to halves.
//
// Each group of 128 columns of a row is first multiplied by the Hadamard matrix of that size (entries 1 and -1), which spreads large
// values over the group. The same is done to both factors, so their product is 128 times what it was. A row is rounded with one scale:
// value = scale * byte.
#include "prompt/common.cuh"

constexpr int MOST_THREADS = 1024;
constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: an integer added to it is in the lowest bits of the sum

// Sums and differences of 32 values, each in all five bits of their numbers; then of these over four lanes.
__device__ __forceinline__ void transform(float (&v)[32], int lane) {
#pragma unroll
    for (int h = 1; h < 32; h *= 2)
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (!(i & h)) {
                const float a = v[i], b = v[i + h];
                v[i] = a + b;
                v[i + h] = a - b;
            }
#pragma unroll
    for (int h = 1; h < 4; h *= 2)
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], h);
            v[i] = lane & h ? other - v[i] : v[i] + other;
        }
}

__device__ __forceinline__ int warp_max_of(int x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ u32 rounded_four(const float* v, float inverse) {
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(fmaf(v[i], inverse, MAGIC));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// This thread's 32 of `units` * 32 values of a row, by all threads of a block.
__device__ __forceinline__ void round_row(float (&v)[32], int units, uint4* bytes, float* scale) {
    __shared__ int largest[MOST_THREADS / 32];
    const int thread = threadIdx.x, lane = thread % 32;
    transform(v, lane);
    int bits = 0;  // of the largest absolute value. As integers those of NaN are largest.
#pragma unroll
    for (int i = 0; i < 32; i++) bits = max(bits, __float_as_int(v[i]) & 0x7fffffff);
    bits = warp_max_of(bits);
    if (lane == 0) largest[thread / 32] = bits;
    __syncthreads();
    const float most = __int_as_float(warp_max_of(lane < (units + 31) / 32 ? largest[lane] : 0));
    const float inverse = most > 0.f ? 127.f / most : 0.f;
    if (thread < units) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            bytes[2 * thread + i] = make_uint4(rounded_four(v + 16 * i, inverse), rounded_four(v + 16 * i + 4, inverse),
                                               rounded_four(v + 16 * i + 8, inverse), rounded_four(v + 16 * i + 12, inverse));
        if (thread == 0) *scale = most / 127.f;
    }
}

#ifdef TYPE

// Rows `first` and on of packed weights to bytes int8[rows, cols] and scales float[rows], as rounded_rows does it.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
rounded_weights(const uint8_t* base, int64_t total_rows, int cols, int64_t first, int rows, uint4* bytes, float* scales) {
    const Geometry g = TYPE::geometry(total_rows, cols);
    prepare_unit<TYPE>();
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        float v[32];
        if (int(threadIdx.x) < g.units) {
            decode_unit<TYPE>(TYPE::load(base, g, first + row, threadIdx.x), threadIdx.x, v);
        } else {
#pragma unroll
            for (int i = 0; i < 32; i++) v[i] = 0.f;
        }
        round_row(v, g.units, bytes + int64_t(row) * g.units * 2, scales + row);
        __syncthreads();
    }
}

#else

constexpr bool F16 = HALF;

// x half[rows, cols] to bytes int8[rows, cols] and scales float[rows]. A block rounds one row, 32 columns a thread; cols is a multiple of 128.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
rounded_rows(const uint4* x, int cols, uint4* bytes, float* scales) {
    const int thread = threadIdx.x, units = cols / 32;
    const long long before = (long long)blockIdx.x * units;
    float v[32];
    if (thread < units) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float eight[8];
            unpack8<F16>(x[4 * (before + thread) + i], eight);
#pragma unroll
            for (int j = 0; j < 8; j++) v[8 * i + j] = eight[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 32; i++) v[i] = 0.f;
    }
    round_row(v, units, bytes + 2 * before, scales + blockIdx.x);
}

// out half[rows, stride] = sums int[rows, n] times the scales of rows and columns and 1 / 128, plus bias half[n] where it is not null.
// A block has 2048 columns of a row, a thread 8; n and stride are multiples of 8.
extern "C" __global__ void __launch_bounds__(256)
scaled_sums(const int4* sums, const float* of_rows, const float* of_columns, const uint4* bias, int n, int stride, uint4* out) {
    const int row = blockIdx.x, chunk = blockIdx.y * 256 + threadIdx.x;
    if (chunk >= n / 8) return;
    const long long at = (long long)row * (n / 8) + chunk;
    const int4 low = sums[2 * at], high = sums[2 * at + 1];
    const float scale = of_rows[row] * 0.0078125f;
    float by[8], more[8], y[8];
    load8(of_columns + 8 * chunk, by);
    if (bias) unpack8<F16>(bias[chunk], more);
    const int found[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        y[i] = (float)found[i] * scale * by[i];
        if (bias) y[i] += more[i];
    }
    out[(long long)row * (stride / 8) + chunk] = pack8<F16>(y);
}

#endif
