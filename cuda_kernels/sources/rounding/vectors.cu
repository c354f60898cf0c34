// Error feedback and descent for types that store vectors of eight elements: indices into a table of magnitudes, of four
// or eight elements, and signs. As quantize/rounding/kernels/vectors.py does, to the last bit. Rows may be of several
// matrices, `matrix_rows` of each, with feedback, moments, metrics and inverses of their own one after another.
#include "rounding/words.cuh"

constexpr int SIZE = 8;            // elements of a vector
constexpr int MOST_MAGNITUDES = 8192;  // of a table

// What a warp knows of the vector that it chooses.
struct Vector {
  float target[SIZE], size[SIZE], sign[SIZE], value[SIZE], pull[SIZE], metric[SIZE][SIZE], made[SIZE];
  int index[2];
};

// The best entry of the table for WIDTH elements from `first`: the least sum_i (m_ii v_i - 2 b_i + sum_j<i 2 m_ij v_j) v_i.
template <int WIDTH>
__device__ inline int best_entry(const Vector& now, const float* table, int count, int lane) {
  float diagonal[WIDTH], twice[WIDTH][WIDTH], pull[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    diagonal[i] = now.metric[i][i];
    pull[i] = 2.0f * now.pull[i];
#pragma unroll
    for (int j = 0; j < i; ++j) twice[i][j] = 2.0f * now.metric[i][j];
  }
  float least = bits_as_float(0x7F800000u);
  int best = 0x7FFFFFFF;
  for (int c = lane; c < count; c += 32) {
    float v[WIDTH], score = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] = table[i * count + c];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      float sum = diagonal[i] * v[i] - pull[i];
#pragma unroll
      for (int j = 0; j < i; ++j) sum += twice[i][j] * v[j];
      if (i == 0) score = sum * v[i];
      else score += sum * v[i];
    }
    if (score < least) {
      least = score;
      best = c;
    }
  }
  least_of_warp(least, best);
  return best == 0x7FFFFFFF ? 0 : best;
}

// Choose the vector nearest to now.target by the metric m[i * stride + j]. Sets now.index, now.made; returns sign bits.
template <int WIDTH>
__device__ inline int choose_vector(
    Vector& now, const float* m, int64_t stride, float scale, const float* table, int count, int even, int lane) {
  __syncwarp();
  if (scale == 0.0f) {
    if (lane < SIZE) now.made[lane] = 0.0f;
    if (lane < 2) now.index[lane] = 0;
    __syncwarp();
    return 0;
  }
  float x = 0.0f;
  if (lane < SIZE) x = now.target[lane] / scale;
  const bool below = lane < SIZE && x < 0.0f;
  int signs = int(__ballot_sync(~0u, below) & 255u);
  if (lane < SIZE) {
    now.size[lane] = below ? -x : x;
    now.sign[lane] = below ? -1.0f : 1.0f;
  }
  __syncwarp();
  if (even && (__popc(signs) & 1)) {
    int flipped = 0;
    for (int i = 1; i < SIZE; ++i)
      if (m[i * stride + i] * now.size[i] < m[flipped * stride + flipped] * now.size[flipped]) flipped = i;
    signs ^= 1 << flipped;
    __syncwarp();
    if (lane == 0) {
      now.size[flipped] = -now.size[flipped];
      now.sign[flipped] = -now.sign[flipped];
    }
    __syncwarp();
  }
  if (lane < SIZE) now.value[lane] = now.size[lane];
  __syncwarp();
  constexpr int HALVES = SIZE / WIDTH;
  for (int turn = 0; turn < 2 * HALVES - 1; ++turn) {
    const int half = turn % HALVES, first = half * WIDTH;
    for (int at = lane; at < WIDTH * WIDTH; at += 32) {
      const int i = first + at / WIDTH, j = first + at % WIDTH;
      now.metric[at / WIDTH][at % WIDTH] = m[i * stride + j] * now.sign[i] * now.sign[j];
    }
    if (lane < WIDTH) {
      const int i = first + lane;
      float total = 0.0f;
      for (int j = 0; j < SIZE; ++j) {
        const bool inside = first <= j && j < first + WIDTH;
        const float value = inside ? now.size[j] : now.size[j] - now.value[j];
        total += m[i * stride + j] * now.sign[i] * now.sign[j] * value;
      }
      now.pull[lane] = total;
    }
    __syncwarp();
    const int best = best_entry<WIDTH>(now, table, count, lane);
    if (lane < WIDTH) now.value[first + lane] = table[lane * count + best];
    if (lane == 0) now.index[half] = best;
    __syncwarp();
  }
  if (lane < SIZE) now.made[lane] = scale * now.sign[lane] * now.value[lane];
  __syncwarp();
  return signs;
}

