// Error feedback and descent for types whose words come from a generator: as quantize/rounding/kernels/words.py does with
// the codebook arranged as a tree (quantize/search/trellis/tree.py), to the last bit. Rows may be of several matrices,
// `matrix_rows` of each, with feedback, moments, metrics, inverses and weights of their own one after another.
#include "rounding/words.cuh"

#include "rounding/tree.cuh"

// Scales and words of the columns from `first` (one block), with the errors of each fed back to those after it. near:
// u16[books, 256], the number of the scale for each multiple + 128; multiples: float[positive + negative]; found, signs:
// u16 and u8[rows, n / DIM], places in the tree and signs.
template <int DIM>
__device__ inline void round_rows(
    float (*values)[MOST_COLUMNS], TreeWords* all, const Tree& tree, const float* w, const float* piece, const float* feedback,
    const float* inverse, const float* metric, const float* weights, float* delta, uint16_t* found, uint8_t* signs, uint16_t* choices,
    const float* scales, const float* factors, const int* book_of, const uint16_t* near, const float* multiples, float size, float spread,
    int rows, int matrix_rows, int n, int first, int width, int books, int positive, int negative, int trials) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  constexpr int PER_GROUP = GROUP / DIM;
  const int64_t matrix = row / matrix_rows;
  feedback += matrix * n * n;
  inverse += matrix * n * DIM;
  metric += matrix * n * DIM;
  weights += matrix * n;
  float* t = values[warp];
  TreeWords& now = all[warp];
  for (int k = lane; k < width; k += 32) t[k] = piece[int64_t(row) * width + k];
  __syncwarp();
  const float d = scales[row];
  for (int at = 0; at < width; at += GROUP) {
    const int column = first + at;
    const int64_t group = int64_t(row) * (n / GROUP) + column / GROUP;
    const float* weight = w + int64_t(row) * n + column;
    const float* a = feedback + int64_t(column) * n + column;
    int count = 0, pick = choices[group];
    if (d != 0.0f) {
      const float guess = guessed_scale(t + at, weights + column, size) / size_of(d);
      for (int side = 0; side < 2; ++side) {
        const int own = side ? negative : positive;
        if (!own) continue;
        float chosen[MOST_TRIALS];
        choose_trials(multiples + (side ? positive : 0), own, guess, trials, spread, chosen);
        for (int book = 0; book < books; ++book)
          for (int j = 0; j < trials; ++j) {
            const int multiple = side ? -int(chosen[j]) : int(chosen[j]);
            if (lane == 0) now.picks[count] = near[book * 256 + multiple + 128];
            ++count;
          }
      }
    }
    if (lane < PER_GROUP) now.trial[lane] = -1;
    __syncwarp();
    float least = bits_as_float(0x7F800000u);
    for (int turn = 0; turn < count; ++turn) {
      const int choice = now.picks[turn], book = book_of[choice];
      const float scale = d * factors[choice];
      if (scale == 0.0f) continue;
      const bool same = turn > 0 && book_of[now.picks[turn - 1]] == book;
      float total = 0.0f;
      __syncwarp();
      if (lane < GROUP) now.now[lane] = t[at + lane];
      for (int v = 0; v < PER_GROUP; ++v) {
        const int here = DIM * v, number = column / DIM + v;
        __syncwarp();
        set_target<DIM>(now, now.now + here, weight + here, inverse + number * DIM * DIM, lane);
        int place, bits;
        total += nearest_in_tree<DIM>(now, tree, metric + number * DIM * DIM, DIM, scale, book, same ? now.trial[v] : -1, lane, place, bits);
        if (lane == 0) {
          now.trial[v] = place;
          now.trial_signs[v] = bits;
        }
        if (!(total < least)) break;  // cannot win
        if (lane < DIM) now.rest[here + lane] = weight[here + lane] - now.made[lane];
        __syncwarp();
        feed_back(now.now, now.rest + here, DIM, a + int64_t(here) * n, n, here + DIM, GROUP, lane);
      }
      __syncwarp();
      if (total < least) {
        least = total;
        pick = choice;
        now.best_rest[lane] = now.rest[lane];
        if (lane < PER_GROUP) {
          now.best[lane] = now.trial[lane];
          now.best_signs[lane] = now.trial_signs[lane];
        }
      }
    }
    if (least == bits_as_float(0x7F800000u)) {
      if (lane < PER_GROUP) now.best[lane] = now.best_signs[lane] = 0;
      now.best_rest[lane] = weight[lane];
    }
    __syncwarp();
    if (lane == 0) choices[group] = uint16_t(pick);
    if (lane < PER_GROUP) {
      found[int64_t(row) * (n / DIM) + column / DIM + lane] = uint16_t(now.best[lane]);
      signs[int64_t(row) * (n / DIM) + column / DIM + lane] = uint8_t(now.best_signs[lane]);
    }
    delta[int64_t(row) * width + at + lane] = now.best_rest[lane];
    feed_back(t, now.best_rest, GROUP, feedback + int64_t(column) * n + first, n, at + GROUP, width, lane);
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(256) round_trellis(
    const signed char* words, const float* leaf_boxes, const float* node_boxes, const float* w, const float* piece, const float* feedback,
    const float* inverse, const float* metric, const float* weights, float* delta, uint16_t* found, uint8_t* signs, uint16_t* choices,
    const float* scales, const float* factors, const int* book_of, const uint16_t* near, const float* multiples, const float* numbers,
    int rows, int matrix_rows, int n, int first, int width, int nodes, int magnitudes, int books, int positive, int negative, int trials,
    int dim) {
  __shared__ float values[WARPS][MOST_COLUMNS];
  __shared__ TreeWords all[WARPS];
  const Tree tree = {words, leaf_boxes, node_boxes, nodes, magnitudes, numbers[0]};
  if (dim == 8)
    round_rows<8>(values, all, tree, w, piece, feedback, inverse, metric, weights, delta, found, signs, choices, scales, factors, book_of,
                  near, multiples, numbers[1], numbers[2], rows, matrix_rows, n, first, width, books, positive, negative, trials);
  else
    round_rows<4>(values, all, tree, w, piece, feedback, inverse, metric, weights, delta, found, signs, choices, scales, factors, book_of,
                  near, multiples, numbers[1], numbers[2], rows, matrix_rows, n, first, width, books, positive, negative, trials);
}

// The value of a column, as the decoder makes it: (d * multiple) * entry, then times `product`. Without the scale of the row
// if `scales` is null. leaves: of a book.
__device__ inline float value_of_trellis(
    const signed char* words, const float* scales, const float* multiple_of, const int* book_of, const uint16_t* found, const uint8_t* signs,
    const uint16_t* choices, float product, int64_t row, int column, int n, int leaves, int magnitudes, int dim) {
  const int choice = choices[row * (n / GROUP) + column / GROUP], i = column % dim;
  const int64_t at = row * (n / dim) + column / dim;
  const int place = found[at];
  const float entry = float(words[(int64_t(book_of[choice]) * leaves + place / LEAF) * LEAF * dim + LEAF * i + place % LEAF]);
  const float scale = scales ? scales[row] * multiple_of[choice] : multiple_of[choice];
  float value = scale * entry;
  if (magnitudes && (signs[at] >> i & 1)) value = -value;
  return product == 1.0f ? value : value * product;
}

// What is left of w: w minus the value of each element; or, without w, what the scale is multiplied by.
extern "C" __global__ void __launch_bounds__(256) errors_of_trellis(
    const signed char* words, const float* w, float* out, const uint16_t* found, const uint8_t* signs, const uint16_t* choices,
    const float* scales, const float* multiple_of, const int* book_of, const float* numbers, int64_t rows, int n, int leaves,
    int magnitudes, int dim) {
  const int64_t total = rows * n;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const float value = value_of_trellis(words, w ? scales : nullptr, multiple_of, book_of, found, signs, choices, numbers[3], i / n,
                                         int(i % n), n, leaves, magnitudes, dim);
    out[i] = w ? w[i] - value : value;
  }
}

