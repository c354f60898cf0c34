// Norm and rotate the query and key heads of a prompt, and store queries, keys and values.
//
// The joined products come as HALF[T, n_q + n_k + n_v heads, size]. Queries go to q[T, heads, size], keys and values to rows `first + t`
// of k and v, [rows, kv heads, size] (a sequence's cache, or a buffer), all in STORED: 1 is float16, 0 bfloat16, 2 float32.
//
// LANES lanes share a head, 8 elements each; a warp takes several heads of one token, for which it reads cos and sin once.
#include "prompt/common.cuh"

constexpr int ROPE_WARPS = 8, ROUNDS = 4;

__device__ __forceinline__ void store_unit(void* to, long long unit, const float (&x)[8]) {
    if constexpr (STORED == 2) store8(reinterpret_cast<float*>(to) + unit * 8, x);
    else reinterpret_cast<uint4*>(to)[unit] = pack8<STORED == 1>(x);
}

// NEOX pairs element j with j + n_rot / 2, otherwise 2j with 2j + 1; elements beyond n_rot stay. size <= 8 * LANES, a multiple of 8;
// n_rot a multiple of 16. Norm weights float32[size] or null. cos, sin float32[tokens of a sequence, n_rot / 2].
template <int LANES, bool NEOX>
__device__ __forceinline__ void heads(const uint4* qkv, int tokens, int n_heads, int n_kv, int size, int n_rot, const float* cos,
                                      const float* sin, int per_sequence, const float* q_norm, const float* k_norm, float eps, void* q,
                                      void* k, void* v, long long first) {
    constexpr int TOGETHER = 32 / LANES;
    const int lane = threadIdx.x % 32, unit = lane % LANES, units = size / 8, all = n_heads + 2 * n_kv;
    const int parts = (all + TOGETHER * ROUNDS - 1) / (TOGETHER * ROUNDS);
    const long long job = blockIdx.x * (long long)ROPE_WARPS + threadIdx.x / 32, t = job / parts;
    if (t >= tokens) return;
    const int first_head = int(job - t * parts) * TOGETHER * ROUNDS + lane / LANES;
    const int half = n_rot / 16;  // units
    const bool rotates = unit < 2 * half, inside = unit < units;

    uint4 raw[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int head = first_head + i * TOGETHER;
        if (inside && head < all) raw[i] = qkv[(t * all + head) * units + unit];
    }
    float c[8], s[8];  // of this lane's elements (NEOX) or pairs (the first four)
    if (rotates) {
        const long long at = (t % per_sequence) * (n_rot / 2) + (NEOX ? unit % half * 8 : unit * 4);
        if constexpr (NEOX) {
            load8(cos + at, c);
            load8(sin + at, s);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) c[j] = cos[at + j], s[j] = sin[at + j];
        }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int head = first_head + i * TOGETHER;
        const bool here = inside && head < all;
        float x[8] = {};
        if (here) unpack8<HALF>(raw[i], x);
        const bool is_value = head >= n_heads + n_kv, is_key = head >= n_heads;
        const float* norm = is_value ? nullptr : is_key ? k_norm : q_norm;
        if (q_norm != nullptr || k_norm != nullptr) {  // the same for all lanes
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) sum += x[j] * x[j];
#pragma unroll
            for (int step = LANES / 2; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (here && norm != nullptr) {
                const float scale = 1.0f / sqrtf(sum / size + eps);
                float w[8];
                load8(norm + unit * 8, w);
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = x[j] * scale * w[j];
            }
        }
        if constexpr (NEOX) {
            const int partner = lane - unit + (unit < half ? unit + half : unit - half);
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = __shfl_sync(0xffffffffu, x[j], rotates ? partner : lane);
            if (rotates && !is_value) {
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = unit < half ? x[j] * c[j] - y[j] * s[j] : y[j] * s[j] + x[j] * c[j];
            }
        } else if (rotates && !is_value) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float a = x[2 * j], b = x[2 * j + 1];
                x[2 * j] = a * c[j] - b * s[j];
                x[2 * j + 1] = a * s[j] + b * c[j];
            }
        }
        if (!here) continue;
        if (!is_key) store_unit(q, (t * n_heads + head) * units + unit, x);
        else if (!is_value) store_unit(k, ((first + t) * n_kv + head - n_heads) * units + unit, x);
        else store_unit(v, ((first + t) * n_kv + head - n_heads - n_kv) * units + unit, x);
    }
}

#define HEADS(NAME, LANES, NEOX) \
    extern "C" __global__ void __launch_bounds__(32 * ROPE_WARPS) \
    NAME##_##LANES(const uint4* qkv, int tokens, int n_heads, int n_kv, int size, int n_rot, const float* cos, const float* sin, \
         int per_sequence, const float* q_norm, const float* k_norm, float eps, void* q, void* k, void* v, long long first) { \
        heads<LANES, NEOX>(qkv, tokens, n_heads, n_kv, size, n_rot, cos, sin, per_sequence, q_norm, k_norm, eps, q, k, v, first); \
    }
HEADS(heads_norm, 8, false)
HEADS(heads_norm, 16, false)
HEADS(heads_norm, 32, false)
HEADS(heads_neox, 8, true)
HEADS(heads_neox, 16, true)
HEADS(heads_neox, 32, true)
