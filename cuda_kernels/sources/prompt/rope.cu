// Norm and rotate the query and key heads of a prompt (with NORMS_LAST: rotate and norm), and store queries, keys and values.
//
// The joined products come as HALF[T, n_heads * size + n_kv * size + n_kv * value_size], or without values, which are keys before norm and
// rotation then; a gate of `size` may follow each head of queries. Queries go to q[T, heads, size], keys and values to rows `first + t` of k[rows, kv heads, size] and v[rows, kv heads, value_size]
// (a sequence's cache, or a buffer), all in STORED: 1 is float16, 0 bfloat16, 2 float32.
//
// LANES lanes share a head, EACH times 8 elements each; a warp takes several heads of one token, for which it reads cos and sin once.
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"

constexpr int ROPE_WARPS = 8, ROUNDS = 4;

__device__ __forceinline__ void store_unit(void* to, long long unit, const float (&x)[8]) {
    if constexpr (STORED == 2) store8(reinterpret_cast<float*>(to) + unit * 8, x);
    else reinterpret_cast<uint4*>(to)[unit] = pack8<STORED == 1>(x);
}

// NEOX pairs element j with j + n_rot / 2, otherwise 2j with 2j + 1; elements beyond n_rot stay. size and value_size <= 8 * LANES * EACH,
// multiples of 8; n_rot a multiple of 16. Norm weights float32[size] or null. cos, sin float32[tokens of a sequence, n_rot / 2]. pitch: units of
// 8 elements of a row of the products; query_step: those from a head of queries to the next; keys and values begin at units key_at and value_at. value_eps: from 0 on, values are divided by their root mean square.
// factors: float32[tokens, 2], what queries and keys are multiplied by instead of the norm of each head, weights float32[heads of the products * size]; or null.
// own: int32[n_heads + n_kv], which heads of queries and of keys among those of the products are taken, all in their order if it is null.
template <int LANES, int EACH, bool NEOX>
__device__ __forceinline__ void heads(const uint4* qkv, int tokens, int n_heads, int n_kv, int pitch, int query_step, int key_at, int value_at, int size, int value_size, int n_rot,
                                      const float* cos, const float* sin, int per_sequence, const float* q_norm, const float* k_norm, float eps,
                                      float value_eps, const float* factors, const int* own_heads, void* q, void* k, void* v, long long first) {
    constexpr int TOGETHER = 32 / LANES;
    const int lane = threadIdx.x % 32, own = lane % LANES, all = n_heads + 2 * n_kv;
    const int parts = (all + TOGETHER * ROUNDS - 1) / (TOGETHER * ROUNDS);
    const long long job = blockIdx.x * (long long)ROPE_WARPS + threadIdx.x / 32, t = job / parts;
    if (t >= tokens) return;
    const int first_head = int(job - t * parts) * TOGETHER * ROUNDS + lane / LANES;
    const int half = n_rot / 16;  // units
    const bool norms = q_norm != nullptr || k_norm != nullptr || value_eps >= 0;  // the same for all lanes

    uint4 raw[ROUNDS][EACH];
    int among[ROUNDS];  // the number of each head of queries or keys in the products
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int head = first_head + i * TOGETHER, key = head - n_heads, value = key - n_kv, units = (value < 0 ? size : value_size) / 8;
        among[i] = own_heads != nullptr && value < 0 ? own_heads[head] : key < 0 ? head : key;
        const int at = key < 0 ? among[i] * query_step : value < 0 ? key_at + among[i] * units : value_at + value * units;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int unit = own + e * LANES;
            if (unit < units && head < all) raw[i][e] = qkv[t * pitch + at + unit];
        }
    }
    float c[EACH][8], s[EACH][8];  // of this lane's elements (NEOX) or pairs (the first four)
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int unit = own + e * LANES;
        if (unit >= 2 * half) continue;
        const long long at = (t % per_sequence) * (n_rot / 2) + (NEOX ? unit % half * 8 : unit * 4);
        if constexpr (NEOX) {
            load8(cos + at, c[e]);
            load8(sin + at, s[e]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) c[e][j] = cos[at + j], s[e][j] = sin[at + j];
        }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int head = first_head + i * TOGETHER;
        const bool is_value = head >= n_heads + n_kv, is_key = head >= n_heads;
        const int length = is_value ? value_size : size, units = length / 8;
        const float* norm = is_value ? nullptr : is_key ? k_norm : q_norm;
        float x[EACH][8] = {};
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (own + e * LANES < units && head < all) unpack8<HALF>(raw[i][e], x[e]);
        auto norm_head = [&] {
            float sum = 0;
#pragma unroll
            for (int e = 0; e < EACH; e++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum += x[e][j] * x[e][j];
#pragma unroll
            for (int step = LANES / 2; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            float scale = 1.0f / sqrtf(sum / length + (is_value ? value_eps : eps));
            if (factors != nullptr && !is_value) {
                scale = factors[t * 2 + is_key];
                norm += among[i] * size;
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int unit = own + e * LANES;
                if (unit >= units || head >= all) continue;
                if (norm != nullptr) {
                    float w[8];
                    load8(norm + unit * 8, w);
#pragma unroll
                    for (int j = 0; j < 8; j++) x[e][j] = x[e][j] * scale * w[j];
                } else if (is_value && value_eps >= 0) {
#pragma unroll
                    for (int j = 0; j < 8; j++) x[e][j] *= scale;
                }
            }
        };
        if (norms && !NORMS_LAST) norm_head();
        if constexpr (NEOX) {
            float y[EACH][8];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int unit = own + e * LANES;
                const int partner = unit >= 2 * half ? unit : unit < half ? unit + half : unit - half;
                const int from = lane - own + partner % LANES;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    y[e][j] = __shfl_sync(0xffffffffu, x[0][j], from);
                    if (EACH == 2) {
                        const float other = __shfl_sync(0xffffffffu, x[EACH - 1][j], from);
                        if (partner >= LANES) y[e][j] = other;
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int unit = own + e * LANES;
                if (unit >= 2 * half || is_value) continue;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    x[e][j] = unit < half ? x[e][j] * c[e][j] - y[e][j] * s[e][j] : y[e][j] * s[e][j] + x[e][j] * c[e][j];
            }
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                if (own + e * LANES >= 2 * half || is_value) continue;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float a = x[e][2 * j], b = x[e][2 * j + 1];
                    x[e][2 * j] = a * c[e][j] - b * s[e][j];
                    x[e][2 * j + 1] = a * s[e][j] + b * c[e][j];
                }
            }
        }
        if (norms && NORMS_LAST) norm_head();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int unit = own + e * LANES;
            if (unit >= units || head >= all) continue;
            if (!is_key) store_unit(q, (t * n_heads + head) * units + unit, x[e]);
            else if (!is_value) store_unit(k, ((first + t) * n_kv + head - n_heads) * units + unit, x[e]);
            else store_unit(v, ((first + t) * n_kv + head - n_heads - n_kv) * units + unit, x[e]);
        }
    }
}

#define HEADS(NAME, LANES, EACH, NEOX) \
    extern "C" __global__ void __launch_bounds__(32 * ROPE_WARPS) \
    NAME(const uint4* qkv, int tokens, int n_heads, int n_kv, int pitch, int query_step, int key_at, int value_at, int size, int value_size, int n_rot, const float* cos, \
         const float* sin, int per_sequence, const float* q_norm, const float* k_norm, float eps, float value_eps, const float* factors, \
         const int* own, void* q, void* k, void* v, long long first) { \
        follow_launch_before(); \
        heads<LANES, EACH, NEOX>(qkv, tokens, n_heads, n_kv, pitch, query_step, key_at, value_at, size, value_size, n_rot, cos, sin, per_sequence, q_norm, k_norm, \
                                 eps, value_eps, factors, own, q, k, v, first); \
    }
HEADS(heads_norm_8, 8, 1, false)
HEADS(heads_norm_16, 16, 1, false)
HEADS(heads_norm_32, 32, 1, false)
HEADS(heads_norm_64, 32, 2, false)
HEADS(heads_neox_8, 8, 1, true)
HEADS(heads_neox_16, 16, 1, true)
HEADS(heads_neox_32, 32, 1, true)
HEADS(heads_neox_64, 32, 2, true)
