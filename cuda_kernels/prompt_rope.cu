// Query, key and value heads of a prompt: norm of each head, rotation, and where they go.
//
// The joined products come as HALF[T, n_q + n_k + n_v heads]. Queries go to q[T, heads, size], keys and values to rows `first + t`
// of k and v, [rows, kv heads, size] each (a sequence's cache, or a buffer), all in STORED: 1 is float16, 0 is bfloat16, 2 float32.
#include "prompt_common.cuh"

constexpr int ROPE_WARPS = 8;
constexpr int LARGEST_HEAD = 256;

__device__ __forceinline__ void store2(void* to, long long pair, float a, float b) {
    if constexpr (STORED == 2) reinterpret_cast<float2*>(to)[pair] = make_float2(a, b);
    else reinterpret_cast<u32*>(to)[pair] = pack2<STORED == 1>(a, b);
}

// Element i of a rotated head from the head in shared memory. cos and sin [n_rot / 2] of this position.
// NEOX pairs j with j + n_rot / 2, otherwise 2j with 2j + 1; elements beyond n_rot stay.
template <bool NEOX>
__device__ __forceinline__ float rotated(const float* head, int i, int n_rot, const float* cos, const float* sin) {
    if (i >= n_rot) return head[i];
    const int half = n_rot / 2;
    if constexpr (NEOX)
        return i < half ? head[i] * cos[i] - head[i + half] * sin[i] : head[i - half] * sin[i - half] + head[i] * cos[i - half];
    else
        return i % 2 == 0 ? head[i] * cos[i / 2] - head[i + 1] * sin[i / 2] : head[i - 1] * sin[i / 2] + head[i] * cos[i / 2];
}

// A warp per (token, head). Norm weights float32[size] or null. cos, sin float32[tokens of a sequence, n_rot / 2].
template <bool NEOX>
__device__ __forceinline__ void heads(const u32* qkv, int tokens, int n_heads, int n_kv, int k_size, int v_size, int n_rot,
                                      const float* cos, const float* sin, int per_sequence, const float* q_norm, const float* k_norm,
                                      float eps, void* q, void* k, void* v, long long first) {
    __shared__ float rows[ROPE_WARPS][LARGEST_HEAD];
    const int lane = threadIdx.x % 32, all = n_heads + 2 * n_kv;
    const long long job = blockIdx.x * (long long)ROPE_WARPS + threadIdx.x / 32;
    const long long t = job / all;
    if (t >= tokens) return;
    int head = int(job - t * all);
    float* row = rows[threadIdx.x / 32];
    const u32* in = qkv + t * ((n_heads + n_kv) * (k_size / 2) + n_kv * (v_size / 2));
    if (head >= n_heads + n_kv) {  // a value head: only moved
        head -= n_heads + n_kv;
        in += (n_heads + n_kv) * (k_size / 2) + head * (v_size / 2);
        const long long out = ((first + t) * n_kv + head) * (v_size / 2);
        for (int pair = lane; pair < v_size / 2; pair += 32) {
            const float2 x = unpack2<HALF>(in[pair]);
            store2(v, out + pair, x.x, x.y);
        }
        return;
    }
    in += head * (k_size / 2);
    float sum = 0;
    for (int pair = lane; pair < k_size / 2; pair += 32) {
        const float2 x = unpack2<HALF>(in[pair]);
        row[2 * pair] = x.x;
        row[2 * pair + 1] = x.y;
        sum += x.x * x.x + x.y * x.y;
    }
    const bool is_key = head >= n_heads;
    const float* norm = is_key ? k_norm : q_norm;
    if (norm != nullptr) {
        const float scale = 1.0f / sqrtf(warp_sum(sum) / k_size + eps);
        for (int pair = lane; pair < k_size / 2; pair += 32) {  // the elements that this lane wrote
            row[2 * pair] = row[2 * pair] * scale * norm[2 * pair];
            row[2 * pair + 1] = row[2 * pair + 1] * scale * norm[2 * pair + 1];
        }
    }
    __syncwarp();
    const long long at = (t % per_sequence) * (n_rot / 2);
    const long long out = is_key ? ((first + t) * n_kv + head - n_heads) * (k_size / 2) : (t * n_heads + head) * (k_size / 2);
    for (int pair = lane; pair < k_size / 2; pair += 32)
        store2(is_key ? k : q, out + pair, rotated<NEOX>(row, 2 * pair, n_rot, cos + at, sin + at),
               rotated<NEOX>(row, 2 * pair + 1, n_rot, cos + at, sin + at));
}

#define HEADS(NAME, NEOX) \
    extern "C" __global__ void __launch_bounds__(32 * ROPE_WARPS) \
    NAME(const u32* qkv, int tokens, int n_heads, int n_kv, int k_size, int v_size, int n_rot, const float* cos, const float* sin, \
         int per_sequence, const float* q_norm, const float* k_norm, float eps, void* q, void* k, void* v, long long first) { \
        heads<NEOX>(qkv, tokens, n_heads, n_kv, k_size, v_size, n_rot, cos, sin, per_sequence, q_norm, k_norm, eps, q, k, v, first); \
    }
HEADS(heads_norm, false)
HEADS(heads_neox, true)
