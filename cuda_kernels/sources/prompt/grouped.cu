// Products of rows grouped by expert with packed weights, on Hopper's tensor cores: weights go from
// their blocks to registers and from there into wgmma. Decoded weights are never stored in memory.
//
// out[row, n] = sum over k of W[expert of row][n][k] * x[row][k]. wgmma takes its first operand from registers, so the weights are the
// "rows" of an instruction (64 of them per warpgroup) and up to LARGEST tokens of one expert its "columns"; x comes from shared memory.
//
// The order of k within a product is free as long as both sides agree. A thread holds, of an
// instruction's 16 k, the slots 2q, 2q+1, 2q+8 and 2q+9, where q is its number in its group of
// four. It decodes whole units of 32 elements, so within 128 k (four units) instruction j takes
// elements 4j .. 4j+3 of unit q for those slots. x is therefore stored with its k permuted within
// each 128: element 32q + 4j + r is at 16j + 2q + (r & 1) + 8 (r >> 1); the kernel that writes x (a
// norm, an activation) does that. Rows whose length is no multiple of 128 are followed by zeros up to
// the next one, which multiply the row's last unit of weights once more.
//
// A CUDA block is a producer warpgroup, which copies rows of x into a ring of RING stages of 128 k, and GROUPS (2 to 4) consumer
// warpgroups of 64 weight rows each: while one multiplies, the others decode. It stays on its multiprocessor and takes every gridDim.x-th
// tile. TYPE: a unit struct, whose header comes first; HALF: 1 is float16, 0 bfloat16; TILE: tokens of a tile at most, 64 or 160;
// LOOKS_UP: 1 if pairs of values are looked up in shared memory.
#include "units/common.cuh"
#include "prompt/overlap.cuh"

constexpr int LARGEST = TILE;             // tokens of a tile at most
constexpr int SMALL_TILE = 64, LARGE_TILE = 160;
using Sums = float[LARGEST / 2];          // of a thread: 2 rows of weights times a quarter of the tokens
#include "prompt/wgmma.cuh"
#include "units/gating.cuh"

constexpr int STAGES = RING, CONSUMERS = GROUPS, PRODUCERS = 128;
constexpr int STAGE_BYTES = LARGEST * 256;
constexpr int TABLE = 1024;        // experts at most
static_assert(LARGEST % 32 == 0, "results are stored by 32 tokens");
constexpr int OUT_BYTES = LARGEST * 128, EXCHANGE_BYTES = CONSUMERS * OUT_BYTES;  // 64 rows of half per token and consumer
constexpr int BLOCK = 1, WITHIN = 4;  // named barriers: of the block; within a consumer (one each)
constexpr int LIST = 64;              // tiles of a block that are looked up together

#include "prompt/grouped_multiply.cuh"

#include "prompt/grouped_tiles.cuh"

struct Problem {
  const uint8_t *first, *second;  // packed weights: of gate and up, or twice the same
  int64_t total_rows, skip;       // rows of all experts in a packed matrix; of one expert before those of up
  int per_expert, n_out, cols;    // rows of one expert in a packed matrix; columns of out; of weights
  const float *first_bias, *second_bias;    // of every row of the packed matrices, or null
  const float *first_scale, *second_scale;  // of every expert, or null
};

struct Terms { float bias, scale; };

// Of row `row` of a packed matrix.
__device__ __forceinline__ Terms terms_of(const float* bias, const float* scale, int64_t row, int expert) {
  return {bias == nullptr ? 0.0f : __ldg(bias + row), scale == nullptr ? 1.0f : __ldg(scale + expert)};
}

