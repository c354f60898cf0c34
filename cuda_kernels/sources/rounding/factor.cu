// Factor second moments in float64, as quantize/rounding/cholesky.py does, to the last bit.
#include "rounding/common.cuh"

constexpr int BLOCK = 32;   // columns that are factored together
constexpr int SQUARE = 64;  // rows and columns of a CUDA block of the rest

// Kernels work on several matrices, `per_matrix` CUDA blocks on each (one where that is not said).

// Moments shrunk and damped: float32 as they are, and float64 with both axes reversed. addresses: [3, matrices], of h
// double[n, n]; or, where that is null, of sums float[n, n] to divide by `count` and then, for a `share` above 0, to mix
// with `prior` double[n, n] (null: with their diagonal): (1 - share) M + share P, own = 1 - share. numbers: [4, matrices],
// count, own, share, and the part of what is not on the diagonal that is kept. diagonal: double[matrices, n], what is on it
// at the end; dead: columns that are always zero.
extern "C" __global__ void __launch_bounds__(256) shrink_moments(
    const int64_t* addresses, const double* numbers, const double* diagonal, const uint8_t* dead, float* moments, double* reversed,
    int n, int matrices, int per_matrix) {
  const int64_t total = int64_t(n) * n;
  const int matrix = blockIdx.x / per_matrix;
  const double* h = (const double*)addresses[matrix];
  const float* sums = (const float*)addresses[matrices + matrix];
  const double* prior = (const double*)addresses[2 * matrices + matrix];
  const double count = numbers[matrix], own = numbers[matrices + matrix], share = numbers[2 * matrices + matrix];
  const double kept = numbers[3 * matrices + matrix];
  diagonal += int64_t(matrix) * n;
  dead += int64_t(matrix) * n;
  moments += matrix * total;
  reversed += matrix * total;
  for (int64_t at = blockIdx.x % per_matrix * int64_t(256) + threadIdx.x; at < total; at += per_matrix * int64_t(256)) {
    const int i = int(at / n), j = int(at % n);
    double value = h ? h[at] : double(sums[at]) / count;
    if (share > 0.0) value = own * value + share * (prior ? prior[at] : 0.0);
    value *= kept;
    if (dead[i] || dead[j]) value = 0.0;
    if (i == j) value = diagonal[i];
    moments[at] = float(value);
    reversed[total - 1 - at] = value;
  }
}

// Factor the block on the diagonal. One warp; failed is set for a matrix that is not definite.
extern "C" __global__ void __launch_bounds__(32) factor_block(double* a, int n, int start, int width, int* failed) {
  __shared__ double tile[BLOCK][BLOCK + 1];
  const int i = threadIdx.x;
  a += blockIdx.x * int64_t(n) * n;
  for (int j = 0; j < width && i < width; ++j)
    if (j <= i) tile[i][j] = a[int64_t(start + i) * n + start + j];
  __syncwarp();
  for (int j = 0; j < width; ++j) {
    if (i == j) {
      if (!(tile[j][j] > 0.0)) failed[blockIdx.x] = 1;
      tile[j][j] = sqrt(tile[j][j]);
    }
    __syncwarp();
    if (i > j && i < width) tile[i][j] = tile[i][j] / tile[j][j];
    __syncwarp();
    if (i > j && i < width)
      for (int l = j + 1; l <= i; ++l) tile[i][l] -= tile[i][j] * tile[l][j];
    __syncwarp();
  }
  for (int j = 0; j < width && i < width; ++j)
    if (j <= i) a[int64_t(start + i) * n + start + j] = tile[i][j];
}

