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
#include "prompt/recurrent.cuh"

constexpr int GROUP = VALUE_HEADS / KEY_HEADS, PAST = TAPS - 1;
constexpr int CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE;
constexpr int TURN = 2 * KEY + 2 * GROUP * VALUE;  // elements of a key head if JOINED
static_assert(KEY % 4 == 0 && VALUE % 4 == 0 && VALUE_HEADS % KEY_HEADS == 0 && TAPS >= 2, "a shape this is made for");

// The key head of value head `head`.
__device__ __forceinline__ int key_head(int head) { return TILED ? head % KEY_HEADS : head / GROUP; }

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }

constexpr int THREADS = 256;  // of all kernels but `heads`
constexpr int KEYS = (KEY + 15) / 16 * 16, VALUES = (VALUE + 15) / 16 * 16;  // lengths in shared memory, with zeros at the end

#include "prompt/delta_heads.cuh"
#include "prompt/delta_solve.cuh"
#include "prompt/delta_chunks.cuh"
#include "prompt/delta_results.cuh"
