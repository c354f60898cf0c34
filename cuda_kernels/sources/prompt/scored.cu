// Scores of many rows for few columns, as routers need them: products in float32 on tensor cores.
//
// out[part][t][n] = sum over the columns of a part of x[t][k] * w[n][k]; who reads the scores adds the parts in order.
//
// A number is the sum of two in TF32 (11 bits each). Three of the four products of these are added: what is left out is 2^-22 of a product.
// Tensor cores cut sums off instead of rounding them, so the sum of DEPTH columns begins at zero and is added to the others in float32.
#include "prompt/common.cuh"

constexpr int TOKENS = 64, COLUMNS = 128, DEPTH = 32, STAGES = 4, THREADS = 256;  // of a block's tile
constexpr int STRIDE = DEPTH * 4 + 64;  // bytes: two rows that eight lanes read at a time share no bank
constexpr int STAGE_BYTES = (TOKENS + COLUMNS) * STRIDE;

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these

__device__ __forceinline__ void copy_chunk(char* to, const float* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// c += a * b, 16 x 8 x 8. Of the operands' bits, the upper 19 count.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// x = whole + rest, but for 2^-23 of it.
__device__ __forceinline__ void two_parts(float x, u32& whole, u32& rest) {
    whole = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    rest = __float_as_uint(x - __uint_as_float(whole));
}

// Four consecutive columns of a row: those of the slots q and q + 4 of an instruction, and of the next one. Any order of columns is
// right that x and w share.
struct Four { u32 whole[4], rest[4]; };
__device__ __forceinline__ Four load_four(const char* at) {
    const float4 x = *reinterpret_cast<const float4*>(at);
    Four four;
    two_parts(x.x, four.whole[0], four.rest[0]);
    two_parts(x.y, four.whole[1], four.rest[1]);
    two_parts(x.z, four.whole[2], four.rest[2]);
    two_parts(x.w, four.whole[3], four.rest[3]);
    return four;
}

// x float32[tokens, width], w float32[n, width], width a multiple of DEPTH. Block (token tile, column tile, part); a part has `depth` stages.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
scores_of_rows(const float* x, const float* w, int tokens, int n, int width, int depth, float* out) {
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int first_token = blockIdx.x * TOKENS, first_column = blockIdx.y * COLUMNS, part = blockIdx.z;
    const int begin = part * depth, stages = min(depth, width / DEPTH - begin);

    const int chunk = threadIdx.x % 8, lane_row = threadIdx.x / 8;
    auto copy = [&](int stage) {
        if (stage < stages) {
            char* to = shared + stage % STAGES * STAGE_BYTES + lane_row * STRIDE + chunk * 16;
            const int at = (begin + stage) * DEPTH + chunk * 4;
#pragma unroll
            for (int i = 0; i < TOKENS; i += THREADS / 8)
                copy_chunk(to + i * STRIDE, x + (long long)min(first_token + lane_row + i, tokens - 1) * width + at);
#pragma unroll
            for (int i = 0; i < COLUMNS; i += THREADS / 8)
                copy_chunk(to + (TOKENS + i) * STRIDE, w + (long long)min(first_column + lane_row + i, n - 1) * width + at);
        }
        end_of_copies();
    };
    for (int stage = 0; stage < STAGES - 1; stage++) copy(stage);

    const int row = 32 * (warp % 2) + g, column = 32 * (warp / 2) + g;  // of the tile
    float sums[2][4][4] = {};
    for (int stage = 0; stage < stages; stage++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // all have read the stage that is filled next
        copy(stage + STAGES - 1);
        const char* from = shared + stage % STAGES * STAGE_BYTES + q * 16;
        float added[2][4][4] = {};
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            Four a[2][2], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i / 2][i % 2] = load_four(from + (row + 8 * i) * STRIDE + k * 64);
                b[i] = load_four(from + (TOKENS + column + 8 * i) * STRIDE + k * 64);
            }
#pragma unroll
            for (int s = 0; s < 4; s += 2)
#pragma unroll
                for (int which = 0; which < 3; which++)  // the small products first
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const u32 *low = which == 0 ? a[m][0].rest : a[m][0].whole, *high = which == 0 ? a[m][1].rest : a[m][1].whole;
                        const u32 left[4] = {low[s], high[s], low[s + 1], high[s + 1]};
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const u32* of = which == 1 ? b[i].rest : b[i].whole;
                            const u32 right[2] = {of[s], of[s + 1]};
                            mma_tf32(added[m][i], left, right);
                        }
                    }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[m][i][j] += added[m][i][j];
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int t = first_token + row + 16 * m + 8 * (j / 2), at = first_column + column - g + 8 * i + 2 * q + j % 2;
                if (t < tokens && at < n) out[((long long)part * tokens + t) * n + at] = sums[m][i][j];
            }
}
