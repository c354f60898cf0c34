// Error feedback and descent for types that store words: an index into a table for every DIM columns, and a scale for
// every group of words. As quantize/rounding/kernels/words.py does, to the last bit. Rows may be of several matrices,
// `matrix_rows` of each, with feedback, moments, metrics and inverses of their own one after another.
#include "rounding/words.cuh"

constexpr int MOST_DIM = 8, MOST_GROUP = 32;  // columns of a word and of a group
constexpr int CODES = 16;                     // of an element of IQ4_KSS

// What a warp knows of the word and the group that it chooses.
struct Words {
  float target[MOST_DIM], t[MOST_DIM], twice[MOST_DIM], part[MOST_DIM], metric[MOST_DIM * MOST_DIM], made[MOST_DIM];
  float now[MOST_GROUP], rest[MOST_GROUP], best_rest[MOST_GROUP];
  int trial[MOST_GROUP / 2], best[MOST_GROUP / 2];
};

// The word nearest to now.target by the metric m[i * stride + j]; sets now.made and `index`, and returns its error.
template <int DIM>
__device__ inline float nearest_word(
    Words& now, const float* m, int64_t stride, float scale, const float* table, int count, int lane, int& index) {
  __syncwarp();
  if (lane < DIM) now.t[lane] = now.target[lane] * (1.0f / scale);
  __syncwarp();
  float metric[DIM][DIM], twice[DIM];
  const auto entry = [&](int i, int j) { return m[i * stride + j]; };
  const float energy = set_metric<DIM>(now, lane, entry, metric, twice);
  float least = bits_as_float(0x7F800000u);
  int best = 0x7FFFFFFF;
  for (int c = lane; c < count; c += 32) {
    float v[DIM];
#pragma unroll
    for (int i = 0; i < DIM; ++i) v[i] = table[i * count + c];
    const float score = score_of_word<DIM>(v, metric, twice);
    if (score < least) {
      least = score;
      best = c;
    }
  }
  least_of_warp(least, best);
  index = best == 0x7FFFFFFF ? 0 : best;
  if (lane < DIM) now.made[lane] = scale * table[lane * count + index];
  __syncwarp();
  const float error = energy + least;
  return (scale * scale) * (error > 0.0f ? error : 0.0f);
}