// One tile of 64 rows of weights per consumer; out[token][row] = sums.
__device__ __forceinline__ void product(const Problem& p, const Geometry& g, const Tile& tile, uint16_t* out, uint32_t table, uint32_t ring, uint32_t exchange,
                                        uint32_t full, uint32_t empty, Turn& turn) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int column = (tile.row_tile * CONSUMERS + group) * 64, mine = column + warp * 16 + lane / 4;
  const int64_t before = int64_t(tile.expert) * p.per_expert, low = before + min(mine, p.n_out - 1), high = before + min(mine + 8, p.n_out - 1);
  const Terms one = terms_of(p.first_bias, p.first_scale, low, tile.expert), two = terms_of(p.first_bias, p.first_scale, high, tile.expert);
  Sums sums;
  consume<1>(sums, tile.rows, p.first, low, p.first, high, g, p.cols, 0, steps_of(p.cols), table, ring, full, empty, turn);
  const uint32_t to = exchange + group * OUT_BYTES;
#pragma unroll
  for (int i = 0; i < LARGEST / 8; i += 2) {
    if (8 * i >= tile.rows) break;
    uint32_t r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const Terms& t = m % 2 ? two : one;
      const int at = 4 * i + 2 * m;
      r[m] = pair_of(fmaf(sums[at], t.scale, t.bias), fmaf(sums[at + 1], t.scale, t.bias));
    }
    store_matrices(place(to, 8 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), r);
  }
  write_out<8>(to, out + int64_t(tile.first) * p.n_out + column, p.n_out, tile.rows, (p.n_out - column) / 8);
}

// One tile of 32 rows of gate and as many of up per consumer; out[token][...] joins them, permuted as x is: rows of out are filled up with zeros to whole
// groups of 128. A warp has 8 rows of the gate and the same 8 of up, so a thread has both products of a row.
__device__ __forceinline__ void gate_up(const Problem& p, const Geometry& g, const Tile& tile, uint16_t* out, uint32_t table, uint32_t ring, uint32_t exchange,
                                        uint32_t full, uint32_t empty, Turn& turn) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, column = (tile.row_tile * CONSUMERS + group) * 32;
  const int mine = unpermuted(column + 8 * warp + lane / 4), row = min(mine, p.n_out - 1);
  const int64_t low = int64_t(tile.expert) * p.per_expert + row, high = low + p.skip;
  const int stride = steps_of(p.n_out) * 128;
  const uint32_t to = exchange + group * OUT_BYTES;
  const Terms gate = terms_of(p.first_bias, p.first_scale, low, tile.expert), up = terms_of(p.second_bias, p.second_scale, high, tile.expert);
  Sums sums;
  consume<1>(sums, tile.rows, p.first, low, p.second, high, g, p.cols, 0, steps_of(p.cols), table, ring, full, empty, turn);
#pragma unroll
  for (int i = 0; i < LARGEST / 8; i += 4) {
    if (8 * i >= tile.rows) break;
    uint32_t r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int at = 4 * (i + m);
      const float y[2] = {joined(fmaf(sums[at], gate.scale, gate.bias), fmaf(sums[at + 2], up.scale, up.bias)),
                          joined(fmaf(sums[at + 1], gate.scale, gate.bias), fmaf(sums[at + 3], up.scale, up.bias))};
      r[m] = mine < p.n_out ? pair_of(y[0], y[1]) : 0;
    }
    store_matrices(place(to, 8 * i + lane, warp), r);
  }
  write_out<4>(to, out + int64_t(tile.first) * stride + column, stride, tile.rows, (stride - column) / 8);
}