// Vectors of the columns from `first` (one block), with the errors of each fed back to those after it. piece, delta:
// float[rows, width]; inverse, metric: float[matrices, n / 8, 8, 8]; factors: float[choices], what the scale of a block is
// multiplied by; indices: u16[rows, n / WIDTH]; signs: u8[rows, n / 8].
template <int WIDTH>
__device__ inline void round_rows(
    float* table, float (*values)[MOST_COLUMNS], Vector* vectors, const float* w, const float* piece, const float* feedback,
    const float* inverse, const float* metric, float* delta, uint16_t* indices, uint8_t* signs, const uint16_t* choices,
    const float* scales, const float* factors, const float* all_entries, int rows, int matrix_rows, int n, int first, int width,
    int owners, int owner, int groups, int count, int even) {
  for (int i = threadIdx.x; i < WIDTH * count; i += 256) table[i] = all_entries[i];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows;
  feedback += matrix * n * n;
  inverse += matrix * n * SIZE;
  metric += matrix * n * SIZE;
  float* t = values[warp];
  Vector& now = vectors[warp];
  for (int k = lane; k < width; k += 32) t[k] = piece[int64_t(row) * width + k];
  __syncwarp();
  const int group = width / groups;
  const float d = scales[int64_t(row) * owners + owner];
  for (int start = 0; start < width; start += SIZE) {
    const int column = first + start, number = column / SIZE;
    const float* weight = w + int64_t(row) * n + column;
    const float scale = d * factors[choices[int64_t(row) * (n / group) + column / group]];
    set_target<SIZE>(now, t + start, weight, inverse + number * SIZE * SIZE, lane);
    const int bits = choose_vector<WIDTH>(now, metric + number * SIZE * SIZE, SIZE, scale, table, count, even, lane);
    if (lane == 0) signs[int64_t(row) * (n / SIZE) + number] = uint8_t(bits);
    if (lane < SIZE / WIDTH) indices[int64_t(row) * (n / WIDTH) + number * (SIZE / WIDTH) + lane] = uint16_t(now.index[lane]);
    if (lane < SIZE) delta[int64_t(row) * width + start + lane] = weight[lane] - now.made[lane];
    for (int k = start + SIZE + lane; k < width; k += 32) {
      float value = t[k];
#pragma unroll
      for (int i = 0; i < SIZE; ++i) value += (weight[i] - now.made[i]) * feedback[int64_t(column + i) * n + first + k];
      t[k] = value;
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(256) round_vectors(
    const float* w, const float* piece, const float* feedback, const float* inverse, const float* metric, float* delta,
    uint16_t* indices, uint8_t* signs, const uint16_t* choices, const float* scales, const float* factors, const float* entries,
    int rows, int matrix_rows, int n, int first, int width, int owners, int owner, int groups, int count, int size, int even) {
  __shared__ float table[MOST_MAGNITUDES];
  __shared__ float values[WARPS][MOST_COLUMNS];
  __shared__ Vector vectors[WARPS];
  if (size == 8)
    round_rows<8>(table, values, vectors, w, piece, feedback, inverse, metric, delta, indices, signs, choices, scales, factors,
                  entries, rows, matrix_rows, n, first, width, owners, owner, groups, count, even);
  else
    round_rows<4>(table, values, vectors, w, piece, feedback, inverse, metric, delta, indices, signs, choices, scales, factors,
                  entries, rows, matrix_rows, n, first, width, owners, owner, groups, count, even);
}

// The value of an element, without the scale of its block if `scales` is null.
__device__ inline float value_of_vector(
    const float* scales, const float* factors, const float* entries, const uint16_t* indices, const uint8_t* signs,
    const uint16_t* choices, int64_t row, int column, int n, int owner_width, int group, int count, int size) {
  const float factor = factors[choices[row * (n / group) + column / group]];
  const float scale = scales ? scales[row * (n / owner_width) + column / owner_width] * factor : factor;
  const float sign = signs[row * (n / SIZE) + column / SIZE] >> column % SIZE & 1 ? -1.0f : 1.0f;
  return scale * sign * entries[column % size * count + indices[row * (n / size) + column / size]];
}

// What is left of w: w minus the value of each element; or, without w, what the scale of the block is multiplied by in the
// `width` columns from `first`.
extern "C" __global__ void __launch_bounds__(256) errors_of_vectors(
    const float* w, float* out, const uint16_t* indices, const uint8_t* signs, const uint16_t* choices, const float* scales,
    const float* factors, const float* entries, int64_t rows, int n, int first, int width, int owner_width, int group, int count,
    int size) {
  const int64_t total = rows * width;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / width;
    const int column = first + int(i % width);
    const float value =
        value_of_vector(w ? scales : nullptr, factors, entries, indices, signs, choices, row, column, n, owner_width, group, count, size);
    out[i] = w ? w[row * n + column] - value : value;
  }
}

// Move single vectors of the columns from `first` as long as the error falls. g: float[rows, n], what is left times the
// moments h, kept up for these columns; steps: float[rows, width], how much values fell, for the other columns. inverse:
// float[matrices, n / 8, 8, 8] of the blocks of h on its diagonal.
template <int WIDTH>
__device__ inline void descend_rows(
    float* table, float (*gradients)[MOST_COLUMNS], Vector* vectors, const float* h, float* g, const float* inverse, float* steps,
    uint16_t* indices, uint8_t* signs, const uint16_t* choices, const float* scales, const float* factors, const float* entries,
    int rows, int matrix_rows, int n, int first, int width, int owner_width, int group, int count, int even) {
  for (int i = threadIdx.x; i < WIDTH * count; i += 256) table[i] = entries[i];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows, begin = int64_t(row) * n + first;
  h += matrix * n * n;
  inverse += matrix * n * SIZE;
  float* gradient = gradients[warp];
  Vector& now = vectors[warp];
  for (int k = lane; k < width; k += 32) gradient[k] = g[begin + k];
  for (int start = 0; start < width; start += SIZE) {
    const int column = first + start, number = column / SIZE;
    const float* along = h + int64_t(column) * n + first;
    const float scale =
        scales[int64_t(row) * (n / owner_width) + column / owner_width] * factors[choices[int64_t(row) * (n / group) + column / group]];
    __syncwarp();
    float old = 0.0f;
    if (lane < SIZE) {
      old = value_of_vector(scales, factors, entries, indices, signs, choices, row, column + lane, n, owner_width, group, count, WIDTH);
      float total = 0.0f;
      for (int j = 0; j < SIZE; ++j) total += gradient[start + j] * inverse[(number * SIZE + j) * SIZE + lane];
      now.target[lane] = old + total;
    }
    const int bits = choose_vector<WIDTH>(now, along + start, n, scale, table, count, even, lane);
    if (!move_if_better<SIZE>(now.made, old, true, gradient, along, n, start, width, steps + int64_t(row) * width, lane)) continue;
    if (lane == 0) signs[int64_t(row) * (n / SIZE) + number] = uint8_t(bits);
    if (lane < SIZE / WIDTH) indices[int64_t(row) * (n / WIDTH) + number * (SIZE / WIDTH) + lane] = uint16_t(now.index[lane]);
  }
  __syncwarp();
  for (int k = lane; k < width; k += 32) g[begin + k] = gradient[k];
}

extern "C" __global__ void __launch_bounds__(256) descend_vectors(
    const float* h, float* g, const float* inverse, float* steps, uint16_t* indices, uint8_t* signs, const uint16_t* choices,
    const float* scales, const float* factors, const float* entries, int rows, int matrix_rows, int n, int first, int width,
    int owner_width, int group, int count, int size, int even) {
  __shared__ float table[MOST_MAGNITUDES];
  __shared__ float gradients[WARPS][MOST_COLUMNS];
  __shared__ Vector vectors[WARPS];
  if (size == 8)
    descend_rows<8>(table, gradients, vectors, h, g, inverse, steps, indices, signs, choices, scales, factors, entries, rows,
                    matrix_rows, n, first, width, owner_width, group, count, even);
  else
    descend_rows<4>(table, gradients, vectors, h, g, inverse, steps, indices, signs, choices, scales, factors, entries, rows,
                    matrix_rows, n, first, width, owner_width, group, count, even);
}

// The blocks on the diagonal of matrices float[matrices, n, n]: float[matrices, n / size, size, size].
extern "C" __global__ void __launch_bounds__(256) blocks_of_diagonal(const float* from, float* to, int64_t matrices, int n, int size) {
  const int64_t total = matrices * n * size;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t matrix = i / (int64_t(n) * size);
    const int at = int(i % (int64_t(n) * size)), block = at / (size * size), r = at / size % size, c = at % size;
    to[i] = from[matrix * n * n + int64_t(block * size + r) * n + block * size + c];
  }
}

// Write indices, signs and scales into the bytes of rows of blocks. fields: int[8 * block_bytes], what each bit is of:
// vector * 16 + bit of an index, 65536 + vector * 8 + bit of signs, or -1.
extern "C" __global__ void __launch_bounds__(256) write_vectors(
    uint8_t* out, const uint8_t* bodies, const uint16_t* indices, const uint8_t* signs, const float* scales, const int* fields,
    int64_t rows, int n, int block_bytes, int blocks, int block_size, int size) {
  const int64_t row_bytes = int64_t(blocks) * block_bytes, total = rows * row_bytes;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / row_bytes;
    const int block = int(i % row_bytes) / block_bytes, at = int(i % row_bytes) % block_bytes;
    int made = bodies[i];
    for (int bit = 0; bit < 8; ++bit) {
      const int field = fields[8 * at + bit];
      if (field < 0) continue;
      const int value = field < 65536 ? indices[row * (n / size) + block * (block_size / size) + (field >> 4)] >> (field & 15) & 1
                                      : signs[row * (n / SIZE) + block * (block_size / SIZE) + (field - 65536 >> 3)] >> (field & 7) & 1;
      made = (made & ~(1 << bit)) | value << bit;
    }
    if (at < 2) made = bits_of_half(scales[row * blocks + block]) >> 8 * at & 255;
    out[i] = uint8_t(made);
  }
}