// Scales and words of the columns from `first` (one block), with the errors of each fed back to those after it. piece, delta:
// float[rows, width]; inverse, metric: float[matrices, n / DIM, DIM, DIM]; factors: float[choices], what the scale of the
// block is multiplied by, and book_of: int[choices]; near: u16[choices, n_near], the choices that are tried after each;
// books: float[books, DIM, count]; found: u16[rows, n / DIM].
template <int DIM>
__device__ inline void round_rows(
    float (*values)[MOST_COLUMNS], Words* all, const float* w, const float* piece, const float* feedback, const float* inverse,
    const float* metric, float* delta, uint16_t* found, uint16_t* choices, const float* scales, const float* factors,
    const int* book_of, const uint16_t* near, const float* books, int rows, int matrix_rows, int n, int first, int width, int owners,
    int owner, int groups, int count, int n_near) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows;
  feedback += matrix * n * n;
  inverse += matrix * n * DIM;
  metric += matrix * n * DIM;
  float* t = values[warp];
  Words& now = all[warp];
  for (int k = lane; k < width; k += 32) t[k] = piece[int64_t(row) * width + k];
  __syncwarp();
  const int size = width / groups, per_group = size / DIM;
  const float d = scales[int64_t(row) * owners + owner];
  for (int g = 0; g < groups; ++g) {
    const int at = g * size, column = first + at;
    const int64_t place = int64_t(row) * (n / size) + column / size;
    const float* weight = w + int64_t(row) * n + column;
    const float* a = feedback + int64_t(column) * n + column;
    const int start = choices[place];
    int pick = start;
    float least = bits_as_float(0x7F800000u);
    for (int turn = 0; turn < n_near && d != 0.0f; ++turn) {
      const int choice = near[start * n_near + turn];
      const float scale = d * factors[choice];
      if (scale == 0.0f) continue;
      float total = 0.0f;
      __syncwarp();
      for (int k = lane; k < size; k += 32) now.now[k] = t[at + k];
      for (int v = 0; v < per_group; ++v) {
        const int here = DIM * v, number = column / DIM + v;
        __syncwarp();
        set_target<DIM>(now, now.now + here, weight + here, inverse + number * DIM * DIM, lane);
        int index;
        total += nearest_word<DIM>(now, metric + number * DIM * DIM, DIM, scale, books + int64_t(book_of[choice]) * DIM * count, count, lane, index);
        if (lane == 0) now.trial[v] = index;
        if (!(total < least)) break;  // cannot win
        if (lane < DIM) now.rest[here + lane] = weight[here + lane] - now.made[lane];
        __syncwarp();
        feed_back(now.now, now.rest + here, DIM, a + int64_t(here) * n, n, here + DIM, size, lane);
      }
      if (total < least) {
        least = total;
        pick = choice;
        __syncwarp();
        for (int k = lane; k < size; k += 32) now.best_rest[k] = now.rest[k];
        if (lane < per_group) now.best[lane] = now.trial[lane];
      }
    }
    if (least == bits_as_float(0x7F800000u)) {
      if (lane < per_group) now.best[lane] = 0;
      for (int k = lane; k < size; k += 32) now.best_rest[k] = weight[k];
    }
    __syncwarp();
    if (lane == 0) choices[place] = uint16_t(pick);
    if (lane < per_group) found[int64_t(row) * (n / DIM) + column / DIM + lane] = uint16_t(now.best[lane]);
    for (int k = lane; k < size; k += 32) delta[int64_t(row) * width + at + k] = now.best_rest[k];
    feed_back(t, now.best_rest, size, feedback + int64_t(column) * n + first, n, at + size, width, lane);
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(256) round_words(
    const float* w, const float* piece, const float* feedback, const float* inverse, const float* metric, float* delta,
    uint16_t* found, uint16_t* choices, const float* scales, const float* factors, const int* book_of, const uint16_t* near,
    const float* books, int rows, int matrix_rows, int n, int first, int width, int owners, int owner, int groups, int count,
    int n_near, int dim) {
  __shared__ float values[WARPS][MOST_COLUMNS];
  __shared__ Words all[WARPS];
  if (dim == 8)
    round_rows<8>(values, all, w, piece, feedback, inverse, metric, delta, found, choices, scales, factors, book_of, near, books,
                  rows, matrix_rows, n, first, width, owners, owner, groups, count, n_near);
  else
    round_rows<2>(values, all, w, piece, feedback, inverse, metric, delta, found, choices, scales, factors, book_of, near, books,
                  rows, matrix_rows, n, first, width, owners, owner, groups, count, n_near);
}

// The value of a column of a word, without the scale of its block or row if `scales` is null. codes: words of four codes of
// four bits, books float[books, CODES].
__device__ inline float value_of_word(
    const float* scales, const float* factors, const int* book_of, const float* books, const uint16_t* found, const uint16_t* choices,
    int64_t row, int column, int n, int owner_width, int group, int count, int dim, int codes) {
  const int choice = choices[row * (n / group) + column / group], index = found[row * (n / dim) + column / dim], i = column % dim;
  const float scale = scales ? scales[row * (n / owner_width) + column / owner_width] * factors[choice] : factors[choice];
  const float* book = books + int64_t(book_of[choice]) * (codes ? CODES : dim * count);
  return scale * (codes ? book[index >> 4 * i & 15] : book[i * count + index]);
}

// What is left of w: w minus the value of each element; or, without w, what the scale is multiplied by in the `width` columns
// from `first`.
extern "C" __global__ void __launch_bounds__(256) errors_of_words(
    const float* w, float* out, const uint16_t* found, const uint16_t* choices, const float* scales, const float* factors,
    const int* book_of, const float* books, int64_t rows, int n, int first, int width, int owner_width, int group, int count, int dim,
    int codes) {
  const int64_t total = rows * width;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / width;
    const int column = first + int(i % width);
    const float value = value_of_word(w ? scales : nullptr, factors, book_of, books, found, choices, row, column, n, owner_width, group,
                                      count, dim, codes);
    out[i] = w ? w[row * n + column] - value : value;
  }
}

