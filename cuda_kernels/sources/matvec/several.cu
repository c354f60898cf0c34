// Matrix-vector products for 3 to 8 rows of activations with quantized weights, on tensor cores.
//
// Kinds, results and macros are those of matvec.cu, but for activations, which round.cu has rounded (matvec/columns.cuh), and for rings. SPLIT: warps that
// share a tile.
//
// A tile is 16 rows of weights (with a gate: 8 rows of it and the same 8 of up) times all rows of activations. SPLIT neighbouring warps take the
// steps (256 columns) of a tile, each some neighbouring ones, and add up their sums in shared memory. Groups of SPLIT warps take every
// (grid * groups)th tile. Grid and order of additions follow from shapes alone.
//
// A lane has a unit (32 columns) of rows l / 4 and l / 4 + 8 at a time, unit l % 4 of four neighbouring ones.
// m16n8k32 adds what the four lanes of a row have, but every unit has scales of its own. So of the eight columns of the right factor,
// column 2 u + n is row n of a pair of activations for unit u alone, and zero where the other units are. Three quarters of the products are with zeros,
// for which tensor cores have time. Each lane then has the sums of its own units, next to the scales that it has decoded.
#include "matvec/tile_ring.cuh"
#include "units/gating.cuh"
#ifndef SETS
#define SETS 0
#endif
#ifndef SCALED
#define SCALED 0
#endif

typedef TYPE T;
typedef Columns A;
typedef TileRing<T> Ring;
constexpr bool NORM = KIND != 1 && !PLAIN, GATED = KIND == 2;
constexpr int GROUPS = WARPS / SPLIT, TILE_ROWS = GATED ? 8 : 16;   // rows of the result
static_assert(WARPS % SPLIT == 0 && SPLIT <= STEPS, "each warp of a tile has a step at least");

// What the unit leaves to sums of activations, and the parts of its values (units/common.cuh): parts take more products, and fewer other instructions.
constexpr int LESS = PRODUCTS ? UnitLess<T>::value : 0, SECOND = PRODUCTS ? UnitSecond<T>::value : 0;
constexpr int PARTS = PRODUCTS && IN_PARTS ? UnitParts<T>::value : 1;
static_assert(SUMS == (T::MINS || LESS || SECOND ? T::SCALES : 0) && SCALED_SUMS == T::MINS, "the sums that the unit needs");
static_assert(!LESS || PARTS == 1, "unsigned bytes are no parts");

// Sums of a tile: those of warps, twice, as the next tile begins before all sums of this one are read.
constexpr int TOKEN_SUMS = 20, WARP_SUMS = PLACES * TOKEN_SUMS + 8;   // 16 rows, and what keeps lanes in different banks
constexpr int AT_SUMS = A::BYTES, AT_ZEROS = AT_SUMS + 2 * 4 * WARPS * WARP_SUMS;
constexpr int ZEROS = 5 * A::UNIT_BYTES;   // bytes: what lanes whose columns are zeros read of a step
constexpr int AT_RINGS = AT_ZEROS + ZEROS;
static_assert(AT_RINGS + WARPS * Ring::BYTES == PLANNED, "bytes of shared memory in the plan");

struct Matrix { const uint8_t* base; float* out; int rows, first, stored, number; };   // `rows` from row `first` of the `stored` ones on

template <int COUNT> DEV void floats_at(uint32_t at, float (&f)[COUNT]) {
  if constexpr (COUNT == 2) {
    const int2 two = shared8(at);
    f[0] = __int_as_float(two.x), f[1] = __int_as_float(two.y);
  } else
    #pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const int4 four = shared16(at + 4 * i);
      f[i] = __int_as_float(four.x), f[i + 1] = __int_as_float(four.y), f[i + 2] = __int_as_float(four.z), f[i + 3] = __int_as_float(four.w);
    }
}

// Sums of integers become floats without a conversion: they are added to the bits of a float whose last bit counts ones. All are below 2^22.
constexpr int MAGIC = 0x4B400000;

