// Products of a step with chosen experts' F32, F16 and BF16 matrices, all in float32. Arguments and macros are those of experts.cu; UNROLL:
// loads of 16 bytes on their way per lane. A warp takes a row: of gate and up, or the same row of every slot's down. gridDim.y is the tokens.
#include "matvec/common.cuh"
#include "units/gating.cuh"
#include "matvec/float_rows.cuh"

// The part of a lane of the products of ROWS rows with `x` in shared memory.
template <int ROWS>
DEV void products(const uint8_t* const* rows, const float* x, int lane, float* sum) {
  #pragma unroll 1
  for (int first = lane; first < VECTORS; first += 32 * UNROLL) {
    uint4 w[ROWS][UNROLL];
    #pragma unroll
    for (int k = 0; k < ROWS; k++)
      #pragma unroll
      for (int j = 0; j < UNROLL; j++) {
        const int v = first + 32 * j;
        w[k][j] = v < VECTORS ? load_weights(rows[k] + 16 * (int64_t)v) : uint4{0, 0, 0, 0};
      }
    #pragma unroll
    for (int j = 0; j < UNROLL; j++) {
      const int v = first + 32 * j;
      if (v >= VECTORS) continue;
      float e[E];
      #pragma unroll
      for (int q = 0; q < E / 4; q++) *(float4*)(e + 4 * q) = ((const float4*)x)[v * (E / 4) + q];
      #pragma unroll
      for (int k = 0; k < ROWS; k++) sum[k] += product(w[k][j], e);
    }
  }
}

#if KIND != 5   // gate and up

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(
    const float* h, const float* norm_weight, float eps, const uint8_t* gate, const uint8_t* up, int64_t, int per_expert, int first_up,
    const int* ids, int slots, int hidden, const float* gate_bias, const float* up_bias, const float* gate_scale, const float* up_scale,
    const uint8_t* shared_gate, const uint8_t* shared_up, int64_t, int shared_rows, float* shared_out, int64_t shared_pitch, int64_t pitch,
    float* out
#if SHARED_SCALED
    , float shared_gate_scale, float shared_up_scale
#endif
    ) {
  constexpr int ROWS = KIND == 4 ? 2 : 1;   // gate and up; of two types, gate in one launch, and up in the next
  static __shared__ float squares[WARPS];
  allow_successor();
  wait_for_predecessor();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, token = blockIdx.y;
  float* values = (float*)shared_memory;
  float square = 0;
  for (int v = thread; v < COLS / 4; v += THREADS) {
    const float4 f = __ldcg((const float4*)(h + (int64_t)token * COLS) + v);
    ((float4*)values)[v] = f;
    square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
  }
  square = warp_sum(square);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  square = 0;
  #pragma unroll
  for (int i = 0; i < WARPS; i++) square += squares[i];
  const float factor = rsqrtf(square / COLS + eps);
  for (int c = thread; c < COLS; c += THREADS) values[c] *= factor * (norm_weight ? norm_weight[c] : 1.0f);
  __syncthreads();

  const int of_experts = slots * hidden, items = of_experts + (SHARED_SLOTS ? shared_rows : 0);
  #pragma unroll 1
  for (int item = blockIdx.x * WARPS + warp; item < items; item += gridDim.x * WARPS) {
    const bool shared = SHARED_SLOTS && item >= of_experts;
    const int row = shared ? item - of_experts : item % hidden, expert = shared ? 0 : __ldcg(ids + token * slots + item / hidden);
    float* const to = shared ? shared_out + token * shared_pitch + row : out + token * pitch + item;
    if (expert < 0) {
      if (lane == 0) *to = 0;
      continue;
    }
    const int64_t at = shared ? row : (int64_t)expert * per_expert + row;
    const int64_t at_up = at + (!shared ? first_up : shared_gate == shared_up ? shared_rows : 0);
    const uint8_t* const both[2] = {(shared ? shared_gate : gate) + at * (COLS * WEIGHT_BYTES), (shared ? shared_up : up) + at_up * (COLS * WEIGHT_BYTES)};
    float sum[ROWS] = {};
    products<ROWS>(both, values, lane, sum);
    #pragma unroll
    for (int k = 0; k < ROWS; k++) sum[k] = warp_sum(sum[k]);
    if (lane != 0) continue;
    if (SCALED && !shared) {
      if (gate_scale) sum[0] *= __ldg(gate_scale + expert);
      if (ROWS == 2 && up_scale) sum[ROWS - 1] *= __ldg(up_scale + expert);
    }
#if SHARED_SCALED
    if (shared) sum[0] *= shared_gate_scale;
    if (shared && ROWS == 2) sum[ROWS - 1] *= shared_up_scale;
#endif
    if (BIASED && !shared) {
      if (gate_bias) sum[0] += __ldg(gate_bias + at);
      if (ROWS == 2 && up_bias) sum[ROWS - 1] += __ldg(up_bias + at_up);
    }
    *to = KIND == 4 ? joined(sum[0], sum[ROWS - 1]) : KIND == 6 ? sum[0] : joined(*to, sum[0]);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS) expert_down(
    const float* x, const uint8_t* down, int64_t, int rows, const int* ids, const float* weights, const float* bias, const float* scale,
    const uint8_t* shared_down, float* h
#if SHARED_SCALED
    , float shared_scale
#endif
    ) {
  constexpr int ROUTED = N - SHARED_SLOTS;
  allow_successor();
  wait_for_predecessor();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, token = blockIdx.y;
  float* values = (float*)shared_memory;
  for (int v = thread; v < N * COLS / 4; v += THREADS) ((float4*)values)[v] = __ldcg((const float4*)(x + (int64_t)token * N * COLS) + v);
  __syncthreads();
  #pragma unroll 1
  for (int row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS) {
    float all = 0, added = 0;
    #pragma unroll 1
    for (int k = 0; k < N; k++) {
      const bool shared = SHARED_SLOTS && k >= ROUTED;
      const int expert = shared ? 0 : __ldcg(ids + token * ROUTED + k);
      const float share = __ldcg(weights + token * N + k);
      if (expert < 0 || share == 0) continue;   // keeps out, too, what is not a number in an expert that does not count
      // A row of the shared expert is SHARED_SLOTS rows of COLS elements.
      const int64_t at = shared ? (int64_t)row * SHARED_SLOTS + k - ROUTED : (int64_t)expert * rows + row;
      const uint8_t* const own = (shared ? shared_down : down) + at * (COLS * WEIGHT_BYTES);
      float sum = 0;
      products<1>(&own, values + k * COLS, lane, &sum);
#if SHARED_SCALED
      if (shared) sum *= shared_scale;
#endif
      all += sum * (SCALED && scale && !shared ? share * __ldg(scale + expert) : share);
      if (BIASED && bias && !shared) added += share * __ldg(bias + at);
    }
    all = warp_sum(all);
    if (lane == 0) h[(int64_t)token * rows + row] += all + added;
  }
}

#endif
