// State-space layers of Mamba-2 over many tokens, CHUNK of them at a time (Dao and Gu, 2024).
//
//     S <- exp(a dt) S + b (dt x)^T;  o = S^T c + d x
//
// With G the running sum of a dt in a chunk, D[i, j] = exp(G[i] - G[j]) dt[j] for i >= j and S the memory before the chunk:
//
//     S <- exp(G[last]) S + B^T (exp(G[last] - G) dt X)    in `chunks`
//     O = exp(G) (C S) + (C B^T D) X + d X                 in `results`, with the gate
//
// `convolved` and `decays` come first, `chunks`, `results` and `norm_groups` follow. Values x are float16[sequences, HEADS, tokens, LENGTH], vectors that
// write and read, b and c, float16[sequences, GROUPS, tokens, STATE], tokens in whole chunks with zeros after the last one: these do not decay and write nothing.
// Other factors of products are rounded to TF32, which has as many bits; sums, decays and the memory from chunk to chunk are not rounded.
//
// Compiled per shape: HALF (see prompt/recurrent.cuh); HEADS, GROUPS, LENGTH, STATE, TAPS as in step/state_space.cu; STAGES of `chunks`.
#include "prompt/recurrent.cuh"

constexpr int PER_GROUP = HEADS / GROUPS, PAST = TAPS - 1, INNER = HEADS * LENGTH, VECTORS = GROUPS * STATE;
constexpr int CHANNELS = INNER + 2 * VECTORS, PITCH = INNER + CHANNELS + HEADS;  // elements of a row of products: gates, channels, steps of time
constexpr int STATES = (STATE + 15) / 16 * 16, VALUES = (LENGTH + 15) / 16 * 16;   // lengths in shared memory, with zeros at the end
constexpr int THREADS = 256, CONV_THREADS = 128, CONV_TOKENS = 16, NORM_THREADS = 128, OF_GROUP = INNER / GROUPS;
static_assert(LENGTH % 4 == 0 && STATE % 4 == 0 && HEADS % GROUPS == 0 && TAPS >= 2, "a shape this is made for");

// Four elements of a row of products.
__device__ __forceinline__ float4 load_four(const u16* at) {
    if constexpr (PITCH % 4 == 0) return load4(at);
    return make_float4(from_half(at[0]), from_half(at[1]), from_half(at[2]), from_half(at[3]));
}

// products half[sequences * tokens, PITCH]; past float32[sequences, PAST, CHANNELS], the inputs of the convolution before them, or null for zeros; taps
// float32[CHANNELS, TAPS], bias float32[CHANNELS] or null. A thread has four channels of CONV_TOKENS tokens.
// Blocks: (sequences * padded / CONV_TOKENS, CHANNELS / 4 / CONV_THREADS, rounded up).
extern "C" __global__ void __launch_bounds__(CONV_THREADS)
convolved(const u16* products, int tokens, int padded, const float* past, const float* taps, const float* bias, u16* x, u16* b, u16* c) {
    follow_launch_before();
    const int channel = 4 * (blockIdx.y * CONV_THREADS + threadIdx.x), pieces = padded / CONV_TOKENS;
    if (channel >= CHANNELS) return;
    const int sequence = blockIdx.x / pieces, first = blockIdx.x % pieces * CONV_TOKENS;
    products += (long long)sequence * tokens * PITCH + INNER + channel;
    u16* to;
    int length;
    if (channel < INNER) {
        to = x + ((long long)sequence * HEADS + channel / LENGTH) * padded * LENGTH + channel % LENGTH, length = LENGTH;
    } else {
        const int at = (channel - INNER) % VECTORS;
        to = (channel < INNER + VECTORS ? b : c) + ((long long)sequence * GROUPS + at / STATE) * padded * STATE + at % STATE, length = STATE;
    }
    float weights[4][TAPS];
    float4 window[TAPS], added = make_float4(0.f, 0.f, 0.f, 0.f);
    if (bias != nullptr) added = *(const float4*)(bias + channel);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int t = 0; t < TAPS; t++) weights[j][t] = taps[(channel + j) * TAPS + t];
