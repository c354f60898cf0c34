// `heads` of delta.cu: convolution and norms of queries, keys and values.
#pragma once

constexpr int HEAD_WARPS = 4, HEAD_TOKENS = 8;  // warps of a block, tokens of a warp

// LENGTH channels from `channel`, in the products from `at`, of a warp's tokens: convolution and SiLU, with `norm` divided by their
// length and times `scale`; rounded to 10 bits.
template <int LENGTH, class T>
__device__ __forceinline__ void convolved(const u16* products, int pitch, int tokens, const float* past, const float* taps, int channel, int at,
                                          int first, int padded, bool norm, float scale, T* to) {
    constexpr int PARTS = (LENGTH + 127) / 128;
    const int lane = threadIdx.x % 32;
    float4 window[TAPS][PARTS];
    float weights[PARTS][4][TAPS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int c = 4 * lane + 128 * p;
        if (c >= LENGTH) continue;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int t = 0; t < TAPS; t++) weights[p][j][t] = taps[(channel + c + j) * TAPS + t];
    }
#pragma unroll
    for (int i = -PAST; i < HEAD_TOKENS; i++) {
        const int token = first + i;
#pragma unroll
        for (int t = 0; t < PAST; t++)
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                if (i > -PAST) window[t][p] = window[t + 1][p];
        float square = 0.f;
        float4 y[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int c = 4 * lane + 128 * p;
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
            if (c < LENGTH) {
                if (token >= 0 && token < tokens) x = load4(products + (long long)token * pitch + at + c);
                else if (token < 0 && past != nullptr) x = *(const float4*)(past + (PAST + token) * CHANNELS + channel + c);
            }
            window[PAST][p] = x;
            if (i < 0) continue;
            y[p] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (c >= LENGTH || token >= tokens) continue;
#pragma unroll
            for (int t = 0; t < TAPS; t++) {
                y[p].x = fmaf(window[t][p].x, weights[p][0][t], y[p].x);
                y[p].y = fmaf(window[t][p].y, weights[p][1][t], y[p].y);
                y[p].z = fmaf(window[t][p].z, weights[p][2][t], y[p].z);
                y[p].w = fmaf(window[t][p].w, weights[p][3][t], y[p].w);
            }
            y[p] = make_float4(silu(y[p].x), silu(y[p].y), silu(y[p].z), silu(y[p].w));
            square = dot4(y[p], y[p], square);
        }
        if (i < 0) continue;
        const float factor = norm ? rsqrtf(warp_sum(square) + 1e-6f) * scale : 1.f;
        if (token >= padded) continue;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int c = 4 * lane + 128 * p;
            if (c >= LENGTH) continue;
            const float4 four = scaled(y[p], factor);
            T* at = to + (long long)token * LENGTH + c;
            store_two(at, four.x, four.y), store_two(at + 2, four.z, four.w);
        }
    }
}

// products half[sequences * tokens] of rows `pitch` elements apart; past float32[sequences, PAST, CHANNELS], the inputs of the
// convolution before them, or null for zeros; taps float32[CHANNELS, TAPS]; q, k float16[sequences, KEY_HEADS, padded, KEY], v float32[sequences, VALUE_HEADS, padded, VALUE].
// Blocks: (padded / (HEAD_WARPS * HEAD_TOKENS), sequences * (2 * KEY_HEADS + VALUE_HEADS)).
extern "C" __global__ void __launch_bounds__(32 * HEAD_WARPS)
heads(const u16* products, int pitch, int tokens, int padded, const float* past, const float* taps, u16* q, u16* k, float* v) {
    follow_launch_before();
    constexpr int JOBS = 2 * KEY_HEADS + VALUE_HEADS;
    const int job = blockIdx.y % JOBS, sequence = blockIdx.y / JOBS;
    const int first = (blockIdx.x * HEAD_WARPS + threadIdx.x / 32) * HEAD_TOKENS;
    products += (long long)sequence * tokens * pitch;
    if (past != nullptr) past += (long long)sequence * PAST * CHANNELS;
    const long long key_size = (long long)padded * KEY, value_size = (long long)padded * VALUE;
    if (job < 2 * KEY_HEADS) {
        const int which = job / KEY_HEADS, head = job % KEY_HEADS;
        const int at = JOINED ? head * TURN + which * KEY : job * KEY;
        u16* to = (which ? k : q) + ((long long)sequence * KEY_HEADS + head) * key_size;
        convolved<KEY>(products, pitch, tokens, past, taps, job * KEY, at, first, padded, true, which ? 1.f : rsqrtf((float)KEY), to);
    } else {
        const int head = job - 2 * KEY_HEADS, channel = 2 * KEY_HEADS * KEY + head * VALUE;
        const int at = JOINED ? head / GROUP * TURN + 2 * KEY + head % GROUP * VALUE : channel;
        float* to = v + ((long long)sequence * VALUE_HEADS + head) * value_size;
        convolved<VALUE>(products, pitch, tokens, past, taps, channel, at, first, padded, false, 1.f, to);
    }
}
