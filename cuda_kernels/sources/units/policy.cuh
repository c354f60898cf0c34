// How L2 is to keep what is read from memory.
#pragma once

// It replaces these lines first: for what nobody reads a second time in a step, which are weights and rows of the cache
// (docs/benchmarks/cuda-history/products.md, version 15). Tokens that use the same expert each read its weights: see READ_AGAIN of
// matvec/instructions.cuh.
//
// Shared addresses of copies with a policy have to differ from lane to lane for all that the compiler knows (`in_register`, `lane_address`).
// Where a part of an address is uniform, NVRTC 13.0 may have a copy take that part and the policy from registers that nothing has set.
static __device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
