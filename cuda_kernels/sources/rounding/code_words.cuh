// Words of IQ4_KSS, whose elements are codes of four bits with an even number of ones together.
#pragma once

// B and W of m = B diag(W) B^T, B upper with ones on its diagonal; m float[4, 4].
__device__ inline void split_metric(const float* m, int64_t stride, float (&b)[4][4], float (&weight)[4]) {
#pragma unroll
  for (int k = 3; k >= 0; --k) {
    float own = m[k * stride + k];
#pragma unroll
    for (int l = k + 1; l < 4; ++l) own -= b[k][l] * b[k][l] * weight[l];
    weight[k] = own;
#pragma unroll
    for (int j = 0; j < k; ++j) {
      float total = m[j * stride + k];
#pragma unroll
      for (int l = k + 1; l < 4; ++l) total -= b[j][l] * b[k][l] * weight[l];
      b[j][k] = total / own;
    }
  }
}

// Codes of a word whose elements are chosen one after another, four bits each, and their parity at bit 16. flipped: the
// element that takes the nearest code of the parity that its nearest code does not have; the last one then makes the parity
// even. 4 for none.
__device__ inline int codes_in_turn(
    const float (&x)[4], float scale, const float* values, int flipped, const float (&b)[4][4], const float (&weight)[4], float& error) {
  int codes = 0, parity = 0;
  float off[4];
  error = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float target = x[k];
#pragma unroll
    for (int j = 0; j < k; ++j) target += off[j] * b[j][k];
    int even_code = 0, odd_code = 0;
    float even_least = bits_as_float(0x7F800000u), odd_least = even_least;
    for (int c = 0; c < CODES; ++c) {
      const float rest = size_of(target - scale * values[c]);
      const int ones = c ^ c >> 2;
      if ((ones ^ ones >> 1) & 1) {
        if (rest < odd_least) {
          odd_least = rest;
          odd_code = c;
        }
      } else if (rest < even_least) {
        even_least = rest;
        even_code = c;
      }
    }
    int odd = even_least <= odd_least ? 0 : 1;
    if (k == flipped) odd = 1 - odd;
    if (flipped < 4 && k == 3) odd = parity;
    parity ^= odd;
    const int code = odd ? odd_code : even_code;
    const float rest = odd ? odd_least : even_least;
    codes |= code << 4 * k;
    off[k] = x[k] - scale * values[code];
    error += weight[k] * (rest * rest);
  }
  return codes | parity << 16;
}

// Codes of about the best word with an even number of ones.
__device__ inline int nearest_even(
    const float (&x)[4], float scale, const float* values, const float (&b)[4][4], const float (&weight)[4], float& error) {
  int codes = codes_in_turn(x, scale, values, 4, b, weight, error);
  if (!(codes >> 16)) return codes;
  codes &= 65535;
  float least = bits_as_float(0x7F800000u);
  for (int flipped = 0; flipped < 4; ++flipped) {
    float one;
    const int made = codes_in_turn(x, scale, values, flipped, b, weight, one) & 65535;
    if (one < least) {
      codes = made;
      least = one;
    }
  }
  error = least;
  return codes;
}

// round_words for IQ4_KSS: each lane tries a scale of the group, of which there are at most 32.
extern "C" __global__ void __launch_bounds__(256) round_codes_of_words(
    const float* w, const float* piece, const float* feedback, const float* inverse, const float* metric, float* delta,
    uint16_t* found, uint16_t* choices, const float* scales, const float* factors, const int* book_of, const uint16_t* near,
    const float* books, int rows, int matrix_rows, int n, int first, int width, int owners, int owner, int groups, int count,
    int n_near, int dim) {
  constexpr int GROUP = 32;
  __shared__ float values[WARPS][MOST_COLUMNS];
  __shared__ float all_rests[WARPS][GROUP];
  __shared__ float levels[2 * CODES];
  for (int i = threadIdx.x; i < 2 * CODES; i += 256) levels[i] = books[i];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows;
  feedback += matrix * n * n;
  inverse += matrix * n * 4;
  metric += matrix * n * 4;
  float *t = values[warp], *rests = all_rests[warp];
  for (int k = lane; k < width; k += 32) t[k] = piece[int64_t(row) * width + k];
  __syncwarp();
  const float d = scales[int64_t(row) * owners + owner];
  for (int g = 0; g < groups; ++g) {
    const int at = g * GROUP, column = first + at;
    const int64_t place = int64_t(row) * (n / GROUP) + column / GROUP;
    const float* weight = w + int64_t(row) * n + column;
    const float* a = feedback + int64_t(column) * n + column;
    const int start = choices[place], choice = near[start * n_near + (lane < n_near ? lane : 0)];
    const float scale = d * factors[choice];
    const float* level = levels + book_of[choice] * CODES;
    float now[GROUP], total = 0.0f;
    int words[GROUP / 4];
#pragma unroll
    for (int k = 0; k < GROUP; ++k) now[k] = t[at + k];
#pragma unroll
    for (int v = 0; v < GROUP / 4; ++v) {
      const int number = column / 4 + v;
      float target[4], b[4][4], own[4], error;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float moved = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) moved += (now[4 * v + j] - weight[4 * v + j]) * inverse[(number * 4 + j) * 4 + i];
        target[i] = weight[4 * v + i] + moved;
      }
      split_metric(metric + number * 16, 4, b, own);
      words[v] = nearest_even(target, scale, level, b, own, error);
      total += error;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float off = weight[4 * v + i] - scale * level[words[v] >> 4 * i & 15];
        now[4 * v + i] = off;  // what is left, from here on
#pragma unroll
        for (int k = 4 * v + 4; k < GROUP; ++k) now[k] += off * a[int64_t(4 * v + i) * n + k];
      }
    }
    float least = lane < n_near && scale != 0.0f && d != 0.0f && total == total ? total : bits_as_float(0x7F800000u);
    int winner = lane;
    least_of_warp(least, winner);
    const bool none = least == bits_as_float(0x7F800000u);
    if (lane == winner) {
      if (!none) choices[place] = uint16_t(choice);
#pragma unroll
      for (int v = 0; v < GROUP / 4; ++v) found[int64_t(row) * (n / 4) + column / 4 + v] = uint16_t(none ? 0 : words[v]);
#pragma unroll
      for (int k = 0; k < GROUP; ++k) {
        const float off = none ? weight[k] : now[k];
        rests[k] = off;
        delta[int64_t(row) * width + at + k] = off;
      }
    }
    __syncwarp();
    feed_back(t, rests, GROUP, feedback + int64_t(column) * n + first, n, at + GROUP, width, lane);
    __syncwarp();
  }
}
