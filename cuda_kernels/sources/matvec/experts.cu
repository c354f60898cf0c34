// Products with the experts that a router chose, for each token on its own: blockIdx.y is the token.
//
// Macros as for matvec.cu (X_ROWS is 1 for gates, and the number of experts per token for EXPERT_DOWN) and KIND:
// EXPERT_GATE_UP  out[token, slot] = joined(G norm(h), U norm(h)) with the matrices of expert ids[token, slot] (units/gating.cuh)
// EXPERT_GATE     out[token, slot] = G norm(h), where gate and up are of two types; EXPERT_GATE_BY  out = joined(out, U norm(h))
// EXPERT_DOWN     h[token] += sum over slots, in ascending order, of weights[token, slot] * D x[token, slot]
// BIASED: products have a bias per expert and row, SCALED: a factor per expert; a null pointer stands for none. SHARED_SCALED: a shared
// expert's matrices have factors, too. WEIGHED, for gates: products have the weight of their slot as a further factor, of so many for each token.
//
// STAGE_ROWS, for EXPERT_DOWN: slots of an item. Fewer than all: an item is a part of a row, and the sums of a row's parts are added in their order at the
// end, from shared memory. So stages are shorter, more of them are on their way, and warps have more nearly as much to do.
//
// JOINED_SLOTS, for EXPERT_DOWN with rows that are one stage and no multiple of a step: lanes take the granules of an item's rows one after
// the other, as if they were one row. So a step has a granule for every lane, and slots in shared memory are no longer than rows.
//
// SHARED_SLOTS, for EXPERT_GATE_UP: there is a shared expert, which all tokens use. Its rows come first, as no choice is needed to fetch them.
// For EXPERT_DOWN: so many slots after those of the router are its columns. `ids` are of the other slots, `weights` of all.
//
// A slot with a negative id contributes 0. SOME_ABSENT: there are such slots, as another device has their experts or they count for too little,
// and they take no time; without it such a slot takes as long as others.
//
// EXPERT_GATE_UP knows which weights it needs when the kernel in front, the router, has ended. Until
// then it norms and rounds h, which must be older than that kernel: the router lets it start when h is complete.
// EXPERT_DOWN follows it, and may not start before that, so it reads the choice at once: `ids` and `weights` must be older than the kernel
// in front of it.
#include "matvec/feed.cuh"
#include "units/gating.cuh"

#ifndef SHARED_SLOTS
#define SHARED_SLOTS 0
#endif
#ifndef WEIGHED
#define WEIGHED 0
#endif
#ifndef SHARED_SCALED
#define SHARED_SCALED 0
#endif

typedef Format<TYPE> F;
typedef Activations<F> A;

// The place of the lane-th bit that is set, 31 if there is none.
DEV int place_of_bit(uint32_t bits, int lane) {
  int at = 0;
  #pragma unroll
  for (int width = 16; width; width /= 2) {
    const int below = __popc(bits >> at & ((1u << width) - 1));
    if (lane >= below) lane -= below, at += width;
  }
  return at;
}

#if KIND != 1
#include "matvec/expert_gates.cuh"
#else
#include "matvec/expert_down.cuh"
#endif
