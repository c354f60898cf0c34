// Matrix-vector products for 1..8 rows of activations.
//
// Macros: TYPE, COLS, X_ROWS, WARPS, STEPS, STAGE_STEPS, STAGE_ROWS, SLOTS, ADVANCES (see feed.cuh), ROLLED (steps of a stage are a loop), MATRICES (1..3), BLOCKS (thread blocks per
// multiprocessor that the registers must suffice for), BF16_X and BF16_OUT (x of MATVEC_ADD and out of GATE_UP are bf16, not float32), and
// KIND:
// NORM_MATVEC  out = W norm(x), for up to three matrices; MATVEC_ADD  out += W x + bias (norm_weight, or null); GATE_UP  out = joined(G norm(x), U norm(x));
// GATE_BY  out = joined(out, W norm(x)); joined: see units/gating.cuh, with its macros.
// PLAIN: x is not normed. SETS: MATVEC_ADD is out = W x. JOINS: kinds with a norm first finish the branch before: see `take_joined_activations`.
// SCALED: products with a matrix are multiplied by its scale. PACED: see feed.cuh. LATE_BELOW: LATE holds where *position < below.
//
// A warp takes every (grid * WARPS)th item: R neighbouring rows, or a row of the gate with that of the up matrix. Grid and order of
// additions follow from shapes alone.
#include "matvec/feed.cuh"
#include "matvec/joined.cuh"
#include "units/gating.cuh"
#ifndef SETS
#define SETS 0
#endif
#ifndef JOINS
#define JOINS 0
#endif
#ifndef LATE_BELOW
#define LATE_BELOW 0
#endif
#ifndef SCALED
#define SCALED 0
#endif

typedef Format<TYPE> F;
typedef Activations<F> A;
constexpr bool NORM = KIND != 1 && !PLAIN, GATED = KIND == 2;

