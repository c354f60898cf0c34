// Error feedback, descent and refitting for types with a code per element, a block of columns at a time. Rows may be of
// several matrices, `matrix_rows` of each, with feedback, moments and weights of their own one after another.
#include "rounding/common.cuh"

// Columns from `first` of t, side by side.
extern "C" __global__ void __launch_bounds__(256) gather_columns(const float* t, float* piece, int64_t rows, int n, int first, int width) {
  const int64_t total = rows * width;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256))
    piece[i] = t[i / width * n + first + i % width];
}

// Scales and choices of one block of every row, as the search left them, whose bytes are copied to `bodies`.
// choice_bits: short[groups, bits]. half: a scale is a half (1), a float (0), or the half of IQ1_M (2), whose nibbles are at
// the top of bytes 49, 51, 53 and 55.
extern "C" __global__ void __launch_bounds__(256) read_block(
    const uint8_t* pieces, const uint8_t* heads, uint8_t* bodies, float* scales, uint16_t* choices, const short* choice_bits,
    int rows, int block_bytes, int header_bytes, int blocks, int number, int groups, int n_bits, int n_scales, int half,
    int offset0, int offset1) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  uint8_t* body = bodies + (int64_t(row) * blocks + number) * block_bytes;
  const uint8_t* piece = pieces ? pieces + int64_t(row) * block_bytes : body;
  if (pieces)
    for (int i = lane; i < block_bytes; i += 32) body[i] = piece[i];
  for (int g = lane; g < groups; g += 32) {
    int found = 0;
    for (int b = 0; b < n_bits; ++b) {
      const int at = choice_bits[g * n_bits + b];
      found |= (piece[at >> 3] >> (at & 7) & 1) << b;
    }
    choices[(int64_t(row) * blocks + number) * groups + g] = uint16_t(found);
  }
  if (lane < n_scales && (!header_bytes || number == 0)) {
    const uint8_t* from = header_bytes ? heads + int64_t(row) * header_bytes : piece;
    from += lane ? offset1 : offset0;
    const uint32_t low = from[0] | uint32_t(from[1]) << 8;
    uint32_t nibbles = 0;
    if (half == 2)
      for (int i = 0; i < 4; ++i) nibbles |= uint32_t(piece[49 + 2 * i] >> 4) << 4 * i;
    const float value = half ? value_of_half(half == 2 ? nibbles : low) : bits_as_float(low | uint32_t(from[2]) << 16 | uint32_t(from[3]) << 24);
    scales[(int64_t(row) * (header_bytes ? 1 : blocks) + number) * n_scales + lane] = value;
  }
}

// Codes of the columns from `first` (one block), with the errors of each fed back to those after it.
// piece, delta: float[rows, width]; near: u16[choices, n_near], the choices that are tried after each, 0 of them for
// types without a choice.
extern "C" __global__ void __launch_bounds__(256) round_columns(
    const float* w, const float* piece, const float* feedback, const float* weights, float* delta, uint8_t* codes, uint16_t* choices,
    const float* scales, const float* factors, const float* shifts, const uint8_t* patterns, const float* all_levels,
    const uint16_t* near, int rows, int matrix_rows, int n, int first, int width, int owners, int owner, int n_scales, int groups,
    int n_choices, int n_codes, int n_levels, int ordered, int n_near) {
  __shared__ float levels[MOST_LEVELS];
  __shared__ float values[WARPS][MOST_COLUMNS];
  for (int i = threadIdx.x; i < n_levels; i += 256) levels[i] = all_levels[i];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  const int64_t matrix = row / matrix_rows;
  feedback += matrix * n * n;
  weights += matrix * n;
  float* t = values[warp];
  for (int k = lane; k < width; k += 32) t[k] = piece[int64_t(row) * width + k];
  __syncwarp();
  const int group = width / groups;
  const float* own = scales + (int64_t(row) * owners + owner) * n_scales;
  const float d = n_scales > 0 ? own[0] : 1.0f, second = n_scales > 1 ? own[1] : 0.0f;
  const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
  for (int g = 0; g < groups; ++g) {
    const int64_t at = int64_t(row) * (n / group) + first / group + g;
    const int start = choices[at];
    int best = start;
    if (n_near) {
      float least = bits_as_float(0x7F800000u);
      int turn_of_least = 0x7FFFFFFF;
      for (int turn = lane; turn < n_near; turn += 32) {
        const int choice = near[start * n_near + turn], of = g * n_choices + choice;
        const float factor = factors[of], shift = second * shifts[of];
        const float* level = levels + patterns[of] * n_codes;
        float total = 0.0f;
        for (int i = g * group; i < (g + 1) * group; ++i) {
          const float value = t[i] - shift;
          const int code = nearest_code(value * inverse, n_codes, ordered, [&](int c) { return factor * level[c]; });
          const float rest = value - d * (factor * level[code]);
          total += weights[first + i] * (rest * rest);
        }
        if (total < least) {
          least = total;
          turn_of_least = turn;
        }
      }
      least_of_warp(least, turn_of_least);
      if (turn_of_least != 0x7FFFFFFF) best = near[start * n_near + turn_of_least];
      __syncwarp();  // all lanes have read the choice, and the values that will change
      if (lane == 0) choices[at] = uint16_t(best);
    }
    const int of = g * n_choices + best;
    const float factor = factors[of], shift = second * shifts[of], scaled = d * factor;
    const float* level = levels + patterns[of] * n_codes;
    for (int i = g * group; i < (g + 1) * group; ++i) {
      const int column = first + i;
      int code;
      float made;
      if (n_near) {
        code = nearest_code((t[i] - shift) * inverse, n_codes, ordered, [&](int c) { return factor * level[c]; });
        made = shift + d * (factor * level[code]);
      } else {
        const auto value = [&](int c) { return n_scales > 1 ? scaled * level[c] + shift : scaled * level[c]; };
        code = nearest_code(t[i], n_codes, ordered, value);
        made = value(code);
      }
      const float rest = w[int64_t(row) * n + column] - made;
      if (lane == 0) {
        codes[int64_t(row) * n + column] = uint8_t(code);
        delta[int64_t(row) * width + i] = rest;
      }
      const float* a = feedback + int64_t(column) * n + first;
      for (int k = (i + 1) / 32 * 32 + lane; k < width; k += 32)
        if (k > i) t[k] += rest * a[k];
      __syncwarp();
    }
  }
}