// Move single words of the columns from `first` as long as the error falls; see descend_words.
template <int DIM>
__device__ inline void descend_rows(
    float (*gradients)[MOST_COLUMNS], TreeWords* all, const Tree& tree, const float* h, float* g, const float* inverse, float* steps,
    uint16_t* found, uint8_t* signs, const uint16_t* choices, const float* scales, const float* factors, const float* multiple_of,
    const int* book_of, float product, int rows, int matrix_rows, int n, int first, int width) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows, begin = int64_t(row) * n + first;
  h += matrix * n * n;
  inverse += matrix * n * DIM;
  float* gradient = gradients[warp];
  TreeWords& now = all[warp];
  const float d = scales[row];
  for (int k = lane; k < width; k += 32) gradient[k] = g[begin + k];
  for (int start = 0; start < width; start += DIM) {
    const int column = first + start;
    const int64_t number = column / DIM, at = int64_t(row) * (n / DIM) + number;
    const float* along = h + int64_t(column) * n + first;
    const int choice = choices[int64_t(row) * (n / GROUP) + column / GROUP];
    const float scale = d * factors[choice];
    __syncwarp();
    if (scale == 0.0f) {
      if (lane < DIM) steps[int64_t(row) * width + start + lane] = 0.0f;
      continue;
    }
    float old = 0.0f;
    if (lane < DIM) {
      old = value_of_trellis(tree.words, scales, multiple_of, book_of, found, signs, choices, product, row, column + lane, n,
                             tree.nodes * FAN, tree.magnitudes, DIM);
      float total = 0.0f;
      for (int j = 0; j < DIM; ++j) total += gradient[start + j] * inverse[(number * DIM + j) * DIM + lane];
      now.target[lane] = old + total;
    }
    int place, bits;
    nearest_in_tree<DIM>(now, tree, along + start, n, scale, book_of[choice], found[at], lane, place, bits);
    if (!move_if_better<DIM>(now.made, old, true, gradient, along, n, start, width, steps + int64_t(row) * width, lane)) continue;
    if (lane == 0) {
      found[at] = uint16_t(place);
      signs[at] = uint8_t(bits);
    }
  }
  __syncwarp();
  for (int k = lane; k < width; k += 32) g[begin + k] = gradient[k];
}