// A unit of two rows: bytes, scales, what is taken off, and what the second half of a table is more.
struct Unit {
  int w[2][PARTS][8], more[2][2];
  float s[2][2], m[2][2];
  template <class Type> __device__ __forceinline__ void take(int row, const typename Type::Raw& raw, int unit) {
    if constexpr (PARTS > 1) Type::parts(raw, unit, w[row], s[row]);
    else Type::unpack(raw, unit, w[row][0], s[row], m[row]);
    if constexpr (SECOND != 0) {
      const int halves = Type::halves(raw, unit);
      more[row][0] = halves & 1 ? SECOND : 0, more[row][1] = halves & 2 ? SECOND : 0;
    }
  }
};

// sums[r][n] += row r of a unit times that of activations n. words: where a lane's columns of the pairs are, with zeros for other lanes.
DEV void multiply_unit(const Unit& u, const uint32_t (&words)[PAIRS], int part, int before, uint32_t records, float (&sums)[2][PLACES]) {
  float scale[PLACES], of_columns[2][PLACES];   // sums of all columns, or of 16 each
  floats_at(records, scale);
  if constexpr (SUMS > 0) floats_at(records + 4 * PLACES, of_columns[0]);
  if constexpr (SUMS > 1) floats_at(records + 8 * PLACES, of_columns[1]);
  #pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    int of[T::SCALES][4], taken[T::SCALES][4];   // the latter of PARTS == 2, whose second part is taken off
    #pragma unroll
    for (int k = 0; k < T::SCALES; k++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        of[k][i] = taken[k][i] = MAGIC;
        if (LESS || SECOND) of[k][i] += (LESS ? -LESS : u.more[i / 2][k]) * __float_as_int(of_columns[k][2 * p + i % 2]);
      }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int4 x = shared16(words[(p ^ 2 * part ^ 2 * h) % PAIRS] + before + h * A::HALF_BYTES);
      #pragma unroll
      for (int q = 0; q < PARTS; q++) {
        int (&d)[4] = PARTS == 2 && q == 1 ? taken[T::SCALES == 2 ? h : 0] : of[T::SCALES == 2 ? h : 0];
        const int (&a)[8] = u.w[0][q], (&b)[8] = u.w[1][q];
        multiply_bytes<LESS != 0>(d, {a[4 * h], b[4 * h], a[4 * h + 1], b[4 * h + 1]}, {x.x, x.y});
        multiply_bytes<LESS != 0>(d, {a[4 * h + 2], b[4 * h + 2], a[4 * h + 3], b[4 * h + 3]}, {x.z, x.w});
      }
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, n = 2 * p + i % 2;
      float v = 0;
      #pragma unroll
      for (int k = 0; k < T::SCALES; k++) {
        const float sum = __int_as_float(of[k][i]) - __int_as_float(PARTS == 2 ? taken[k][i] : MAGIC);   // exact
        v = k ? v + u.s[r][k] * sum : u.s[r][k] * sum;
      }
      sums[r][n] += v * scale[n];
      if (T::MINS)
        #pragma unroll
        for (int k = 0; k < T::SCALES; k++) sums[r][n] -= u.m[r][k] * of_columns[k][n];
    }
  }
}

