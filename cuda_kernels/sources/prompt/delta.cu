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
#include "prompt/delta_common.cuh"

constexpr bool BY_CHANNEL = false;  // a head has one decay

#include "prompt/delta_heads.cuh"
#include "prompt/delta_solve.cuh"
#include "prompt/delta_chunks.cuh"
#include "prompt/delta_results.cuh"