struct Matrix { const uint8_t* base; float* out; int rows, first, stored; };   // `rows` from row `first` of the `stored` ones on

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KERNEL(
    const float* x, const float* norm_weight, float eps, const uint8_t* base0, float* out0, int rows0, int first0, int stored0,
    const uint8_t* base1, float* out1, int rows1, int first1, int stored1,
    const uint8_t* base2, float* out2, int rows2, int first2, int stored2
#if JOINS
    , const float* delta, const float* post_weight, float post_eps, float scale, float* stream
#endif
#if SCALED
    , float scale0, float scale1, float scale2
#endif
#if LATE_BELOW
    , const int* position, int below
#endif
    ) {
#if LATE_BELOW
  if (__ldcg(position) >= below) allow_successor();   // a second time does nothing
#else
  if (!LATE) allow_successor();
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int items = GATED ? rows0 : (rows0 + rows1 + rows2) / R, stride = gridDim.x * WARPS, begin = first_item(warp);
  const uint32_t ring = Ring<F>::of_warp(warp, N * A::BYTES);

  auto matrix = [&](int item, int k) -> Matrix {   // and the row of it in `first`
    if (GATED) return k == 0 ? Matrix{base0, out0, rows0, first0 + item, stored0} : Matrix{base1, out1, rows1, first1 + item, stored1};
    int row = item * R + k;
    if (MATRICES == 1 || row < rows0) return {base0, out0 + row, rows0, first0 + row, stored0};
    row -= rows0;
    if (MATRICES == 2 || row < rows1) return {base1, out1 + row, rows1, first1 + row, stored1};
    row -= rows1;
    return {base2, out2 + row, rows2, first2 + row, stored2};
  };
  auto row = [&](int item, int k) -> Row {
    Matrix m = matrix(item, k);
    return {m.base, m.stored, m.first};
  };
  auto end = [&](int item) {
    if (GATED || MATRICES == 1) return items;
    return item * R < rows0 ? rows0 / R : MATRICES == 2 || item * R < rows0 + rows1 ? (rows0 + rows1) / R : items;
  };
  auto weights = feed<F>(items_of<GATED ? 1 : R>(row, end), begin, items, stride, lane, ring);
  const typename F::Lane constants(lane);
  prepare_unit<TYPE>();

  static __shared__ float squares[N][WARPS];
#if JOINS
  take_joined_activations<F, N>(x, norm_weight, {delta, post_weight, post_eps, scale, stream}, squares, shared_memory);
#else
  take_activations<F, N, NORM>(x, norm_weight, squares, shared_memory);
#endif
  __syncthreads();
  STAMP(INPUT_READY);
  float factor[N];

  const uint32_t words = shared_address(shared_memory) + 16 * lane, records = words + 16 * A::PARTS * A::GRANULES - (16 - A::RECORD) * lane;
  #pragma unroll 1
  for (int item = begin; item < items; item += stride) {
    float sum[R][N], before[R][N], by[R];
    uint32_t header[R];
    #pragma unroll
    for (int k = 0; k < R; k++) {
      if (F::ROW_FACTOR && !F::HEADER_STAGED) {
        Matrix m = matrix(item, k);
        header[k] = row_header_bits<F>(m.base, m.stored, m.first);
      }
      #pragma unroll
      for (int n = 0; n < N; n++) {
        sum[k][n] = 0;
        if ((KIND == 1 && !SETS) || KIND == 3) {
          Matrix m = matrix(item, k);
          if (lane == 0) before[k][n] = m.out[(int64_t)n * m.rows] + (KIND == 1 && norm_weight ? __ldg(norm_weight + m.first) : 0.0f);
        }
      }
    }
    #pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      weights.wait();
      if (item == begin && chunk == 0) STAMP(WEIGHTS_THERE);
      Stage stage[R];
      #pragma unroll
      for (int k = 0; k < R; k++) {
        const int row = matrix(item, k).first;
        stage[k] = Ring<F>::stage(weights.slot + k * Ring<F>::ROW, row, chunk);
        if (F::HEADER_STAGED && chunk == 0) by[k] = Ring<F>::row_factor(weights.slot + k * Ring<F>::ROW, row);
      }
      #pragma unroll (ROLLED ? 1 : P)
      for (int p = 0; p < P; p++) {
        if (!has_step(chunk, p)) break;
        typename F::Weights w[R];
        #pragma unroll
        for (int k = 0; k < R; k++) w[k] = F::prepare(F::load(stage[k], p, lane), constants, lane);
        #pragma unroll
        for (int n = 0; n < N; n++) {
          const uint32_t at = n * A::BYTES + chunk * (512 * P), record_at = n * A::BYTES + chunk * (32 * A::RECORD * P);
          const typename F::Input in = F::input(words + at, records + record_at, p);
          float v[R];
          products<F, R>(w, in, v);
          #pragma unroll
          for (int k = 0; k < R; k++) {
            if (COLS % (32 * F::G * STEPS)) v[k] = (chunk * P + p) * 32 + lane < COLS / F::G ? v[k] : 0;   // past a row's end there is arbitrary data
            sum[k][n] += v[k];
          }
        }
      }
      weights.next();
    }
    #pragma unroll
    for (int k = 0; k < R; k++)
      #pragma unroll
      for (int n = 0; n < N; n++) {
        if (F::ROW_FACTOR && !F::HEADER_STAGED) by[k] = F::row_factor(header[k]);
        sum[k][n] = F::ROW_FACTOR ? by[k] * warp_sum(sum[k][n]) : warp_sum(sum[k][n]);
      }
    if (NORM) {
      if (item == begin)
        #pragma unroll
        for (int n = 0; n < N; n++) factor[n] = norm_factor(squares[n], eps);
      #pragma unroll
      for (int k = 0; k < R; k++)
        #pragma unroll
        for (int n = 0; n < N; n++) sum[k][n] *= factor[n];
    }
#if SCALED
    #pragma unroll
    for (int k = 0; k < R; k++) {
      const int row = item * R + k;
      const float by_all = GATED ? (k ? scale1 : scale0) : MATRICES == 1 || row < rows0 ? scale0 : MATRICES == 2 || row < rows0 + rows1 ? scale1 : scale2;
      #pragma unroll
      for (int n = 0; n < N; n++) sum[k][n] *= by_all;
    }
#endif
    if (item == begin) STAMP(FIRST_ITEM);
    if (lane == 0) {
      #pragma unroll
      for (int n = 0; n < N; n++) {
        if (GATED) {
          const float v = joined(sum[0][n], sum[R - 1][n]);
          if (BF16_OUT) ((uint16_t*)out0)[(int64_t)n * rows0 + item] = (uint16_t)to_bfloats(v, 0);
          else out0[(int64_t)n * rows0 + item] = v;
        }
        else
          #pragma unroll
          for (int k = 0; k < R; k++) {
            Matrix m = matrix(item, k);
            m.out[(int64_t)n * m.rows] = KIND == 0 || SETS ? sum[k][n] : KIND == 1 ? before[k][n] + sum[k][n] : joined(before[k][n], sum[k][n]);
          }
      }
    }
  }
  STAMP(ENDED);
}