template <bool PAIRED>
__device__ __forceinline__ void grouped(const Problem& p, const int* ends, int n_experts, const uint4* x, const int* sources, int n_slots,
                                        uint16_t* out, int either) {
  extern __shared__ uint8_t shared[];
  if (either && small_are_faster(ends, n_experts) != (LARGEST == SMALL_TILE)) return;
  __shared__ uint64_t barriers[2 * STAGES];
  __shared__ uint16_t before[TABLE + 1];
  __shared__ Tile list[LIST];
  const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024, exchange = ring + STAGES * STAGE_BYTES;
  const uint32_t lookup = exchange + EXCHANGE_BYTES, table = lookup + threadIdx.x % 32 * 4;
  const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) barrier_init(full + 8 * stage, PRODUCERS), barrier_init(empty + 8 * stage, 4 * CONSUMERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  prepare_unit<TYPE>();
  if constexpr (LOOKS_UP) fill_lookup<TYPE>(lookup);
  constexpr int TILE_ROWS = CONSUMERS * (PAIRED ? 32 : 64);
  const int row_tiles = ((PAIRED ? steps_of(p.n_out) * 128 : p.n_out) + TILE_ROWS - 1) / TILE_ROWS;
  const int tiles = count_tiles(ends, n_experts, before) * row_tiles;
  Turn turn;
  if (threadIdx.x >= CONSUMERS * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    for (int n = 0;; ++n) {
      if (n % LIST == 0) {
        named_sync<CONSUMERS * 128 + PRODUCERS>(BLOCK);  // consumers have done all tiles of the list
        const int i = threadIdx.x - CONSUMERS * 128, t = blockIdx.x + (n + i) * gridDim.x;
        if (i < LIST) list[i] = t < tiles ? find_tile(t, row_tiles, ends, n_experts, before) : Tile{0, 0, 0, 0};
        named_sync<CONSUMERS * 128 + PRODUCERS>(BLOCK);
      }
      const Tile tile = list[n % LIST];
      if (!tile.rows) break;
      produce(tile, x, sources, n_slots, p.cols, ring, full, empty, turn);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const Geometry g = TYPE::geometry(p.total_rows, p.cols);
    for (int n = 0;; ++n) {
      if (n % LIST == 0) {
        named_sync<CONSUMERS * 128 + PRODUCERS>(BLOCK);
        named_sync<CONSUMERS * 128 + PRODUCERS>(BLOCK);
      }
      const Tile tile = list[n % LIST];
      if (!tile.rows) break;
      if constexpr (PAIRED) gate_up(p, g, tile, out, table, ring, exchange, full, empty, turn);
      else product(p, g, tile, out, table, ring, exchange, full, empty, turn);
    }
  }
}

// out half[rows, n_out] = products with W [n_experts * per_expert rows, cols], times scale [n_experts] plus bias [n_experts, per_expert],
// where these are not null. Rows of x are as long as whole groups of 128 columns.
extern "C" __global__ void __launch_bounds__(128 * CONSUMERS + PRODUCERS, 1)
grouped_product(const uint8_t* weights, int n_experts, int per_expert, int cols, const int* ends, const uint4* x, const int* sources,
                int n_slots, const float* bias, const float* scale, uint16_t* out, int either) {
  follow_launch_before();
  const Problem p = {weights, weights, int64_t(n_experts) * per_expert, 0, per_expert, per_expert, cols, bias, bias, scale, scale};
  grouped<false>(p, ends, n_experts, x, sources, n_slots, out, either);
}

// out half[rows, hidden, filled up to whole groups of 128] = joined(gate, up), permuted; gate and up are two matrices of per_expert = hidden
// rows, or one (up null) of 2 hidden. Biases and scales are laid out as the matrices are.
extern "C" __global__ void __launch_bounds__(128 * CONSUMERS + PRODUCERS, 1)
grouped_gate_up(const uint8_t* gate, const uint8_t* up, int n_experts, int per_expert, int hidden, int cols, const int* ends,
                const uint4* x, const int* sources, int n_slots, const float* gate_bias, const float* up_bias, const float* gate_scale,
                const float* up_scale, uint16_t* out, int either) {
  follow_launch_before();
  const Problem p = {gate, up ? up : gate, int64_t(n_experts) * per_expert, up ? 0 : hidden, per_expert, hidden, cols,
                     gate_bias, up ? up_bias : gate_bias, gate_scale, up ? up_scale : gate_scale};
  grouped<true>(p, ends, n_experts, x, sources, n_slots, out, either);
}