extern "C" __global__ void __launch_bounds__(256) descend_trellis(
    const signed char* words, const float* leaf_boxes, const float* node_boxes, const float* h, float* g, const float* inverse, float* steps,
    uint16_t* found, uint8_t* signs, const uint16_t* choices, const float* scales, const float* factors, const float* multiple_of,
    const int* book_of, const float* numbers, int rows, int matrix_rows, int n, int first, int width, int nodes, int magnitudes, int dim) {
  __shared__ float gradients[WARPS][MOST_COLUMNS];
  __shared__ TreeWords all[WARPS];
  const Tree tree = {words, leaf_boxes, node_boxes, nodes, magnitudes, numbers[0]};
  if (dim == 8)
    descend_rows<8>(gradients, all, tree, h, g, inverse, steps, found, signs, choices, scales, factors, multiple_of, book_of, numbers[3],
                    rows, matrix_rows, n, first, width);
  else
    descend_rows<4>(gradients, all, tree, h, g, inverse, steps, found, signs, choices, scales, factors, multiple_of, book_of, numbers[3],
                    rows, matrix_rows, n, first, width);
}

// Write words, signs, choices and scales into the bytes of rows: a float32, then blocks. fields: int[8 * block_bytes], what each
// bit is of: word * 16 + bit of an index, 65536 + group * 16 + bit of a choice, 131072 + word * 8 + bit of signs, or -1.
// index_of: int[books, places].
extern "C" __global__ void __launch_bounds__(256) write_trellis(
    uint8_t* out, const uint16_t* found, const uint8_t* signs, const uint16_t* choices, const float* scales, const int* index_of,
    const int* book_of, const int* fields, int64_t rows, int n, int block_bytes, int blocks, int block_size, int places, int dim) {
  const int64_t row_bytes = 4 + int64_t(blocks) * block_bytes, total = rows * row_bytes;
  const int per_block = block_size / dim, groups = block_size / GROUP;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / row_bytes;
    int at = int(i % row_bytes), made = 0;
    if (at < 4) {
      out[i] = uint8_t(float_as_bits(scales[row]) >> 8 * at & 255);
      continue;
    }
    const int block = (at - 4) / block_bytes;
    at = (at - 4) % block_bytes;
    for (int bit = 0; bit < 8; ++bit) {
      const int field = fields[8 * at + bit];
      if (field < 0) continue;
      int value;
      if (field < 65536) {
        const int word = field >> 4, choice = choices[(row * blocks + block) * groups + word * dim / GROUP];
        value = index_of[book_of[choice] * places + found[(row * blocks + block) * per_block + word]] >> (field & 15);
      } else if (field < 131072) {
        value = choices[(row * blocks + block) * groups + (field - 65536 >> 4)] >> (field & 15);
      } else {
        value = signs[(row * blocks + block) * per_block + (field - 131072 >> 3)] >> (field & 7);
      }
      made |= (value & 1) << bit;
    }
    out[i] = uint8_t(made);
  }
}
