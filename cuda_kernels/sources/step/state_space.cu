// A state-space layer of Mamba-2 for 1 to 8 new tokens of a sequence in two launches: convolution, recurrence and gate; norms of groups.
//
// `scan` has one block for each head. Each warp holds 8 columns of the head's memory in registers, as in delta.cu: two lanes share the
// columns, 16 lanes share the rows, so that the sums over rows are butterflies. The memory is read before the previous launch has ended, as
// only this kernel writes it. Tokens follow each other within the kernel.
//
//     S <- exp(a dt) S + b (dt x)^T;  o = S^T c + d x
//
// The product with S is taken before its update: S^T c = exp(a dt) S^T c + (b . c) dt x.
//
// Compiled per shape: ROWS; HEADS, GROUPS of them; LENGTH of a head and STATE, multiples of 4; TAPS of the convolution.
#include "step/block_sum.cuh"
#include "step/memory.cuh"

constexpr int PER_GROUP = HEADS / GROUPS, PAST = TAPS - 1;
constexpr int INNER = HEADS * LENGTH, VECTORS = GROUPS * STATE, CHANNELS = INNER + 2 * VECTORS;
constexpr int PITCH = INNER + CHANNELS + HEADS;                              // elements of a row of products
constexpr int WARPS = (LENGTH + 7) / 8, THREADS = 32 * WARPS;
constexpr int DEPTH = (STATE + 15) / 16;                                     // rows of the memory per lane
constexpr int MINE = 2 * STATE + LENGTH, EACH = (MINE + THREADS - 1) / THREADS;  // channels of a block, of a thread
constexpr int RESULTS = (ROWS * LENGTH + THREADS - 1) / THREADS;             // elements of the result per thread
constexpr int NORM_WARPS = 8, OF_GROUP = INNER / GROUPS;
static_assert(STATE % 4 == 0 && LENGTH % 4 == 0 && HEADS % GROUPS == 0, "a shape this is made for");
static_assert(ROWS <= 8 && STATE <= 256 && LENGTH <= 128 && TAPS >= 2, "a shape this is made for");

// The number of channel c of a block: what writes, what reads, then values.
__device__ __forceinline__ int channel(int c, int head) {
    const int group = head / PER_GROUP;
    if (c < STATE) return INNER + group * STATE + c;
    if (c < 2 * STATE) return INNER + VECTORS + group * STATE + c - STATE;
    return head * LENGTH + c - 2 * STATE;
}