// The rows after that block, one for each thread.
extern "C" __global__ void __launch_bounds__(64) factor_rows(double* a, int n, int start, int width, int per_matrix) {
  __shared__ double tile[BLOCK][BLOCK + 1];
  __shared__ double rows[64][BLOCK + 1];
  const int first = start + width + blockIdx.x % per_matrix * 64;
  a += blockIdx.x / per_matrix * int64_t(n) * n;
  for (int at = threadIdx.x; at < width * width; at += 64)
    if (at % width <= at / width) tile[at / width][at % width] = a[int64_t(start + at / width) * n + start + at % width];
  for (int at = threadIdx.x; at < 64 * width; at += 64)
    if (first + at / width < n) rows[at / width][at % width] = a[int64_t(first + at / width) * n + start + at % width];
  __syncthreads();
  double* row = rows[threadIdx.x];
  if (first + int(threadIdx.x) < n)
    for (int j = 0; j < width; ++j) {
      const double value = row[j] / tile[j][j];
      row[j] = value;
      for (int l = j + 1; l < width; ++l) row[l] -= value * tile[l][j];
    }
  __syncthreads();
  for (int at = threadIdx.x; at < 64 * width; at += 64)
    if (first + at / width < n) a[int64_t(first + at / width) * n + start + at % width] = rows[at / width][at % width];
}

// What is left after these columns: a[i, j] -= sum of a[i, k] * a[j, k], in index order. `across` squares cover it.
extern "C" __global__ void __launch_bounds__(256) subtract_products(double* a, int n, int start, int width, int across) {
  __shared__ double left[SQUARE][BLOCK + 1];
  __shared__ double right[SQUARE][BLOCK + 1];
  const int square = blockIdx.x % (across * across), down = square / across, along = square % across;
  if (along > down) return;
  a += blockIdx.x / (across * across) * int64_t(n) * n;
  const int first = start + width, row0 = first + down * SQUARE, column0 = first + along * SQUARE;
  for (int at = threadIdx.x; at < SQUARE * width; at += 256) {
    const int i = at / width, k = at % width;
    left[i][k] = row0 + i < n ? a[int64_t(row0 + i) * n + start + k] : 0.0;
    right[i][k] = column0 + i < n ? a[int64_t(column0 + i) * n + start + k] : 0.0;
  }
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  double sums[4][4];
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) {
      const int i = row0 + ty + 16 * r, j = column0 + tx + 16 * c;
      sums[r][c] = i < n && j <= i ? a[int64_t(i) * n + j] : 0.0;
    }
  __syncthreads();
  for (int k = 0; k < width; ++k) {
    double one[4], other[4];
    for (int r = 0; r < 4; ++r) {
      one[r] = left[ty + 16 * r][k];
      other[r] = right[tx + 16 * r][k];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[r][c] -= one[r] * other[c];
  }
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) {
      const int i = row0 + ty + 16 * r, j = column0 + tx + 16 * c;
      if (i < n && j <= i) a[int64_t(i) * n + j] = sums[r][c];
    }
}

// Feedback float[n, n], strictly upper, and pivots double[n], from the factor of the reversed moments.
extern "C" __global__ void __launch_bounds__(256) feedback_of_factor(const double* a, float* feedback, double* pivots, int n, int per_matrix) {
  const int64_t total = int64_t(n) * n;
  const int matrix = blockIdx.x / per_matrix;
  a += matrix * total;
  feedback += matrix * total;
  pivots += int64_t(matrix) * n;
  for (int64_t at = blockIdx.x % per_matrix * int64_t(256) + threadIdx.x; at < total; at += per_matrix * int64_t(256)) {
    const int i = int(at / n), j = int(at % n);
    const double pivot = a[int64_t(n - 1 - j) * n + n - 1 - j];
    feedback[at] = i < j ? float(a[total - 1 - at] / pivot) : 0.0f;
    if (i == j) pivots[i] = pivot;
  }
}

// product[r, k] = sum of rest[r, j] * moments[j, k], in index order. rest: double[8 * rows, n]; 128 columns and 8 rows
// for each CUDA block. h, sums and count as in shrink_moments.
extern "C" __global__ void __launch_bounds__(128) held_out_products(
    const double* h, const float* sums, double count, const double* rest, double* product, int n, int across) {
  const int k = blockIdx.x % across * 128 + threadIdx.x, row0 = blockIdx.x / across * 8;
  if (k >= n) return;
  double totals[8] = {};
  for (int j = 0; j < n; ++j) {
    const double value = h ? h[int64_t(j) * n + k] : double(sums[int64_t(j) * n + k]) / count;
    for (int r = 0; r < 8; ++r) totals[r] += rest[int64_t(row0 + r) * n + j] * value;
  }
  for (int r = 0; r < 8; ++r) product[int64_t(row0 + r) * n + k] = totals[r];
}