#include "rounding/code_words.cuh"

// Move single words of the columns from `first` as long as the error falls. g: float[rows, n], what is left times the
// moments h, kept up for these columns; steps: float[rows, width], how much values fell, for the other columns. inverse:
// float[matrices, n / DIM, DIM, DIM] of the blocks of h on its diagonal.
template <int DIM, bool IN_CODES>
__device__ inline void descend_rows(
    float (*gradients)[MOST_COLUMNS], Words* all, const float* h, float* g, const float* inverse, float* steps, uint16_t* found,
    const uint16_t* choices, const float* scales, const float* factors, const int* book_of, const float* books, int rows,
    int matrix_rows, int n, int first, int width, int owner_width, int group, int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows, begin = int64_t(row) * n + first;
  h += matrix * n * n;
  inverse += matrix * n * DIM;
  float* gradient = gradients[warp];
  Words& now = all[warp];
  for (int k = lane; k < width; k += 32) gradient[k] = g[begin + k];
  for (int start = 0; start < width; start += DIM) {
    const int column = first + start, number = column / DIM;
    const float* along = h + int64_t(column) * n + first;
    const int choice = choices[int64_t(row) * (n / group) + column / group];
    const float scale = scales[int64_t(row) * (n / owner_width) + column / owner_width] * factors[choice];
    __syncwarp();
    float old = 0.0f;
    if (lane < DIM) {
      old = value_of_word(scales, factors, book_of, books, found, choices, row, column + lane, n, owner_width, group, count, DIM, IN_CODES);
      float total = 0.0f;
      for (int j = 0; j < DIM; ++j) total += gradient[start + j] * inverse[(number * DIM + j) * DIM + lane];
      now.target[lane] = old + total;
    }
    int index = 0;
    if (scale != 0.0f) {
      if (IN_CODES) {
        __syncwarp();
        float target[4], b[4][4], own[4], error;
        for (int i = 0; i < 4; ++i) target[i] = now.target[i];
        split_metric(along + start, n, b, own);
        const float* level = books + book_of[choice] * CODES;
        index = nearest_even(target, scale, level, b, own, error);
        if (lane < DIM) now.made[lane] = scale * level[index >> 4 * lane & 15];
        __syncwarp();
      } else {
        nearest_word<DIM>(now, along + start, n, scale, books + int64_t(book_of[choice]) * DIM * count, count, lane, index);
      }
    } else {
      if (lane < DIM) now.made[lane] = old;
      __syncwarp();
    }
    if (!move_if_better<DIM>(now.made, old, scale != 0.0f, gradient, along, n, start, width, steps + int64_t(row) * width, lane)) continue;
    if (lane == 0) found[int64_t(row) * (n / DIM) + number] = uint16_t(index);
  }
  __syncwarp();
  for (int k = lane; k < width; k += 32) g[begin + k] = gradient[k];
}