// products float32[ROWS, PITCH]: gates, channels, steps; taps float32[CHANNELS, TAPS]; bias float32[CHANNELS] or null; dt, a, d
// float32[HEADS]; inputs float32[PAST, CHANNELS], those before the first row; memory float32[HEADS, STATE, LENGTH]; tickets u32[GROUPS],
// zero; out float32[ROWS, INNER], not normed yet. Both states are updated in place. With `other_memory` and `other_inputs` they move to and
// fro: at every second position after `begun` they are read from there, at the others written there.
extern "C" __global__ void __launch_bounds__(THREADS)
scan(const float* products, const float* __restrict__ taps, const float* __restrict__ bias, const float* __restrict__ dt,
     const float* __restrict__ a, const float* __restrict__ d, float* inputs, float* memory, float* other_inputs, float* other_memory,
     const int* position, const int* begun, u32* tickets, float* out) {
    alignas(16) __shared__ float mixed[ROWS][MINE];
    alignas(16) __shared__ float read[ROWS][LENGTH];
    __shared__ float of_row[ROWS][3];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, group = head / PER_GROUP;
    const int column = 8 * warp + lane % 2 * 4, first = lane / 2;

    float *memory_to = memory, *inputs_to = inputs;
    if (other_memory != nullptr) {
        if ((*position - *begun) & 1) memory = other_memory, inputs = other_inputs;
        else memory_to = other_memory, inputs_to = other_inputs;
    }
    float4 s[DEPTH];
    const long long mine = (long long)head * STATE * LENGTH;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        s[i] = row < STATE && column < LENGTH ? __ldcg((const float4*)(memory + mine + row * LENGTH + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float window[EACH][TAPS], weights[EACH][TAPS], added[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS, from = c < MINE ? channel(c, head) : 0;
        added[e] = bias == nullptr ? 0.f : __ldcg(bias + from);
#pragma unroll
        for (int t = 0; t < TAPS; t++) {
            weights[e][t] = __ldcg(taps + from * TAPS + t);  // a plain load would be moved past the wait
            window[e][t] = t < PAST ? __ldcg(inputs + t * CHANNELS + from) : 0.f;
        }
    }
    wait_for_inputs();
    start_dependents();

    float gates[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / LENGTH;
        gates[i] = row < ROWS ? __ldcg(products + row * PITCH + head * LENGTH + at % LENGTH) : 0.f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE) continue;
        const int from = INNER + channel(c, head);
        float x[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) x[row] = __ldcg(products + row * PITCH + from);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            window[e][PAST] = x[row];
            float sum = added[e];
#pragma unroll
            for (int t = 0; t < TAPS; t++) sum = fmaf(window[e][t], weights[e][t], sum);
            mixed[row][c] = silu(sum);
#pragma unroll
            for (int t = 0; t < PAST; t++) window[e][t] = window[e][t + 1];
        }
    }
    __syncthreads();
    for (int row = warp; row < ROWS; row += WARPS) {
        float bc = 0.f;
#pragma unroll
        for (int i = lane; i < STATE; i += 32) bc = fmaf(mixed[row][i], mixed[row][STATE + i], bc);
        bc = warp_sum(bc);
        if (lane == 0) {
            const float x = __ldcg(products + row * PITCH + INNER + CHANNELS + head) + dt[head];
            const float step = x > 20.f ? x : log1pf(expf(x));
            of_row[row][0] = expf(a[head] * step), of_row[row][1] = step, of_row[row][2] = bc * step + d[head];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
        const float decay = of_row[row][0], step = of_row[row][1], own = of_row[row][2];
        float4 sc = make_float4(0.f, 0.f, 0.f, 0.f), x = sc;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (STATE % 16 && at >= STATE) continue;
            sc = scaled_sum(s[i], mixed[row][STATE + at], sc);
        }
        sc = over_rows(sc);
        if (column < LENGTH) {
            x = *(const float4*)&mixed[row][2 * STATE + column];
            if (first == 0) {
                *(float4*)&read[row][column] =
                    make_float4(fmaf(decay, sc.x, own * x.x), fmaf(decay, sc.y, own * x.y), fmaf(decay, sc.z, own * x.z), fmaf(decay, sc.w, own * x.w));
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (STATE % 16 && at >= STATE) continue;
            const float b = mixed[row][at] * step;
            s[i] = make_float4(fmaf(b, x.x, decay * s[i].x), fmaf(b, x.y, decay * s[i].y), fmaf(b, x.z, decay * s[i].z), fmaf(b, x.w, decay * s[i].w));
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / LENGTH, c = at % LENGTH;
        if (row < ROWS) out[row * INNER + head * LENGTH + c] = read[row][c] * silu(gates[i]);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        if (row < STATE && column < LENGTH) *(float4*)(memory_to + mine + row * LENGTH + column) = s[i];
    }
    // All blocks of a group read the inputs of its vectors: the last one to have done so replaces them. Where they are written to another
    // place than they are read from, nobody has to wait, and the first block does it.
    bool last;
    if (PER_GROUP == 1) last = true;
    else if (other_memory != nullptr) last = head % PER_GROUP == 0;
    else last = last_to_arrive(tickets + group, PER_GROUP);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE || (c < 2 * STATE && !last)) continue;
#pragma unroll
        for (int t = 0; t < PAST; t++) inputs_to[t * CHANNELS + channel(c, head)] = window[e][t];
    }
}

// RMS norms of the groups of x float32[ROWS, INNER], in place. weight float32[INNER]. A block for each group of each row.
extern "C" __global__ void __launch_bounds__(32 * NORM_WARPS)
norm_groups(float* x, const float* __restrict__ weight, float eps) {
    constexpr int FOURS = OF_GROUP / 4, OF_THREAD = (FOURS + 32 * NORM_WARPS - 1) / (32 * NORM_WARPS);
    __shared__ float sums[NORM_WARPS];
    float4* mine = (float4*)(x + (long long)blockIdx.y * INNER + blockIdx.x * OF_GROUP);
    const float4* of_mine = (const float4*)(weight + blockIdx.x * OF_GROUP);
    float4 values[OF_THREAD], weights[OF_THREAD];
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++) {
        const int i = threadIdx.x + n * 32 * NORM_WARPS;
        weights[n] = i < FOURS ? __ldcg(of_mine + i) : make_float4(0.f, 0.f, 0.f, 0.f);  // a plain load would be moved past the wait
    }
    wait_for_inputs();
    start_dependents();
    float square = 0.f;
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++) {
        const int i = threadIdx.x + n * 32 * NORM_WARPS;
        values[n] = i < FOURS ? __ldcg(mine + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++)
        square = fmaf(values[n].x, values[n].x, fmaf(values[n].y, values[n].y, fmaf(values[n].z, values[n].z, fmaf(values[n].w, values[n].w, square))));
    const float factor = rsqrtf(block_sum<NORM_WARPS>(square, sums) / (float)OF_GROUP + eps);
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++) {
        const int i = threadIdx.x + n * 32 * NORM_WARPS;
        const float4 y = values[n], w = weights[n];
        if (i < FOURS) mine[i] = make_float4(y.x * factor * w.x, y.y * factor * w.y, y.z * factor * w.z, y.w * factor * w.w);
    }
}