// Adds the sums of the four lanes of a row, and leaves each lane a quarter of them in v[0] .. : values lane % 4 * COUNT / 4 and so on.
template <int HALF, int COUNT> DEV void add_lane(float (&v)[COUNT], int lane, int by) {
  const bool upper = lane & by;
  #pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float give = upper ? v[i] : v[i + HALF], keep = upper ? v[i + HALF] : v[i];
    v[i] = keep + __shfl_xor_sync(~0u, give, by);
  }
}
template <int COUNT> DEV void add_lanes(float (&v)[COUNT], int lane) {
  add_lane<COUNT / 2>(v, lane, 2);
  add_lane<COUNT / 4>(v, lane, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KERNEL(
    const uint8_t* x, const float* bias, float eps, const uint8_t* base0, float* out0, int rows0, int first0, int stored0,
    const uint8_t* base1, float* out1, int rows1, int first1, int stored1,
    const uint8_t* base2, float* out2, int rows2, int first2, int stored2
#if SCALED
    , float scale0, float scale1, float scale2
#endif
    ) {
  allow_successor();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / SPLIT, part = warp % SPLIT;
  const int tiles0 = (rows0 + TILE_ROWS - 1) / TILE_ROWS, tiles1 = (rows1 + TILE_ROWS - 1) / TILE_ROWS;
  const int tiles = GATED ? tiles0 : tiles0 + (MATRICES > 1 ? tiles1 : 0) + (MATRICES > 2 ? (rows2 + TILE_ROWS - 1) / TILE_ROWS : 0);
  const int stride = gridDim.x * GROUPS, begin = group * gridDim.x + blockIdx.x;   // neighbouring tiles are in different blocks
  const int first_step = STEPS * part / SPLIT, end_step = STEPS * (part + 1) / SPLIT;

  auto matrix = [&](int& tile) -> Matrix {   // and the tile of it in `tile`
    if (MATRICES == 1 || tile < tiles0) return {base0, out0, rows0, first0, stored0, 0};
    tile -= tiles0;
    if (MATRICES == 2 || tile < tiles1) return {base1, out1, rows1, first1, stored1, 1};
    tile -= tiles1;
    return {base2, out2, rows2, first2, stored2, 2};
  };
  auto rows_of = [&](int tile) -> Ring::Tile {
    if (GATED) {
      const int row = TILE_ROWS * tile;
      return {{base0, stored0, first0 + row, first0 + rows0 - 1}, {base1, stored1, first1 + row, first1 + rows0 - 1}};
    }
    const Matrix m = matrix(tile);
    const int row = m.first + TILE_ROWS * tile, last = m.first + m.rows - 1;
    return {{m.base, m.stored, row, last}, {m.base, m.stored, row + 8, last}};
  };
  const uint32_t at = in_register(shared_address(shared_memory)), ring = at + AT_RINGS + warp * Ring::BYTES;
  // What is fetched next, and where to.
  int fetched_tile = begin, fetched_step = first_step;
  uint32_t fetched_slot = ring;
  Ring::Tile rows{};
  if (begin < tiles) rows = rows_of(begin);
  auto fetch = [&] {
    if (fetched_tile < tiles) Ring::fetch(fetched_slot, rows, fetched_step, lane);
    commit_copies();
    fetched_slot = fetched_slot == ring + (SLOTS - 1) * Ring::SLOT ? ring : fetched_slot + Ring::SLOT;
    if (++fetched_step == end_step) {
      fetched_step = first_step;
      fetched_tile += stride;
      if (fetched_tile < tiles) rows = rows_of(fetched_tile);
    }
  };
  #pragma unroll 1
  for (int i = 0; i < SLOTS - 1; i++) fetch();
  prepare_unit<TYPE>();

  for (int i = threadIdx.x; i < ZEROS / 4; i += THREADS) ((int*)(shared_memory + AT_ZEROS))[i] = 0;
  wait_for_predecessor();
  STAMP(WAIT_ENDED);
  #pragma unroll 4
  for (int i = threadIdx.x; i < A::BYTES / 16; i += THREADS) copy16_read_again(at + 16 * i, x + 16 * i);
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
  STAMP(INPUT_READY);

  // A lane's column of a pair: row n of it, for unit lane % 4 of four, if that is the column's own.
  const bool own = lane / 8 == lane % 4;
  uint32_t words[PAIRS], records = at + A::AT_RECORDS + lane % 4 * A::UNIT_RECORDS;
  #pragma unroll
  for (int p = 0; p < PAIRS; p++)
    words[p] = own ? at + lane % 4 * A::UNIT_BYTES + 16 * A::place(2 * p + lane / 4 % 2, lane % 4, 0) : at + AT_ZEROS;
  const uint32_t step_bytes = own ? STEP_UNITS * A::UNIT_BYTES : 0;

  // Of the results of a tile, a thread of the group has every SHARE-th part of some.
  constexpr int RESULTS = TILE_ROWS * PLACES, MEMBERS = 32 * SPLIT, SHARE = MEMBERS > RESULTS ? MEMBERS / RESULTS : 1;
  constexpr int EACH = RESULTS > MEMBERS ? RESULTS / MEMBERS : 1;
  const int member = threadIdx.x % MEMBERS, share = member % SHARE;
  float factor[EACH];
  #pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int n = (member / SHARE + e * MEMBERS) / TILE_ROWS;
    factor[e] = UnitFactor<T>::value * (NORM ? rsqrtf(A::square(shared_memory, n) / COLS + eps) : 1.0f);
  }

  int turn = 0;
  uint32_t slot = ring;
  #pragma unroll 1
  for (int tile = begin; tile < tiles; tile += stride, turn ^= 1) {
    int within = tile;
    const Matrix m = matrix(within);
    float existing_result[EACH];
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int v = member / SHARE + e * MEMBERS, n = v / TILE_ROWS, row = TILE_ROWS * within + v % TILE_ROWS;
      existing_result[e] = 0;
      if (((KIND == 1 && !SETS) || KIND == 3) && share == 0 && n < N && row < m.rows)
        existing_result[e] = m.out[(int64_t)n * m.rows + row] + (KIND == 1 && bias ? __ldg(bias + row) : 0.0f);
    }
    float sums[2][PLACES];
    #pragma unroll
    for (int n = 0; n < PLACES; n++) sums[0][n] = sums[1][n] = 0;
    const Ring::Tile here = rows_of(tile);
    const float header[2] = {Ring::header(here.low, lane / 4), Ring::header(here.high, lane / 4)};
    #pragma unroll 1
    for (int step = first_step; step < end_step; step++) {
      wait_for_copies<SLOTS - 2>();
      __syncwarp();
      fetch();   // to the slot of the step before
      const Geometry low = Ring::row_in(slot, here.low, lane / 4, step), high = Ring::row_in(slot, here.high, 8 + lane / 4, step);
      uint32_t columns[PAIRS];
      #pragma unroll
      for (int p = 0; p < PAIRS; p++) columns[p] = words[p] + step * step_bytes;
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        int unit = 4 * half + lane % 4;   // of the step; past the row's end, where activations are zeros, the last one
        if (UNITS % STEP_UNITS) unit = min(unit, UNITS - 1 - STEP_UNITS * step);
        Unit u;
        u.take<T>(0, T::load(shared_memory, low, 0, unit), unit);
        u.take<T>(1, T::load(shared_memory, high, 0, unit), unit);
        multiply_unit(u, columns, half, 4 * half * A::UNIT_BYTES, records + (STEP_UNITS * step + 4 * half) * A::UNIT_RECORDS, sums);
      }
      slot = slot == ring + (SLOTS - 1) * Ring::SLOT ? ring : slot + Ring::SLOT;
    }
    if (tile == begin) STAMP(FIRST_ITEM);
    float mine[2 * PLACES];   // those of activations n of both rows are 2 n and 2 n + 1
    #pragma unroll
    for (int i = 0; i < 2 * PLACES; i++) mine[i] = header[i % 2] * sums[i % 2][i / 2];
    add_lanes(mine, lane);
    float* const of_group = (float*)(shared_memory + AT_SUMS) + (turn * WARPS + group * SPLIT) * WARP_SUMS;
    #pragma unroll
    for (int k = 0; k < PLACES / 2; k++) {
      const int i = lane % 4 * (PLACES / 2) + k;
      of_group[part * WARP_SUMS + i / 2 * TOKEN_SUMS + lane / 4 + 8 * (i % 2)] = mine[k];
    }
    group_barrier<MEMBERS>(1 + group);
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int v = member / SHARE + e * MEMBERS, n = v / TILE_ROWS, r = v % TILE_ROWS, row = TILE_ROWS * within + r;
      float sum = 0, second = 0;
      #pragma unroll
      for (int i = 0; i < (SPLIT + SHARE - 1) / SHARE; i++) {
        if (share + i * SHARE >= SPLIT) break;
        const float* one = of_group + (share + i * SHARE) * WARP_SUMS + n * TOKEN_SUMS + r;
        sum += one[0];
        if (GATED) second += one[8];
      }
      #pragma unroll
      for (int o = 1; o < SHARE; o <<= 1) {
        sum += __shfl_xor_sync(~0u, sum, o);
        if (GATED) second += __shfl_xor_sync(~0u, second, o);
      }
      sum *= factor[e], second *= factor[e];
#if SCALED
      sum *= m.number == 0 ? scale0 : m.number == 1 ? scale1 : scale2;
      second *= scale1;
#endif
      if (share || n >= N || row >= m.rows) continue;
      if (GATED) {
        const float result = joined(sum, second);
        if (BF16_OUT) ((uint16_t*)out0)[(int64_t)n * rows0 + row] = (uint16_t)to_bfloats(result, 0);
        else out0[(int64_t)n * rows0 + row] = result;
      } else
        m.out[(int64_t)n * m.rows + row] = KIND == 0 || SETS ? sum : KIND == 1 ? existing_result[e] + sum : joined(existing_result[e], sum);
    }
  }
  STAMP(ENDED);
}
