// Gated delta nets over many tokens, CHUNK of them at a time (Yang et al., 2024).
//
//     S <- exp(g) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = S^T q
//
// With G the running sum of g in a chunk, D[i, j] = exp(G[i] - G[j]) for i >= j, T the inverse of
// I + (strictly lower part of beta K K^T D) and S the memory before the chunk:
//
//     E = T beta V - (T beta exp(G) K) S                   errors: both terms but S from `solve`, the rest in `chunks`
//     S <- exp(G[last]) S + K^T (exp(G[last] - G) E)       in `chunks`
//     O = exp(G) (Q S) + (Q K^T D) E                       in `results`
//
// `heads` comes first, `solve`, `chunks` and `results` follow. Queries and keys are float16[sequences, KEY_HEADS, tokens, KEY], everything else
// [sequences, VALUE_HEADS, tokens, length], tokens in whole chunks with zeros after the last one: these do not decay and write nothing.
// Factors of products are rounded to 10 bits where they are stored; sums, decays, T and the memory from chunk to chunk are not. What is no longer than
// 1 is stored in float16: queries, keys, T beta exp(G) K (keys that contractions have shortened) and Q K^T D. The rest is in float32, values rounded to TF32.
//
// Compiled per shape: HALF (see prompt/common.cuh); KEY_HEADS, VALUE_HEADS, their lengths KEY and
// VALUE (multiples of 4), TAPS, TILED, JOINED as in step/delta.cu; STAGES of `chunks`.
#include "step/common.cuh"

constexpr int CHUNK = 64, GROUP = VALUE_HEADS / KEY_HEADS, PAST = TAPS - 1;
constexpr int CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE;
constexpr int TURN = 2 * KEY + 2 * GROUP * VALUE;  // elements of a key head if JOINED
static_assert(KEY % 4 == 0 && VALUE % 4 == 0 && VALUE_HEADS % KEY_HEADS == 0 && TAPS >= 2, "a shape this is made for");

__device__ __forceinline__ float from_half(u32 bits) { return HALF ? half_to_float((u16)bits) : bf16_to_float((u16)bits); }
__device__ __forceinline__ u32 to_half(float x) { return HALF ? float_to_half(x) : float_to_bf16(x); }

__device__ __forceinline__ float4 load4(const u16* at) {
    const uint2 x = *(const uint2*)at;
    return make_float4(from_half(x.x & 0xffff), from_half(x.x >> 16), from_half(x.y & 0xffff), from_half(x.y >> 16));
}

// The key head of value head `head`.
__device__ __forceinline__ int key_head(int head) { return TILED ? head % KEY_HEADS : head / GROUP; }

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

#ifndef ON_HOST
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
template <int BYTES>
inline void copy_to_shared(void* to, const void* from) { memcpy(to, from, BYTES); }
#endif

#include "prompt/tf32.cuh"

constexpr int THREADS = 256;  // of all kernels but `heads`
constexpr int KEYS = (KEY + 15) / 16 * 16, VALUES = (VALUE + 15) / 16 * 16;  // lengths in shared memory, with zeros at the end

#include "prompt/delta_heads.cuh"
#include "prompt/delta_solve.cuh"
#include "prompt/delta_chunks.cuh"
#include "prompt/delta_results.cuh"
