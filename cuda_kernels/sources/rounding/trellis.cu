// Error feedback and descent for types whose words come from a generator: as quantize/rounding/kernels/words.py does with
// the codebook arranged as a tree (quantize/search/trellis/tree.py), to the last bit. Rows may be of several matrices,
// `matrix_rows` of each, with feedback, moments, metrics, inverses and weights of their own one after another.
#include "rounding/words.cuh"

constexpr int TREE_DIM = 8, GROUP = 32;
constexpr int LEAF = 64, FAN = 16, MOST_NODES = 64;
constexpr int MOST_TRIALS = 8, MOST_PICKS = 32;
constexpr float RIGID = 0.5f, MARGIN = 1e-5f, SMALLEST = 1e-6f;

// A type: its codebooks, and how the scales of a group are tried.
struct Tree {
  const signed char* words;  // [books, leaves, dim * LEAF]
  const float* leaf_boxes;   // [books, nodes, 2 * dim * FAN]
  const float* node_boxes;   // [books, 2 * dim * nodes]
  int nodes, magnitudes;
  float reach;
};

// What a warp knows of the word and the group that it chooses.
struct TreeWords {
  float target[TREE_DIM], t[TREE_DIM], sign[TREE_DIM], twice[TREE_DIM], part[TREE_DIM], metric[TREE_DIM * TREE_DIM], made[TREE_DIM];
  float node[MOST_NODES];
  float now[GROUP], rest[GROUP], best_rest[GROUP];
  int trial[TREE_DIM], best[TREE_DIM], trial_signs[TREE_DIM], best_signs[TREE_DIM];
  int picks[MOST_PICKS];
};

__device__ inline float misfit(float ratio) {
  const float square = ratio + 1.0f / ratio - 2.0f;
  return ratio < 1.0f ? square + square : square;
}

__device__ inline float larger(float a, float b) { return a > b ? a : b; }
__device__ inline float smaller(float a, float b) { return a < b ? a : b; }

// The guessed scale of a group.
__device__ inline float guessed_scale(const float* x, const float* weights, float size) {
  float total = 0.0f, weight = 0.0f;
  for (int i = 0; i < GROUP; ++i) {
    const float root = sqrtf(weights[i]), square = x[i] * x[i];
    total += (root * square) * square;
    weight += root;
  }
  return larger(size * sqrtf(sqrtf(total / weight)), SMALLEST);
}

// The multiples around a guess, of `count` ascending ones; of all integers between the first and the last for a spread.
__device__ inline void choose_trials(const float* multiples, int count, float guess, int trials, float spread, float* out) {
  if (spread > 0.0f) {
    const float step = larger(floorf(spread * guess + 0.5f), 1.0f), last = multiples[count - 1];
    float first = floorf(guess + 0.5f) - step * float(trials / 2);
    first = larger(smaller(first, last - step * float(trials - 1)), multiples[0]);
    for (int j = 0; j < trials; ++j) out[j] = smaller(first + step * float(j), last);
    return;
  }
  int first = 0;
  for (int k = 1; k < count - trials + 1; ++k)
    if (misfit(multiples[k + trials - 1] / guess) < misfit(multiples[k - 1] / guess)) first = k;
  for (int j = 0; j < trials; ++j) out[j] = multiples[first + j];
}

// The score of word c of a leaf.
template <int DIM>
__device__ inline float score_of(const signed char* leaf, int c, const float (&metric)[DIM][DIM], const float (&twice)[DIM]) {
  float v[DIM];
#pragma unroll
  for (int i = 0; i < DIM; ++i) v[i] = float(leaf[LEAF * i + c]);
  return score_of_word<DIM>(v, metric, twice);
}

// The lower bound for the distance to box c of `count` boxes, boxes[2 * DIM, count].
template <int DIM>
__device__ inline float distance_to(const float* boxes, int count, int c, const TreeWords& now, const float (&metric)[DIM][DIM]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM; ++i) {
    const float below = boxes[count * i + c] - now.t[i], above = now.t[i] - boxes[count * (DIM + i) + c];
    const float gap = larger(larger(below, above), 0.0f);
    total += (metric[i][i] * gap) * gap;
  }
  return RIGID * total;
}

// The lane of the least value, the first of equal ones; lanes from `count` on do not count.
__device__ inline int lane_of_least(float value, int count, int lane) {
  int at = lane < count ? lane : 64;
  if (lane >= count) value = bits_as_float(0x7F800000u);
  least_of_warp(value, at);
  return at;
}

