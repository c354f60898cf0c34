// Kimi delta attention for 1 to 8 new tokens of a sequence in one launch: convolutions, decays, the delta rule, norm and gate of each head.
//
// A block for each head. Each warp holds 8 columns of the head's memory in registers, as in delta.cu: two lanes share the columns, 16 lanes
// share the rows, so that the sums over rows are butterflies. Every row decays by a factor of its own, which the product of the projections
// gives for each token. The memory is read before the previous launch has ended, as only this kernel writes it. Tokens follow each other
// within the kernel.
//
//     S <- diag(g) S;  e = beta (v - S^T k);  o = S^T q + (k . q) e;  S <- S + k e^T
//
// Compiled per shape: ROWS; HEADS; LENGTH of keys and values, a multiple of 4; TAPS of the convolutions; BOUND of the logarithms of decays, 0 for
// none.
#include "step/common.cuh"
#include "step/memory.cuh"

constexpr int PAST = TAPS - 1, INNER = HEADS * LENGTH, CHANNELS = 3 * INNER;
constexpr int WARPS = (LENGTH + 7) / 8, THREADS = 32 * WARPS;
constexpr int DEPTH = (LENGTH + 15) / 16;                                      // rows of the memory per lane
constexpr int MINE = 3 * LENGTH, EACH = (MINE + THREADS - 1) / THREADS;        // channels of a block, of a thread
constexpr int RESULTS = (ROWS * LENGTH + THREADS - 1) / THREADS;               // elements of the result per thread
static_assert(ROWS <= 8 && LENGTH % 4 == 0 && LENGTH <= 128 && TAPS >= 2, "a shape this is made for");

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// q, k, v, decays, gates float32[ROWS, INNER]: what the projections give, betas float32[ROWS, HEADS]; taps float32[CHANNELS, TAPS]; dt
// float32[INNER]; a float32[HEADS]; norm float32[LENGTH]; inputs float32[PAST, CHANNELS], those before the first row; memory float32[HEADS,
// LENGTH, LENGTH]; out float32[ROWS, INNER]. Both states are updated in place. With `other_memory` and `other_inputs` they move to and fro:
// at every second position after `begun` they are read from there, at the others written there.
extern "C" __global__ void __launch_bounds__(THREADS)
kimi_delta(const float* q, const float* k, const float* v, const float* decays, const float* gates, const float* betas,
           const float* __restrict__ taps, const float* __restrict__ dt, const float* __restrict__ a, const float* __restrict__ norm, float eps,
           float* inputs, float* memory, float* other_inputs, float* other_memory, const int* position, const int* begun, float* out) {
    alignas(16) __shared__ float mixed[ROWS][MINE];
    alignas(16) __shared__ float read[ROWS][LENGTH];
    __shared__ float kept[ROWS][LENGTH], of_row[ROWS][4], squares[ROWS][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    const int column = 8 * warp + lane % 2 * 4, first = lane / 2;

    float *memory_to = memory, *inputs_to = inputs;
    if (other_memory != nullptr) {
        if ((*position - *begun) & 1) memory = other_memory, inputs = other_inputs;
        else memory_to = other_memory, inputs_to = other_inputs;
    }
    float4 s[DEPTH];
    const long long mine = (long long)head * LENGTH * LENGTH;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        s[i] = row < LENGTH && column < LENGTH ? __ldcg((const float4*)(memory + mine + row * LENGTH + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float window[EACH][TAPS], weights[EACH][TAPS];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS, from = c < MINE ? c / LENGTH * INNER + head * LENGTH + c % LENGTH : 0;
#pragma unroll
        for (int t = 0; t < TAPS; t++) {
            weights[e][t] = __ldcg(taps + from * TAPS + t);  // a plain load would be moved past the wait
            window[e][t] = t < PAST ? __ldcg(inputs + t * CHANNELS + from) : 0.f;
        }
    }
    wait_for_inputs();
    start_dependents();

    float of_gate[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / LENGTH, c = at % LENGTH;
        if (row >= ROWS) continue;
        const int from = row * INNER + head * LENGTH + c;
        of_gate[i] = sigmoid(__ldcg(gates + from));
        const float x = __ldcg(decays + from) + dt[head * LENGTH + c];
        kept[row][c] = expf(BOUND < 0.f ? BOUND * sigmoid(a[head] * x) : a[head] * (x > 20.f ? x : log1pf(expf(x))));
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE) continue;
        const float* from = (c < LENGTH ? q : c < 2 * LENGTH ? k : v) + head * LENGTH + c % LENGTH;
        float x[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) x[row] = __ldcg(from + row * INNER);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            window[e][PAST] = x[row];
            float sum = 0.f;
#pragma unroll
            for (int t = 0; t < TAPS; t++) sum = fmaf(window[e][t], weights[e][t], sum);
            mixed[row][c] = silu(sum);
#pragma unroll
            for (int t = 0; t < PAST; t++) window[e][t] = window[e][t + 1];
        }
    }
    __syncthreads();
    for (int row = warp; row < ROWS; row += WARPS) {
        float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
        for (int i = lane; i < LENGTH; i += 32) {
            const float x = mixed[row][i], y = mixed[row][LENGTH + i];
            qq = fmaf(x, x, qq), kk = fmaf(y, y, kk), qk = fmaf(x, y, qk);
        }
        qq = warp_sum(qq), kk = warp_sum(kk), qk = warp_sum(qk);
        if (lane == 0) {
            const float of_q = rsqrtf(qq + 1e-6f) * rsqrtf((float)LENGTH), of_k = rsqrtf(kk + 1e-6f);
            of_row[row][0] = sigmoid(__ldcg(betas + row * HEADS + head));
            of_row[row][1] = of_q, of_row[row][2] = of_k, of_row[row][3] = qk * of_q * of_k;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
        const float beta = of_row[row][0], of_q = of_row[row][1], of_k = of_row[row][2], qk = of_row[row][3];
        float4 sk = make_float4(0.f, 0.f, 0.f, 0.f), sq = sk, e = sk, o = sk;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (LENGTH % 16 && at >= LENGTH) continue;
            const float decay = kept[row][at];
            s[i] = make_float4(decay * s[i].x, decay * s[i].y, decay * s[i].z, decay * s[i].w);
            sq = scaled_sum(s[i], mixed[row][at], sq);
            sk = scaled_sum(s[i], mixed[row][LENGTH + at], sk);
        }
        sk = over_rows(sk), sq = over_rows(sq);
        if (column < LENGTH) {
            const float4 x = *(const float4*)&mixed[row][2 * LENGTH + column];
            e = make_float4(beta * (x.x - of_k * sk.x), beta * (x.y - of_k * sk.y), beta * (x.z - of_k * sk.z), beta * (x.w - of_k * sk.w));
            o = make_float4(fmaf(e.x, qk, of_q * sq.x), fmaf(e.y, qk, of_q * sq.y), fmaf(e.z, qk, of_q * sq.z), fmaf(e.w, qk, of_q * sq.w));
            if (first == 0) *(float4*)&read[row][column] = o;
        }
        float square = fmaf(o.x, o.x, fmaf(o.y, o.y, fmaf(o.z, o.z, o.w * o.w)));
        square += __shfl_xor_sync(0xffffffff, square, 1);
        if (lane == 0) squares[row][warp] = square;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (LENGTH % 16 && at >= LENGTH) continue;
            s[i] = scaled_sum(e, mixed[row][LENGTH + at] * of_k, s[i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / LENGTH, c = at % LENGTH;
        if (row >= ROWS) continue;
        float square = 0.f;
#pragma unroll
        for (int j = 0; j < WARPS; j++) square += squares[row][j];
        out[row * INNER + head * LENGTH + c] = read[row][c] * rsqrtf(square / (float)LENGTH + eps) * norm[c] * of_gate[i];
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        if (row < LENGTH && column < LENGTH) *(float4*)(memory_to + mine + row * LENGTH + column) = s[i];
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE) continue;
#pragma unroll
        for (int t = 0; t < PAST; t++) inputs_to[t * CHANNELS + c / LENGTH * INNER + head * LENGTH + c % LENGTH] = window[e][t];
    }
}
