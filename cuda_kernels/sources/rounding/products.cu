// Products of float32 matrices whose sums are taken in index order, with separate roundings.
#include "rounding/common.cuh"

constexpr int TILE = 128, DEPTH = 8;

// c[r, k] += a[r, j] * b[j, k], j = 0, 1, .., depth - 1; from zero if `fresh`. Columns from skip_from to skip_to stay as
// they are. The number of columns, the depth and all strides are multiples of 8. Rows are of several matrices, `rows` of
// each, whose b are `b_matrix` elements apart.
extern "C" __global__ void __launch_bounds__(256) add_products(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows, int depth,
    int columns, int skip_from, int skip_to, int fresh, int64_t b_matrix) {
  __shared__ __align__(16) float as[2][DEPTH][TILE + 4];
  __shared__ __align__(16) float bs[2][DEPTH][TILE];
  const int across = (columns + TILE - 1) / TILE, tiles = (rows + TILE - 1) / TILE * across;
  const int64_t matrix = blockIdx.x / tiles;
  a += matrix * rows * a_stride;
  b += matrix * b_matrix;
  c += matrix * rows * c_stride;
  const int tile = blockIdx.x % tiles, row0 = tile / across * TILE, column0 = tile % across * TILE;
  if (column0 >= skip_from && (column0 + TILE < columns ? column0 + TILE : columns) <= skip_to) return;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int a_row = threadIdx.x / 2, a_at = threadIdx.x % 2 * 4, b_row = threadIdx.x / 32, b_at = threadIdx.x % 32 * 4;
  const bool has_a = row0 + a_row < rows, has_b = column0 + b_at < columns;
  const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
  const float* a_from = a + (row0 + a_row) * a_stride + a_at;
  const float* b_from = b + b_row * b_stride + column0 + b_at;
  float sums[8][8];
  for (int i = 0; i < 8; ++i) {
    const int row = row0 + (i / 4) * 64 + ty * 4 + i % 4;
    for (int half = 0; half < 2; ++half) {
      const int column = column0 + half * 64 + tx * 4;
      float4 found = zero;
      if (!fresh && row < rows && column < columns) found = *(const float4*)(c + row * c_stride + column);
      sums[i][4 * half] = found.x;
      sums[i][4 * half + 1] = found.y;
      sums[i][4 * half + 2] = found.z;
      sums[i][4 * half + 3] = found.w;
    }
  }
  float4 next_a = has_a ? *(const float4*)a_from : zero, next_b = has_b ? *(const float4*)b_from : zero;
  for (int j = 0, turn = 0; j < depth; j += DEPTH, turn ^= 1) {
    as[turn][a_at][a_row] = next_a.x;
    as[turn][a_at + 1][a_row] = next_a.y;
    as[turn][a_at + 2][a_row] = next_a.z;
    as[turn][a_at + 3][a_row] = next_a.w;
    *(float4*)&bs[turn][b_row][b_at] = next_b;
    __syncthreads();
    if (j + DEPTH < depth) {
      next_a = has_a ? *(const float4*)(a_from + j + DEPTH) : zero;
      next_b = has_b ? *(const float4*)(b_from + (j + DEPTH) * b_stride) : zero;
    }
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      float left[8], right[8];
      *(float4*)&left[0] = *(const float4*)&as[turn][k][ty * 4];
      *(float4*)&left[4] = *(const float4*)&as[turn][k][64 + ty * 4];
      *(float4*)&right[0] = *(const float4*)&bs[turn][k][tx * 4];
      *(float4*)&right[4] = *(const float4*)&bs[turn][k][64 + tx * 4];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int l = 0; l < 8; ++l) sums[i][l] += left[i] * right[l];
    }
  }
  for (int i = 0; i < 8; ++i) {
    const int row = row0 + (i / 4) * 64 + ty * 4 + i % 4;
    for (int half = 0; half < 2; ++half) {
      const int column = column0 + half * 64 + tx * 4;
      if (row < rows && column < columns && (column < skip_from || column >= skip_to))
        *(float4*)(c + row * c_stride + column) = *(const float4*)&sums[i][4 * half];
    }
  }
}