// What is left of w: w minus the value of each code.
extern "C" __global__ void __launch_bounds__(256) errors_of_codes(
    const float* w, float* rest, const uint8_t* codes, const uint16_t* choices, const float* scales, const float* factors,
    const float* shifts, const uint8_t* patterns, const float* levels, int64_t rows, int n, int owner_width, int n_scales,
    int group, int groups, int n_choices, int n_codes) {
  const int64_t total = rows * n;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / n;
    const int column = int(i % n), number = column / group;
    const float* own = scales + (row * (n / owner_width) + column / owner_width) * n_scales;
    const int of = number % groups * n_choices + choices[row * (n / group) + number];
    const float d = n_scales > 0 ? own[0] : 1.0f;
    float value = (d * factors[of]) * levels[patterns[of] * n_codes + codes[i]];
    if (n_scales > 1) value += own[1] * shifts[of];
    rest[i] = w[i] - value;
  }
}

// Move single codes of the columns from `first` as long as the error falls. g: float[rows, n], what is left times
// the moments, kept up for these columns; steps: float[rows, width], how much values fell, for the other columns.
extern "C" __global__ void __launch_bounds__(256) descend_columns(
    const float* h, float* g, float* steps, uint8_t* codes, const uint16_t* choices, const float* scales, const float* factors,
    const float* shifts, const uint8_t* patterns, const float* all_levels, int rows, int matrix_rows, int n, int first, int width,
    int owner_width, int n_scales, int group, int groups, int n_choices, int n_codes, int n_levels, int ordered) {
  __shared__ float levels[MOST_LEVELS];
  __shared__ float values[WARPS][MOST_CODES];
  __shared__ float gradients[WARPS][MOST_COLUMNS];
  __shared__ uint8_t kept[WARPS][MOST_COLUMNS];
  for (int i = threadIdx.x; i < n_levels; i += 256) levels[i] = all_levels[i];
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row >= rows) return;
  h += int64_t(row / matrix_rows) * n * n;
  float *value = values[warp], *gradient = gradients[warp];
  const int64_t begin = int64_t(row) * n + first;
  for (int k = lane; k < width; k += 32) {
    gradient[k] = g[begin + k];
    kept[warp][k] = codes[begin + k];
  }
  for (int i = 0; i < width; ++i) {
    const int column = first + i;
    if (column % group == 0) {
      const int number = column / group;
      const float* own = scales + (int64_t(row) * (n / owner_width) + column / owner_width) * n_scales;
      const int of = number % groups * n_choices + choices[int64_t(row) * (n / group) + number];
      const float d = n_scales > 0 ? own[0] : 1.0f, scaled = d * factors[of];
      const float shift = n_scales > 1 ? own[1] * shifts[of] : 0.0f;
      __syncwarp();
      for (int c = lane; c < n_codes; c += 32) {
        const float product = scaled * levels[patterns[of] * n_codes + c];
        value[c] = n_scales > 1 ? product + shift : product;
      }
    }
    __syncwarp();
    const float* along = h + int64_t(column) * n + first;
    const float old = value[kept[warp][i]], target = old + gradient[i] / along[i];
    const int code = nearest_code(target, n_codes, ordered, [&](int c) { return value[c]; });
    const float made = value[code];
    const bool better = size_of(target - made) < size_of(target - old);
    __syncwarp();
    if (better) {
      const float step = made - old;
      for (int k = lane; k < width; k += 32) gradient[k] -= step * along[k];
      if (lane == 0) {
        codes[begin + i] = uint8_t(code);
        steps[int64_t(row) * width + i] = -step;
      }
    } else if (lane == 0) {
      steps[int64_t(row) * width + i] = 0.0f;
    }
  }
  __syncwarp();
  for (int k = lane; k < width; k += 32) g[begin + k] = gradient[k];
}