#pragma unroll
    for (int i = -PAST; i < CONV_TOKENS; i++) {
        const int token = first + i;
#pragma unroll
        for (int t = 0; t < PAST; t++)
            if (i > -PAST) window[t] = window[t + 1];
        float4 in = make_float4(0.f, 0.f, 0.f, 0.f);
        if (token >= 0 && token < tokens) in = load_four(products + (long long)token * PITCH);
        else if (token < 0 && past != nullptr) in = *(const float4*)(past + ((long long)sequence * PAST + PAST + token) * CHANNELS + channel);
        window[PAST] = in;
        if (i < 0) continue;
        float4 y = added;
#pragma unroll
        for (int t = 0; t < TAPS; t++) {
            y.x = fmaf(window[t].x, weights[0][t], y.x);
            y.y = fmaf(window[t].y, weights[1][t], y.y);
            y.z = fmaf(window[t].z, weights[2][t], y.z);
            y.w = fmaf(window[t].w, weights[3][t], y.w);
        }
        y = token < tokens ? make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w)) : make_float4(0.f, 0.f, 0.f, 0.f);
        u16* at = to + (long long)token * length;
        store_two(at, y.x, y.y), store_two(at + 2, y.z, y.w);
    }
}

// dt, a float32[HEADS]. steps, until float32 and totals float64[sequences, HEADS, padded]: dt, exp(G[last] - G) dt and G. Sums get large, and only
// their differences matter. A warp for a chunk of a head: (chunks, sequences * HEADS) blocks.
extern "C" __global__ void __launch_bounds__(32)
decays(const u16* products, const float* dt, const float* a, int tokens, float* steps, float* until, double* totals) {
    follow_launch_before();
    const int lane = threadIdx.x, head = blockIdx.y % HEADS, sequence = blockIdx.y / HEADS, token = blockIdx.x * CHUNK + 2 * lane;
    const long long at = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * CHUNK + 2 * lane;
    float step[2];
    double g[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        step[i] = 0.f;
        if (token + i < tokens) {
            const float x = from_half(products[((long long)sequence * tokens + token + i) * PITCH + INNER + CHANNELS + head]) + dt[head];
            step[i] = x > 20.f ? x : log1pf(expf(x));
        }
        g[i] = a[head] * step[i];
    }
    g[1] += g[0];
    double sum = g[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const double before = __shfl_sync(0xffffffff, sum, lane < d ? lane : lane - d);
        if (lane >= d) sum += before;
    }
    const double last = __shfl_sync(0xffffffff, sum, 31);
    g[0] += sum - g[1], g[1] = sum;
#pragma unroll
    for (int i = 0; i < 2; i++) steps[at + i] = step[i], totals[at + i] = g[i], until[at + i] = expf((float)(last - g[i])) * step[i];
}

constexpr int B_PITCH = halves_pitch(STATES), WRITTEN_PITCH = second_pitch(SLICE);
// A chunk in flight: vectors that write; of every thread eight values of a token and what they are multiplied by.
constexpr int STAGE_FLOATS = CHUNK * B_PITCH / 2 + THREADS * 5;
constexpr int CHUNK_FLOATS = STAGES * STAGE_FLOATS + 2 * CHUNK * WRITTEN_PITCH;

