// Matrix-vector products on F32, F16 and BF16 matrices for 1..8 rows of activations, all in float32.
//
// Macros: TYPE, WEIGHT_BYTES, COLS, X_ROWS, WARPS, SPLIT (warps that share a row of weights: the router's few rows would not keep a
// device busy otherwise), UNROLL (loads of 16 bytes on their way per lane), KIND, PLAIN, SCALED, ACTIVATION, LIMIT and KERNEL as in matvec.cu.
#include "matvec/common.cuh"
#include "units/gating.cuh"
#include "matvec/float_rows.cuh"
#ifndef SCALED
#define SCALED 0
#endif

constexpr bool NORM = KIND != 1 && !PLAIN, GATED = KIND == 2;
constexpr int PER = (VECTORS + 32 * SPLIT - 1) / (32 * SPLIT);   // vectors of a lane

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(
    const float* x, const float* norm_weight, float eps, const uint8_t* base0, float* out0, int rows0, int first0, int,
    const uint8_t* base1, float* out1, int rows1, int first1, int, const uint8_t* base2, float* out2, int rows2, int first2, int
#if SCALED
    , float scale0, float scale1, float scale2
#endif
    ) {
  static __shared__ float squares[N][WARPS], parts[2][N][WARPS];
  allow_successor();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, part = warp % SPLIT;
  const int items = GATED ? rows0 : rows0 + rows1 + rows2;
  const int stride = gridDim.x * (WARPS / SPLIT), begin = blockIdx.x * (WARPS / SPLIT) + warp / SPLIT;

  auto weights = [&](int item, int k) -> const uint8_t* {   // of gate or up (k), or of a row of one of the matrices
    if (GATED) return (k ? base1 : base0) + (int64_t)((k ? first1 : first0) + item) * (COLS * WEIGHT_BYTES);
    if (item < rows0) return base0 + (int64_t)(first0 + item) * (COLS * WEIGHT_BYTES);
    if (item < rows0 + rows1) return base1 + (int64_t)(first1 + item - rows0) * (COLS * WEIGHT_BYTES);
    return base2 + (int64_t)(first2 + item - rows0 - rows1) * (COLS * WEIGHT_BYTES);
  };
  auto result = [&](int item, int n) -> float* {
    if (GATED || item < rows0) return out0 + (int64_t)n * rows0 + item;
    if (item < rows0 + rows1) return out1 + (int64_t)n * rows1 + item - rows0;
    return out2 + (int64_t)n * rows2 + item - rows0 - rows1;
  };
  uint4 ahead[UNROLL];   // the first row's first weights, on their way while the kernel in front ends
  if (begin < items)
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      int v = (i * SPLIT + part) * 32 + lane;
      if (v < VECTORS) ahead[i] = load_weights(weights(begin, 0) + 16 * v);
    }

  wait_for_predecessor();
  float* values = (float*)shared_memory;
  #pragma unroll 1
  for (int n = 0; n < N; n++) {
    float square = 0;
    #pragma unroll 4
    for (int v = thread; v < COLS / 4; v += THREADS) {
      float4 f = __ldcg((const float4*)(x + (int64_t)n * COLS) + v);
      ((float4*)values)[n * (COLS / 4) + v] = f;
      square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
    }
    square = warp_sum(square);
    if (lane == 0) squares[n][warp] = square;
  }
  __syncthreads();
  if (NORM) {
    #pragma unroll 1
    for (int n = 0; n < N; n++) {
      float square = 0;
      #pragma unroll
      for (int i = 0; i < WARPS; i++) square += squares[n][i];
      const float factor = rsqrtf(square / COLS + eps);
      for (int c = thread; c < COLS; c += THREADS) values[n * COLS + c] *= factor * (norm_weight ? norm_weight[c] : 1.0f);
    }
    __syncthreads();
  }

  const int rounds = (items + stride - 1) / stride;   // the same for all warps: they meet at barriers
  #pragma unroll 1
  for (int round = 0; round < rounds; round++) {
    const int item = begin + round * stride;
    float sum[2][N];
    #pragma unroll
    for (int k = 0; k < (GATED ? 2 : 1); k++) {
      #pragma unroll
      for (int n = 0; n < N; n++) sum[k][n] = 0;
      if (item < items) {
        const uint8_t* row = weights(item, k);
        #pragma unroll 1
        for (int i = 0; i < PER; i += UNROLL) {
          uint4 w[UNROLL];
          #pragma unroll
          for (int j = 0; j < UNROLL; j++) {
            int v = ((i + j) * SPLIT + part) * 32 + lane;
            w[j] = make_uint4(0, 0, 0, 0);
            if (v < VECTORS) w[j] = round == 0 && k == 0 && i == 0 ? ahead[j] : load_weights(row + 16 * v);
          }
          #pragma unroll
          for (int j = 0; j < UNROLL; j++) {
            int v = ((i + j) * SPLIT + part) * 32 + lane;
            if (v < VECTORS)
              #pragma unroll
              for (int n = 0; n < N; n++) {
                float e[E];
                #pragma unroll
                for (int q = 0; q < E / 4; q++) *(float4*)(e + 4 * q) = ((const float4*)values)[n * (COLS / 4) + v * (E / 4) + q];
                sum[k][n] += product(w[j], e);
              }
          }
        }
      }
      #pragma unroll
      for (int n = 0; n < N; n++) sum[k][n] = warp_sum(sum[k][n]);
      if (SPLIT > 1) {
        if (lane == 0)
          #pragma unroll
          for (int n = 0; n < N; n++) parts[k][n][warp] = sum[k][n];
        __syncthreads();
        #pragma unroll
        for (int n = 0; n < N; n++) {
          sum[k][n] = 0;
          #pragma unroll
          for (int i = 0; i < SPLIT; i++) sum[k][n] += parts[k][n][warp - part + i];
        }
        __syncthreads();
      }
    }
#if SCALED
    #pragma unroll
    for (int n = 0; n < N; n++) {
      sum[0][n] *= GATED || item < rows0 ? scale0 : item < rows0 + rows1 ? scale1 : scale2;
      if (GATED) sum[1][n] *= scale1;
    }
#endif
    if (lane == 0 && part == 0 && item < items)
      #pragma unroll
      for (int n = 0; n < N; n++) {
        float* to = result(item, n);
        *to = KIND == 0 ? sum[0][n] : KIND == 1 ? *to + sum[0][n] : KIND == 2 ? joined(sum[0][n], sum[1][n]) : joined(*to, sum[0][n]);
      }
  }
}
