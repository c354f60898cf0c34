// Kimi delta attention over many tokens, CHUNK of them at a time (Kimi Team, 2025): the rule of delta.cu, but every channel of a key decays by a factor
// of its own.
//
//     S <- diag(exp(g)) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = S^T q
//
// With G the running sum of g in a chunk, A[i, j] = sum over channels of k_i k_j exp(G_i - G_j) for i >= j, P the same of q_i and k_j, T the inverse of
// I + (strictly lower part of beta A) and S the memory before the chunk:
//
//     E = T beta V - (T beta (exp(G) K)) S                           errors: both terms but S from `solve`, the rest in `chunks`
//     S <- diag(exp(G[last])) S + (exp(G[last] - G) K)^T E           in `chunks`
//     O = (exp(G) Q) S + P E                                         in `results`
//
// `heads`, `chunks` and `results` are those of delta.cu, with as many heads of values as of keys, and what is stored is the same; but queries and keys,
// which `heads` leaves as they are, are multiplied by their decays in `solve`, so that no other kernel needs these.
//
// Compiled per shape: as delta.cu; BOUND of the logarithms of decays, 0 for none.
#include "prompt/delta_common.cuh"

constexpr bool BY_CHANNEL = true;
static_assert(KEY_HEADS == VALUE_HEADS && !JOINED, "a shape this is made for");

#include "prompt/delta_heads.cuh"
#include "prompt/kimi_solve.cuh"
#include "prompt/delta_chunks.cuh"
#include "prompt/delta_results.cuh"
