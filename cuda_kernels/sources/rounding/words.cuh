// What kernels that choose several columns at once share: words of tables, words of trellises, and vectors.
#pragma once

#include "rounding/common.cuh"

// Set now.target to the weights of a word, moved by earlier errors. values: the weights plus these errors;
// inverse: float[DIM, DIM].
template <int DIM, class Now>
__device__ inline void set_target(Now& now, const float* values, const float* weight, const float* inverse, int lane) {
  if (lane >= DIM) return;
  float moved = 0.0f;
  for (int j = 0; j < DIM; ++j) moved += (values[j] - weight[j]) * inverse[j * DIM + lane];
  now.target[lane] = weight[lane] + moved;
}

// Set the metric of a word, with doubled entries below the diagonal, and twice the metric times now.t. Return the energy of
// now.t. entry(i, j) returns an entry of the metric.
template <int DIM, class Now, class Entry>
__device__ inline float set_metric(Now& now, int lane, Entry entry, float (&metric)[DIM][DIM], float (&twice)[DIM]) {
  if (lane < DIM) {
    float total = 0.0f;
    for (int j = 0; j < DIM; ++j) {
      const float one = entry(lane, j);
      total += one * now.t[j];
      now.metric[DIM * lane + j] = lane == j ? one : one + one;
    }
    now.twice[lane] = total + total;
    now.part[lane] = total * now.t[lane];
  }
  __syncwarp();
  float energy = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM; ++i) {
    energy += now.part[i];
    twice[i] = now.twice[i];
#pragma unroll
    for (int j = 0; j <= i; ++j) metric[i][j] = now.metric[DIM * i + j];
  }
  return energy;
}

// The error of word v minus the energy of its target.
template <int DIM>
__device__ inline float score_of_word(const float (&v)[DIM], const float (&metric)[DIM][DIM], const float (&twice)[DIM]) {
  float score = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM; ++i) {
    float inner = metric[i][i] * v[i] - twice[i];
#pragma unroll
    for (int j = 0; j < i; ++j) inner += metric[i][j] * v[j];
    score += inner * v[i];
  }
  return score;
}

// Add `count` errors times their rows of feedback, of n numbers, to the values from `begin` to `end`.
__device__ inline void feed_back(
    float* values, const float* errors, int count, const float* feedback, int64_t n, int begin, int end, int lane) {
  for (int k = begin + lane; k < end; k += 32) {
    float value = values[k];
    for (int i = 0; i < count; ++i) value += errors[i] * feedback[i * n + k];
    values[k] = value;
  }
}

// Move the columns from `start` to `made` if `possible` and the error falls, and return whether they moved. old: the value of
// each lane's column; along: the columns' rows of the moments, n numbers each; steps: by how much values fell.
template <int DIM>
__device__ inline bool move_if_better(
    const float* made, float old, bool possible, float* gradient, const float* along, int64_t n, int start, int width, float* steps,
    int lane) {
  double change = 0.0;
  float moved[DIM];
#pragma unroll
  for (int i = 0; i < DIM; ++i) moved[i] = __shfl_sync(~0u, old, i);
#pragma unroll
  for (int i = 0; i < DIM; ++i) {
    const double step = double(made[i]) - double(moved[i]);
    change -= 2.0 * step * double(gradient[start + i]);
#pragma unroll
    for (int j = 0; j < DIM; ++j) {
      const double other = double(made[j]) - double(moved[j]);
      change += step * other * double(along[i * n + start + j]);
    }
  }
  const bool better = possible && !(change >= 0.0);
  __syncwarp();
  if (lane < DIM) steps[start + lane] = better ? -(made[lane] - old) : 0.0f;
  if (!better) return false;
#pragma unroll
  for (int i = 0; i < DIM; ++i) moved[i] = made[i] - moved[i];
  for (int k = lane; k < width; k += 32) {
    float value = gradient[k];
#pragma unroll
    for (int i = 0; i < DIM; ++i) value -= moved[i] * along[i * n + k];
    gradient[k] = value;
  }
  return true;
}