// The chunks of a head one after the other, SLICE columns of its memory per block: ((LENGTH + SLICE - 1) / SLICE, sequences * HEADS) blocks. before and after
// float32[sequences, HEADS, STATE, LENGTH], the memory before the first and after the last token, perhaps the same, null for zeros and for nowhere; states
// float32[sequences, HEADS, chunks, STATE, LENGTH], that before each chunk, rounded. Copies of the next STAGES - 1 chunks are on their way.
extern "C" __global__ void __launch_bounds__(THREADS)
chunks(const u16* x, const u16* b, const float* until, const double* totals, int n_chunks, const float* before, float* after, float* states) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    float* tiles = (float*)shared;                     // [STAGES]: [CHUNK][STATE], [THREADS][8] halves, [THREADS]
    float* written = tiles + STAGES * STAGE_FLOATS;    // [2][CHUNK][SLICE], values times `until`, rounded
    const int slice = blockIdx.x * SLICE, row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
    const long long head = blockIdx.y, first = head * n_chunks * CHUNK;
    b += (head / HEADS * GROUPS + head % HEADS / PER_GROUP) * n_chunks * CHUNK * STATE;
    x += (first + row) * LENGTH + slice + column, until += first + row, totals += first, states += head * n_chunks * STATE * LENGTH + slice;
    // Values that a thread has copied itself it may read when they have arrived.
    auto own = [&](int chunk) { return (u16*)(tiles + chunk % STAGES * STAGE_FLOATS + CHUNK * B_PITCH / 2) + threadIdx.x * 8; };
    auto factor_of = [&](int chunk) { return tiles + chunk % STAGES * STAGE_FLOATS + CHUNK * B_PITCH / 2 + THREADS * 4 + threadIdx.x; };

    auto load = [&](int chunk) {
        if (chunk < n_chunks) {
            copy_rows<STATE, THREADS>((u16*)(tiles + chunk % STAGES * STAGE_FLOATS), B_PITCH, b + (long long)chunk * CHUNK * STATE, CHUNK);
            const u16* from = x + (long long)chunk * CHUNK * LENGTH;
            if (LENGTH % 8 == 0) {
                if (slice + column < LENGTH) copy_to_shared<16>(own(chunk), from);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i += 4)
                    if (slice + column + i < LENGTH) copy_to_shared<8>(own(chunk) + i, from + i);
            }
            copy_to_shared<4>(factor_of(chunk), until + chunk * CHUNK);
        }
        end_of_copies();
    };
    for (int stage = 0; stage < STAGES; stage++) {
        clear_columns<THREADS>((u16*)(tiles + stage * STAGE_FLOATS), B_PITCH, CHUNK, STATE, STATES);
        *(uint2*)own(stage) = *(uint2*)(own(stage) + 4) = make_uint2(0, 0);  // what is beyond LENGTH stays 0
    }
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; chunk++) load(chunk);
    Memory<STATES> s;
    load_memory<STATES, STATE, LENGTH>(s, slice, before == nullptr ? before : before + head * STATE * LENGTH);
    double total = totals[CHUNK - 1];
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        if (STAGES == 1) load(chunk);
        each_pair<STATES, STATE, LENGTH>(s, slice, [&](float x, float y, int row, int column, bool inside) {
            if (inside) *(float2*)(states + ((long long)chunk * STATE + row) * LENGTH + column) = make_float2(rounded(x), rounded(y));
        });
        const float decay = expf((float)total);
        if (chunk + 1 < n_chunks) total = totals[(chunk + 1) * CHUNK + CHUNK - 1];
        wait_for_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
        float* here = written + chunk % 2 * CHUNK * WRITTEN_PITCH;
        const float factor = *factor_of(chunk);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const uint2 values = *(const uint2*)(own(chunk) + i);
            float* at = here + row * WRITTEN_PITCH + column + i;
            store_two(at, factor * half_to_float((u16)values.x), factor * half_to_float((u16)(values.x >> 16)));
            store_two(at + 2, factor * half_to_float((u16)values.y), factor * half_to_float((u16)(values.y >> 16)));
        }
        __syncthreads();
        if (STAGES > 1) load(chunk + STAGES - 1);  // all warps have read the chunk before, which was there
        decay_and_write<STATES, false>(s, {decay}, (const u16*)(tiles + chunk % STAGES * STAGE_FLOATS), B_PITCH, here, WRITTEN_PITCH);
        if (STAGES == 1) __syncthreads();
    }
    if (after != nullptr) store_memory<STATES, STATE, LENGTH>(s, slice, after + head * STATE * LENGTH);
}

#include "prompt/state_space_results.cuh"