extern "C" __global__ void __launch_bounds__(256) descend_words(
    const float* h, float* g, const float* inverse, float* steps, uint16_t* found, const uint16_t* choices, const float* scales,
    const float* factors, const int* book_of, const float* books, int rows, int matrix_rows, int n, int first, int width,
    int owner_width, int group, int count, int dim) {
  __shared__ float gradients[WARPS][MOST_COLUMNS];
  __shared__ Words all[WARPS];
  if (dim == 8)
    descend_rows<8, false>(gradients, all, h, g, inverse, steps, found, choices, scales, factors, book_of, books, rows, matrix_rows,
                           n, first, width, owner_width, group, count);
  else if (dim == 4)
    descend_rows<4, true>(gradients, all, h, g, inverse, steps, found, choices, scales, factors, book_of, books, rows, matrix_rows,
                          n, first, width, owner_width, group, count);
  else
    descend_rows<2, false>(gradients, all, h, g, inverse, steps, found, choices, scales, factors, book_of, books, rows, matrix_rows,
                           n, first, width, owner_width, group, count);
}

// Moments float[matrices, n, n] with their columns in another order, and in float64 with both axes reversed.
extern "C" __global__ void __launch_bounds__(256) order_moments(
    const float* from, const int* order, float* moments, double* reversed, int n, int per_matrix) {
  const int64_t total = int64_t(n) * n, matrix = blockIdx.x / per_matrix * total;
  for (int64_t at = blockIdx.x % per_matrix * int64_t(256) + threadIdx.x; at < total; at += per_matrix * int64_t(256)) {
    const float value = from[matrix + int64_t(order[at / n]) * n + order[at % n]];
    moments[matrix + at] = value;
    reversed[matrix + total - 1 - at] = value;
  }
}

// Columns of rows in another order.
extern "C" __global__ void __launch_bounds__(256) order_columns(const float* from, const int* order, float* to, int64_t rows, int n) {
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < rows * n; i += gridDim.x * int64_t(256))
    to[i] = from[i / n * n + order[i % n]];
}

// Write words, choices and scales into the bytes of rows: header, blocks. fields: int[8 * block_bytes], what each bit is of:
// word * 16 + bit of an index, 65536 + group * 16 + bit of a choice, or -1. stored: how a scale is, a half (1), a float (0) or
// the half of IQ1_M (2). parity: the bits of words are added up from the highest one, as IQ4_KSS stores them.
extern "C" __global__ void __launch_bounds__(256) write_words(
    uint8_t* out, const uint8_t* heads, const uint8_t* bodies, const uint16_t* found, const uint16_t* choices, const float* scales,
    const int* fields, int64_t rows, int n, int block_bytes, int header_bytes, int blocks, int block_size, int groups, int dim,
    int stored, int parity) {
  const int64_t row_bytes = header_bytes + int64_t(blocks) * block_bytes, total = rows * row_bytes;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / row_bytes;
    int at = int(i % row_bytes), owner = 0, made;
    const bool head = at < header_bytes;
    if (head) {
      made = heads[row * header_bytes + at];
    } else {
      const int block = (at - header_bytes) / block_bytes;
      at = (at - header_bytes) % block_bytes;
      owner = block;
      made = bodies[(row * blocks + block) * block_bytes + at];
      for (int bit = 0; bit < 8; ++bit) {
        const int field = fields[8 * at + bit];
        if (field < 0) continue;
        int value;
        if (field < 65536) {
          value = found[row * (n / dim) + block * (block_size / dim) + (field >> 4)];
          if (parity)
            for (int by = 1; by < 16; by <<= 1) value ^= value >> by;
        } else {
          value = choices[(row * blocks + block) * groups + (field - 65536 >> 4)];
        }
        made = (made & ~(1 << bit)) | (value >> (field & 15) & 1) << bit;
      }
    }
    if (head == (header_bytes > 0)) {
      const float scale = scales[row * (header_bytes ? 1 : blocks) + owner];
      if (stored == 2) {
        if (at >= 49 && at < 56 && at % 2) made = (made & 15) | (bits_of_half(scale) >> 4 * ((at - 49) / 2) & 15) << 4;
      } else if (at < (stored ? 2 : 4)) {
        made = (stored ? bits_of_half(scale) : float_as_bits(scale)) >> 8 * at & 255;
      }
    }
    out[i] = uint8_t(made);
  }
}
