// Scores of many rows for few columns, as routers need them: products in float32 on tensor cores.
//
// out[part][t][n] = sum over the columns of a part of x[t][k] * w[n][k]; who reads the scores adds the parts in order.
//
// A number is the sum of two in TF32 (11 bits each). Three of the four products of these are added: what is left out is 2^-22 of a product.
// Weights that are bfloat16 without loss, as those of most checkpoints, need no parts: x is the sum of three numbers in bfloat16, and their
// products take half as many instructions. Tensor cores cut sums off instead of rounding them, so the sum of DEPTH columns begins at zero and is added to
// the others in float32.
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int TOKENS = 64, COLUMNS = 128, DEPTH = 32, STAGES = 4, THREADS = 256;  // of a block's tile
constexpr int STRIDE = DEPTH * 4 + 64;  // bytes: two rows that eight lanes read at a time share no bank
constexpr int SHORT_STRIDE = DEPTH * 2 + 32;  // of rows in bfloat16, so that four rows share no bank
template <bool BF16> constexpr int WEIGHT_STRIDE = BF16 ? SHORT_STRIDE : STRIDE;
template <bool BF16> constexpr int STAGE_BYTES = TOKENS * STRIDE + COLUMNS * WEIGHT_STRIDE<BF16>;

#ifndef ON_HOST  // the test that runs kernels on the CPU has its own of these

__device__ __forceinline__ void copy_chunk(char* to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// c += a * b, 16 x 8 x 8. Of the operands' bits, the upper 19 count.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a * b, 16 x 8 x 16.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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

// added += the 32 rows of x at `x` times the 32 of w at `w`, 16 columns deep.
__device__ __forceinline__ void multiply_tf32(float (&added)[2][4][4], const char* x, const char* w) {
    Four a[2][2], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i / 2][i % 2] = load_four(x + 8 * i * STRIDE);
        b[i] = load_four(w + 8 * i * STRIDE);
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

// Two floats as sums of three in bfloat16, but for 2^-24 of them.
__device__ __forceinline__ void three_parts(float x, float y, u32 (&parts)[3]) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
        parts[i] = pack2<false>(x, y);
        const float2 taken = unpack2<false>(parts[i]);
        x -= taken.x, y -= taken.y;
    }
}

// As multiply_tf32, with w in bfloat16. A lane has four consecutive columns, two of each half of an instruction's.
__device__ __forceinline__ void multiply_bf16(float (&added)[2][4][4], const char* x, const char* w) {
    u32 a[2][2][2][3], b[4][2];  // x by 16 rows, row (8 apart), half, part
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 four = *reinterpret_cast<const float4*>(x + 8 * i * STRIDE);
        three_parts(four.x, four.y, a[i / 2][i % 2][0]);
        three_parts(four.z, four.w, a[i / 2][i % 2][1]);
        const uint2 pairs = *reinterpret_cast<const uint2*>(w + 8 * i * SHORT_STRIDE);
        b[i][0] = pairs.x, b[i][1] = pairs.y;
    }
#pragma unroll
    for (int part = 2; part >= 0; part--)  // the small products first
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 left[4] = {a[m][0][0][part], a[m][1][0][part], a[m][0][1][part], a[m][1][1][part]};
#pragma unroll
            for (int i = 0; i < 4; i++) mma_bf16(added[m][i], left, b[i]);
        }
}

// x float32[tokens, width], w [n, width] in float32 or bfloat16, width a multiple of DEPTH. Block (token tile, column tile, part); a part has
// `depth` stages.
template <bool BF16>
__device__ __forceinline__ void scores(char* shared, const float* x, const char* w, int tokens, int n, int width, int depth, float* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int first_token = blockIdx.x * TOKENS, first_column = blockIdx.y * COLUMNS, part = blockIdx.z;
    const int begin = part * depth, stages = min(depth, width / DEPTH - begin);

    // `rows` rows to shared memory, of numbers of so many bytes: 16 bytes a thread.
    auto copy_rows = [&](char* to, int stride, const char* from, int bytes, int rows, int first, int last, int stage) {
        const int chunks = DEPTH * bytes / 16, chunk = threadIdx.x % chunks, row = threadIdx.x / chunks;
        from += (long long)(begin + stage) * DEPTH * bytes + chunk * 16;
#pragma unroll
        for (int i = 0; i < rows; i += THREADS / chunks)
            copy_chunk(to + (row + i) * stride + chunk * 16, from + (long long)min(first + row + i, last) * width * bytes);
    };
    auto copy = [&](int stage) {
        if (stage < stages) {
            char* to = shared + stage % STAGES * STAGE_BYTES<BF16>;
            copy_rows(to, STRIDE, reinterpret_cast<const char*>(x), 4, TOKENS, first_token, tokens - 1, stage);
            copy_rows(to + TOKENS * STRIDE, WEIGHT_STRIDE<BF16>, w, BF16 ? 2 : 4, COLUMNS, first_column, n - 1, stage);
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
        const char* from = shared + stage % STAGES * STAGE_BYTES<BF16>;
        float added[2][4][4] = {};
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            const char *of_x = from + row * STRIDE + k * 64 + q * 16, *of_w = from + TOKENS * STRIDE + column * WEIGHT_STRIDE<BF16>;
            if constexpr (BF16) multiply_bf16(added, of_x, of_w + k * 32 + q * 8);
            else multiply_tf32(added, of_x, of_w + k * 64 + q * 16);
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

#ifndef ON_HOST
#define SCORES(NAME, BF16) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) \
    NAME(const float* x, const char* w, int tokens, int n, int width, int depth, float* out) { \
        follow_launch_before(); \
        extern __shared__ __align__(16) char shared[]; \
        scores<BF16>(shared, x, w, tokens, n, width, depth, out); \
    }
SCORES(scores_of_rows, false)
SCORES(scores_of_rows_bf16, true)
#endif