// The word near to now.target by the metric m[i * stride + j], from the word `start` on, or -1: its place in the tree. Sets
// now.made and signs, and returns the error.
template <int DIM>
__device__ inline float nearest_in_tree(
    TreeWords& now, const Tree& tree, const float* m, int64_t stride, float scale, int book, int start, int lane, int& place, int& signs) {
  __syncwarp();
  if (lane < DIM) {
    const float t = now.target[lane] * (1.0f / scale);
    now.sign[lane] = tree.magnitudes && t < 0.0f ? -1.0f : 1.0f;
    now.t[lane] = t * now.sign[lane];
  }
  __syncwarp();
  float metric[DIM][DIM], twice[DIM];
  const auto entry = [&](int i, int j) { return m[i * stride + j] * (now.sign[i] * now.sign[j]); };
  const float energy = set_metric<DIM>(now, lane, entry, metric, twice);
  const float margin = MARGIN * energy;
  const signed char* words = tree.words + int64_t(book) * tree.nodes * FAN * LEAF * DIM;
  const float* leaf_boxes = tree.leaf_boxes + int64_t(book) * tree.nodes * 2 * DIM * FAN;
  const float* node_boxes = tree.node_boxes + int64_t(book) * 2 * DIM * tree.nodes;
  for (int c = lane; c < tree.nodes; c += 32) now.node[c] = distance_to<DIM>(node_boxes, tree.nodes, c, now, metric);
  __syncwarp();
  float best = bits_as_float(0x7F800000u), limit = best;
  int found = start, first = 0, visited = -1;
  if (start >= 0) {
    best = score_of<DIM>(words + int64_t(start / LEAF) * LEAF * DIM, start % LEAF, metric, twice);
    limit = tree.reach * (energy + best) + margin;
  } else {
    first = -1;
  }
  for (int visit = first; visit < tree.nodes; ++visit) {
    int node = visit;
    if (visit < 0) {
      node = 0;
      for (int n = 1; n < tree.nodes; ++n)
        if (now.node[n] < now.node[node]) node = n;
    }
    if (!(now.node[node] < limit)) continue;
    const float bound = distance_to<DIM>(leaf_boxes + int64_t(node) * 2 * DIM * FAN, FAN, lane % FAN, now, metric);
    int low = 0, high = FAN;
    if (visit < 0) {
      low = lane_of_least(bound, FAN, lane);
      high = low + 1;
    }
    for (int child = low; child < high; ++child) {
      const int leaf = node * FAN + child;
      if (!(__shfl_sync(~0u, bound, child) < limit) || leaf == visited) continue;
      const signed char* own = words + int64_t(leaf) * LEAF * DIM;
      const float one = score_of<DIM>(own, lane, metric, twice), other = score_of<DIM>(own, lane + 32, metric, twice);
      const bool second = other < one;
      float least = second ? other : one;
      int at = second ? lane + 32 : lane;
      least_of_warp(least, at);
      if (least < best) {
        best = least;
        found = leaf * LEAF + at;
      }
      limit = tree.reach * (energy + best) + margin;
      if (visit < 0) visited = leaf;
    }
  }
  place = found;
  float q[DIM];
  signs = 0;
  if (found < 0) {  // nothing is near: not a number
    if (lane < DIM) now.made[lane] = 0.0f;
    __syncwarp();
    return bits_as_float(0x7F800000u);
  }
  const signed char* word = words + int64_t(found / LEAF) * LEAF * DIM + found % LEAF;
#pragma unroll
  for (int i = 0; i < DIM; ++i) q[i] = float(word[LEAF * i]);
  if (tree.magnitudes) {
    // Turn the signs that lower the error: v_i becomes -v_i.
#pragma unroll
    for (int i = 0; i < DIM; ++i) {
      float inner = -twice[i];
#pragma unroll
      for (int j = 0; j < DIM; ++j) {
        if (j < i) inner += metric[i][j] * q[j];
        else if (j > i) inner += metric[j][i] * q[j];
      }
      if (q[i] * inner > 0.0f) q[i] = -q[i];
    }
  }
#pragma unroll
  for (int i = 0; i < DIM; ++i) {
    q[i] = scale * (q[i] * now.sign[i]);
    if (tree.magnitudes && (q[i] < 0.0f) != (scale < 0.0f)) signs |= 1 << i;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < DIM; ++i)
    if (lane == i) now.made[i] = q[i];
  __syncwarp();
  const float error = energy + best;
  return (scale * scale) * (error > 0.0f ? error : 0.0f);
}

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
