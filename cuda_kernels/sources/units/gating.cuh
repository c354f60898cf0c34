// How gate and up of a feed-forward layer are joined. Macros: ACTIVATION (its place in cuda_kernels/common/gating.py), LIMIT (0: none).
//
// Comparisons let NaN through, which fminf and fmaxf would replace.
#pragma once

constexpr int SILU = 0, GELU = 1, GELU_ERF = 2, SWIGLU_OAI = 3, RELU = 4, CAPPED_SILU = 5;

// x / (1 + exp(-by x)). Approximate: 2 ulp, and 0 where it would be below 1e-35.
static __device__ __forceinline__ float times_sigmoid(float x, float by) { return __fdividef(x, 1.0f + __expf(-by * x)); }

template <int HOW>
static __device__ __forceinline__ float joined(float gate, float up, float limit) {
  if (HOW == CAPPED_SILU) gate = times_sigmoid(gate, 1.0f);
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  if (HOW == SWIGLU_OAI) return times_sigmoid(gate, 1.702f) * (up + 1.0f);
  if (HOW == GELU) return times_sigmoid(gate, 1.5957691216057308f * (1.0f + 0.044715f * gate * gate)) * up;
  if (HOW == GELU_ERF) return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
  if (HOW == CAPPED_SILU) return gate * up;
  if (HOW == RELU) return (gate < 0.0f ? 0.0f : gate) * up;
  return times_sigmoid(gate, 1.0f) * up;
}

#ifdef ACTIVATION
static __device__ __forceinline__ float joined(float gate, float up) { return joined<ACTIVATION>(gate, up, LIMIT); }
#endif
