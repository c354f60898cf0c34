// A gated delta net for 1 to 8 new tokens of a sequence in one launch: rates, convolution, L2 norms, the rule, norm and gate.
//
// There is one block for each value head, or, on devices with clusters, a cluster of PARTS blocks that each have a part of its columns and
// add their squares for the norm. Each warp holds 8 columns of the head's memory in
// registers: two lanes share the columns, 16 lanes share the rows, so that the sums over rows are
// butterflies. The memory is read before the previous launch has ended, as only this kernel writes
// it. Tokens follow each other within the kernel.
//
//     S <- exp(g) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = S^T q
//
// Both products with S are taken before its update: o = exp(g) S^T q + (k . q) e.
//
// Compiled per shape: ROWS; WIDTH of the stream; KEY_HEADS, VALUE_HEADS; KEY and VALUE, their
// lengths (multiples of 4); TAPS of the convolution; TILED: value head j reads key head
// j % KEY_HEADS, else j / (VALUE_HEADS / KEY_HEADS); JOINED: queries, keys, values and gates of each
// key head in turn are one product; PARTS.
#include "step/common.cuh"
#include "step/memory.cuh"

constexpr int GROUP = VALUE_HEADS / KEY_HEADS, PAST = TAPS - 1;
constexpr int OWN = VALUE / PARTS;                                             // columns of a block
constexpr int WARPS = (OWN + 7) / 8, THREADS = 32 * WARPS;
constexpr int DEPTH = (KEY + 15) / 16;                                         // rows of the memory per lane
constexpr int CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE;            // of the convolution
constexpr int TURN = 2 * KEY + 2 * GROUP * VALUE;                              // elements of a key head if JOINED
constexpr int PITCH = JOINED ? KEY_HEADS * TURN : CHANNELS, Z_PITCH = JOINED ? PITCH : VALUE_HEADS * VALUE;
constexpr int MINE = 2 * KEY + OWN, EACH = (MINE + THREADS - 1) / THREADS;   // channels of a block, of a thread
constexpr int RESULTS = (ROWS * OWN + THREADS - 1) / THREADS;                // elements of the result per thread
constexpr int QUADS = WIDTH / 4, PER = (QUADS + THREADS - 1) / THREADS;        // float4 of a row; of them per thread
static_assert(WIDTH % 4 == 0 && KEY % 4 == 0 && VALUE % 4 == 0 && VALUE_HEADS % KEY_HEADS == 0, "a shape this is made for");
static_assert(PARTS == 1 || VALUE % (8 * PARTS) == 0, "a shape this is made for");
static_assert(ROWS <= 8 && KEY <= 256 && VALUE <= 128 && TAPS >= 2, "a shape this is made for");

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// The number of channel c of a block, queries, keys, then values, among all channels, and in the product.
__device__ __forceinline__ int channel(int c, int key_head, int head, int part) {
    if (c < KEY) return key_head * KEY + c;
    if (c < 2 * KEY) return (KEY_HEADS + key_head) * KEY + c - KEY;
    return 2 * KEY_HEADS * KEY + head * VALUE + part * OWN + c - 2 * KEY;
}

__device__ __forceinline__ int in_product(int c, int key_head, int head, int part) {
    if (!JOINED) return channel(c, key_head, head, part);
    return c < 2 * KEY ? key_head * TURN + c : head / GROUP * TURN + head % GROUP * VALUE + part * OWN + c;
}