// What scale number `which` of the columns from `first` is multiplied by in each element: float[rows, width].
extern "C" __global__ void __launch_bounds__(256) units_of_scale(
    float* units, const uint8_t* codes, const uint16_t* choices, const float* factors, const float* shifts, const uint8_t* patterns,
    const float* levels, int64_t rows, int n, int first, int width, int which, int group, int groups, int n_choices, int n_codes) {
  const int64_t total = rows * width;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / width;
    const int column = first + int(i % width), number = column / group;
    const int of = number % groups * n_choices + choices[row * (n / group) + number];
    units[i] = which ? shifts[of] : factors[of] * levels[patterns[of] * n_codes + codes[row * n + column]];
  }
}

// Move scale number `which` of the columns from `first` to its best value as it is stored. along: float[rows, n], units
// times the moments; moved: float[rows], how far the scale went.
extern "C" __global__ void __launch_bounds__(128) refit_scale(
    const float* units, const float* along, const float* g, float* scales, float* moved, int rows, int n, int first, int width,
    int owners, int owner, int n_scales, int which, int half) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= rows) return;
  double slope = 0.0, curvature = 0.0;
  for (int i = 0; i < width; ++i) {
    const double unit = units[int64_t(row) * width + i];
    slope += unit * double(g[int64_t(row) * n + first + i]);
    curvature += unit * double(along[int64_t(row) * n + first + i]);
  }
  float* at = scales + (int64_t(row) * owners + owner) * n_scales + which;
  const float old = *at;
  moved[row] = 0.0f;
  if (curvature <= 0.0) return;
  float made = float(double(old) + slope / curvature);
  if (half) made = nearest_half(made);
  if (made * old <= 0.0f) return;  // no scale changes its sign
  const double step = double(made) - double(old);
  if (step * (step * curvature - 2.0 * slope) >= 0.0) return;
  *at = made;
  moved[row] = float(step);
}

extern "C" __global__ void __launch_bounds__(256) follow_scale(float* g, const float* along, const float* moved, int64_t rows, int n) {
  const int64_t total = rows * n;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const float by = moved[i / n];
    if (by != 0.0f) g[i] -= by * along[i];
  }
}

// Write codes, choices and scales into the bytes of rows: header, blocks. fields: int[8 * block_bytes], what each bit is
// of: element * 8 + bit of a code, 65536 + group * 16 + bit of a choice, or -1.
extern "C" __global__ void __launch_bounds__(256) write_rows(
    uint8_t* out, const uint8_t* heads, const uint8_t* bodies, const uint8_t* codes, const uint16_t* choices, const float* scales,
    const int* fields, int64_t rows, int n, int block_bytes, int header_bytes, int blocks, int size, int groups, int n_scales,
    int half, int offset0, int offset1) {
  const int64_t row_bytes = header_bytes + int64_t(blocks) * block_bytes, total = rows * row_bytes;
  for (int64_t i = blockIdx.x * int64_t(256) + threadIdx.x; i < total; i += gridDim.x * int64_t(256)) {
    const int64_t row = i / row_bytes;
    int at = int(i % row_bytes), owner = 0;
    const bool head = at < header_bytes;
    int made;
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
        const int value = field < 65536 ? codes[row * n + block * size + (field >> 3)] >> (field & 7) & 1
                                        : choices[(row * blocks + block) * groups + (field - 65536 >> 4)] >> (field & 15) & 1;
        made = (made & ~(1 << bit)) | value << bit;
      }
    }
    if (head == (header_bytes > 0))
      for (int s = 0; s < n_scales; ++s) {
        const int offset = s ? offset1 : offset0;
        if (at < offset || at >= offset + (half ? 2 : 4)) continue;
        const float scale = scales[(row * (header_bytes ? 1 : blocks) + owner) * n_scales + s];
        made = (half ? bits_of_half(scale) : float_as_bits(scale)) >> 8 * (at - offset) & 255;
      }
    out[i] = uint8_t(made);
  }
}
