// The search for words of a generator, in a codebook arranged as a tree.
#pragma once

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