// h float32[ROWS, WIDTH]; norm float32[WIDTH]; rates float32[2, VALUE_HEADS, WIDTH], the matrices of beta and alpha; dt, a
// float32[VALUE_HEADS]; products float32[ROWS, PITCH]; z float32[ROWS, Z_PITCH] (if JOINED the same); taps float32[CHANNELS, TAPS];
// out_norm float32[VALUE]; inputs float32[PAST, CHANNELS], those before the first row; memory float32[VALUE_HEADS, KEY, VALUE];
// tickets u32[KEY_HEADS], zero; out float32[ROWS, VALUE_HEADS * VALUE]. Both states are updated in place. With `other_memory` and
// `other_inputs` they move to and fro: at every second position after `begun` they are read from there, at the others written there.
extern "C" __global__ void __launch_bounds__(THREADS)
delta(const float* __restrict__ h, const float* __restrict__ norm, float eps, const float* __restrict__ rates, const float* __restrict__ dt,
      const float* __restrict__ a, const float* products, const float* z, const float* __restrict__ taps, const float* __restrict__ out_norm,
      float out_eps, float* inputs, float* memory, float* other_inputs, float* other_memory, const int* position, const int* begun,
      u32* tickets, float* out) {
    alignas(16) __shared__ float mixed[ROWS][MINE];
    alignas(16) __shared__ float read[ROWS][OWN];
    __shared__ float sums[WARPS][ROWS][3], of_row[ROWS][5], squares[ROWS][WARPS], of_parts[PARTS][ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    const int key_head = TILED ? head % KEY_HEADS : head / GROUP;
    const int column = 8 * warp + lane % 2 * 4, first = lane / 2;

    if (PARTS > 1) arrive_in_cluster();  // the others may store here
    float *memory_to = memory, *inputs_to = inputs;
    if (other_memory != nullptr) {
        if ((*position - *begun) & 1) memory = other_memory, inputs = other_inputs;
        else memory_to = other_memory, inputs_to = other_inputs;
    }
    float4 s[DEPTH];
    const long long mine = (long long)head * KEY * VALUE + part * OWN;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        s[i] = row < KEY && column < OWN ? __ldcg((const float4*)(memory + mine + row * VALUE + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float window[EACH][TAPS], weights[EACH][TAPS];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
#pragma unroll
        for (int t = 0; t < TAPS; t++) {
            const int from = c < MINE ? channel(c, key_head, head, part) : 0;
            weights[e][t] = __ldcg(taps + from * TAPS + t);  // a plain load would be moved past the wait
            window[e][t] = t < PAST ? __ldcg(inputs + t * CHANNELS + from) : 0.f;
        }
    }
    float4 w[2][PER];  // of the rates, times the weights of the norm
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int at = threadIdx.x + i * THREADS;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            w[which][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (at < QUADS) {
                const float4 x = __ldcg((const float4*)(rates + (long long)(which * VALUE_HEADS + head) * WIDTH) + at);
                const float4 n = __ldcg((const float4*)norm + at);
                w[which][i] = make_float4(x.x * n.x, x.y * n.y, x.z * n.z, x.w * n.w);
            }
        }
    }
    wait_for_inputs();
    start_dependents();  // not earlier, so that the next launch finds every multiprocessor equally free (see attention.cu)

    float gates[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / OWN, c = at % OWN + part * OWN;
        const int from = JOINED ? head / GROUP * TURN + 2 * KEY + (GROUP + head % GROUP) * VALUE + c : head * VALUE + c;
        gates[i] = row < ROWS ? __ldcg(z + row * Z_PITCH + from) : 0.f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE) continue;
        const int from = in_product(c, key_head, head, part);
        float x[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) x[row] = __ldcg(products + row * PITCH + from);
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
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float beta = 0.f, alpha = 0.f, square = 0.f;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int at = threadIdx.x + i * THREADS;
            const float4 x = at < QUADS ? __ldcg((const float4*)(h + row * WIDTH) + at) : make_float4(0.f, 0.f, 0.f, 0.f);
            beta = dot4(x, w[0][i], beta);
            alpha = dot4(x, w[1][i], alpha);
            square = dot4(x, x, square);
        }
        beta = warp_sum(beta), alpha = warp_sum(alpha), square = warp_sum(square);
        if (lane == 0) sums[warp][row][0] = beta, sums[warp][row][1] = alpha, sums[warp][row][2] = square;
    }
    __syncthreads();
    for (int row = warp; row < ROWS; row += WARPS) {
        float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
        for (int i = lane; i < KEY; i += 32) {
            const float q = mixed[row][i], k = mixed[row][KEY + i];
            qq = fmaf(q, q, qq), kk = fmaf(k, k, kk), qk = fmaf(q, k, qk);
        }
        qq = warp_sum(qq), kk = warp_sum(kk), qk = warp_sum(qk);
        if (lane == 0) {
            float beta = 0.f, alpha = 0.f, square = 0.f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) beta += sums[i][row][0], alpha += sums[i][row][1], square += sums[i][row][2];
            const float of_norm = rsqrtf(square / (float)WIDTH + eps);
            const float x = fmaf(alpha, of_norm, dt[head]);
            const float of_q = rsqrtf(qq + 1e-6f) * rsqrtf((float)KEY), of_k = rsqrtf(kk + 1e-6f);
            of_row[row][0] = expf(a[head] * (x > 20.f ? x : log1pf(expf(x))));
            of_row[row][1] = 1.f / (1.f + expf(-beta * of_norm));
            of_row[row][2] = of_q, of_row[row][3] = of_k, of_row[row][4] = qk * of_q * of_k;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
        const float decay = of_row[row][0], beta = of_row[row][1], of_q = of_row[row][2], of_k = of_row[row][3], qk = of_row[row][4];
        float4 sk = make_float4(0.f, 0.f, 0.f, 0.f), sq = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (KEY % 16 && at >= KEY) continue;
            sq = scaled_sum(s[i], mixed[row][at], sq);
            sk = scaled_sum(s[i], mixed[row][KEY + at], sk);
        }
        sk = over_rows(sk), sq = over_rows(sq);
        float4 e = make_float4(0.f, 0.f, 0.f, 0.f), o = e;
        if (column < OWN) {
            const float4 v = *(const float4*)&mixed[row][2 * KEY + column];
            const float from_k = decay * of_k, from_q = decay * of_q;
            e = make_float4(beta * (v.x - from_k * sk.x), beta * (v.y - from_k * sk.y), beta * (v.z - from_k * sk.z), beta * (v.w - from_k * sk.w));
            o = make_float4(fmaf(e.x, qk, from_q * sq.x), fmaf(e.y, qk, from_q * sq.y), fmaf(e.z, qk, from_q * sq.z), fmaf(e.w, qk, from_q * sq.w));
            if (first == 0) *(float4*)&read[row][column] = o;
        }
        float square = dot4(o, o, 0.f);
        square += __shfl_xor_sync(0xffffffff, square, 1);
        if (lane == 0) squares[row][warp] = square;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = first + 16 * i;
            if (KEY % 16 && at >= KEY) continue;
            const float k = mixed[row][KEY + at] * of_k;
            s[i] = make_float4(fmaf(k, e.x, decay * s[i].x), fmaf(k, e.y, decay * s[i].y), fmaf(k, e.z, decay * s[i].z), fmaf(k, e.w, decay * s[i].w));
        }
    }
    __syncthreads();
    if (PARTS > 1) {
        wait_for_cluster();
        if (threadIdx.x < ROWS * PARTS) {
            const int row = threadIdx.x % ROWS;
            float square = 0.f;
#pragma unroll
            for (int j = 0; j < WARPS; j++) square += squares[row][j];
            store_in_block(&of_parts[part][row], threadIdx.x / ROWS, square);
        }
        arrive_in_cluster();
        wait_for_cluster();
    }
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / OWN, own = at % OWN, c = part * OWN + own;
        if (row >= ROWS) continue;
        float square = 0.f;
#pragma unroll
        for (int j = 0; j < (PARTS > 1 ? PARTS : WARPS); j++) square += PARTS > 1 ? of_parts[j][row] : squares[row][j];
        out[row * VALUE_HEADS * VALUE + head * VALUE + c] = read[row][own] * rsqrtf(square / (float)VALUE + out_eps) * out_norm[c] * silu(gates[i]);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int row = first + 16 * i;
        if (row < KEY && column < OWN) *(float4*)(memory_to + mine + row * VALUE + column) = s[i];
    }
    // All blocks of a key head read its queries' and keys' inputs: the last one to have done so replaces them. Where they are written to
    // another place than they are read from, nobody has to wait, and the first block does it.
    bool last;
    if (GROUP * PARTS == 1) last = true;
    else if (other_memory != nullptr) last = part == 0 && head == (TILED ? key_head : key_head * GROUP);
    else last = last_to_arrive(tickets + key_head, GROUP * PARTS);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= MINE || (c < 2 * KEY && !last)) continue;
#pragma unroll
        for (int t = 0; t < PAST; t++) inputs_to[t * CHANNELS + channel(c, key_head, head, part)] = window[e][t];
    }
}
