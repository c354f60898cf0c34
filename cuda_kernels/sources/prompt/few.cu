// Products of few tokens with packed weights, on Hopper's tensor cores: as in grouped.cu, weights go from their blocks to registers and
// from there into wgmma, and decoded weights are never stored in memory.
//
// out[token, n] = sum over k of W[n][k] * x[token][k], for up to three matrices W of one type below each other. A matrix of some thousand
// rows has fewer tiles than the device has multiprocessors. So the steps of all tiles (128 k each), one tile after the other, are divided evenly
// among blocks: a block has some whole tiles, and parts of two at most, its first and its last one. It stores the sums of parts in float32 in
// `parts`. At its end it waits until the other parts of these tiles are there, and adds all of them, in the order of k, for its share of the
// tokens: the same digits in every run. There are no more blocks than multiprocessors, and other kernels of this process that run meanwhile end
// without this one; so all blocks run in the end, and none waits forever. Two processes that share a device at the same time (MPS) could wait for each other.
//
// A CUDA block is a producer warpgroup and GROUPS consumer warpgroups, as in grouped.cu. x is permuted as there, by the launch before
// (permute.cu), beside which a block may start: consumers read their first weights meanwhile. TYPE, HALF, TILE (64 or 128), RING, GROUPS,
// LOOKS_UP: as there. DEPTH: steps of weights that a thread has in registers or on their way there.
#include "units/common.cuh"

constexpr int LARGEST = TILE;     // tokens of a tile at most
using Sums = float[LARGEST / 2];  // of a thread: 2 rows of weights times a quarter of the tokens
#include "prompt/wgmma.cuh"

constexpr int STAGES = RING, CONSUMERS = GROUPS, CONSUMING = 128 * GROUPS, PRODUCERS = 128;
constexpr int STAGE_BYTES = LARGEST * 256;
constexpr int OUT_BYTES = LARGEST * 128;  // 64 rows of half per token and consumer
constexpr int ALL = 2, WITHIN = 4;        // named barriers: of all consumers; within a consumer (one each)
constexpr int MATRICES = 3;
extern __shared__ uint8_t shared[];
#ifndef ON_HOST  // where blocks run one after the other: all multiply, then all join
constexpr bool MULTIPLIES = true, JOINS = true;
#endif

#include "prompt/grouped_multiply.cuh"

#ifndef ON_HOST  // the test that runs this kernel on the CPU has its own of these
// After what this block's threads have stored before a barrier; and until so many blocks have done so.
__device__ __forceinline__ void announce_part(uint32_t* arrived) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}
__device__ __forceinline__ void wait_for_parts(const uint32_t* arrived, uint32_t n) {
  uint32_t count;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
  while ((count & 0xffff) < n);
}
// Another block has read all parts: how many have before.
__device__ __forceinline__ uint32_t count_reader(uint32_t* arrived) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 65536;" : "=r"(before) : "l"(arrived) : "memory");
  return before >> 16;
}
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_launch_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

struct Problem {
  const uint8_t* weights[MATRICES];
  int rows[MATRICES], total[MATRICES];  // rows that are multiplied, and of the packed matrix
  float scale[MATRICES];
  int first;                            // the first row of the only matrix
  int cols, tokens, out_stride;
  const uint4* x;                       // rows as long as whole groups of 128 columns, permuted
  const uint16_t* bias;                 // half [all rows] or null
  uint16_t* out;
  float4* parts;
  uint32_t* arrived;                    // of every tile, zero before and after
};

// How the steps of all tiles are divided.
struct Division {
  int steps, blocks, row_tiles, tiles;  // blocks of 64 rows
  uint32_t total;
  __device__ __forceinline__ Division(const Problem& p) : blocks(0) {
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) blocks += (p.rows[m] + 63) / 64;
    steps = steps_of(p.cols), row_tiles = (blocks + CONSUMERS - 1) / CONSUMERS;
    tiles = row_tiles * ((p.tokens + LARGEST - 1) / LARGEST), total = uint32_t(tiles) * steps;
  }
  // The first step of a block; of the one after the last one, all of them.
  __device__ __forceinline__ int begin(int block) const { return int(uint64_t(total) * block / gridDim.x); }
  // The block that has a step.
  __device__ __forceinline__ int block_of(int step) const { return int((uint64_t(step + 1) * gridDim.x - 1) / total); }
};

// 64 rows of weights: the first of them in the packed matrix, how many there are, and their column in the result.
struct Rows { const uint8_t* weights; int total, first, count, column; float scale; };

// A consumer that has no rows of its own multiplies the last ones and stores nothing. So do its rows past the last one.
__device__ __forceinline__ Rows rows_of(const Problem& p, const Division& d, int block) {
  const bool past = block >= d.blocks;
  block = min(block, d.blocks - 1);
  Rows r;
  int column = 0;
#pragma unroll
  for (int i = 0; i < MATRICES; ++i) {
    const int blocks = (p.rows[i] + 63) / 64;
    if (block >= 0 && block < blocks) {
      r = {p.weights[i], p.total[i], p.first + 64 * block, past ? 0 : min(p.rows[i] - 64 * block, 64), column + 64 * block, p.scale[i]};
    }
    block -= blocks, column += p.rows[i];
  }
  return r;
}

// A part of a tile, or all of it.
struct Segment {
  int tile, row_tile, first, tokens, begin, end;  // tokens `first` and so many more; steps of the tile
  __device__ __forceinline__ Segment(const Problem& p, const Division& d, int at, int last) {
    tile = at / d.steps, row_tile = tile % d.row_tiles;
    const int n = (p.tokens + LARGEST - 1) / LARGEST, share = ((p.tokens + n - 1) / n + 7) / 8 * 8;
    first = tile / d.row_tiles * share, tokens = min(share, p.tokens - first);
    begin = at - tile * d.steps, end = min(d.steps, begin + last - at);
  }
};

// All steps of a block to the ring: of x, copies of LATER steps are on their way when the next one begins.
__device__ __forceinline__ void produce(const Problem& p, const Division& d, int begin, int end, uint32_t ring, uint32_t full, uint32_t empty) {
  constexpr int LATER = STAGES - 2;
  const int thread = threadIdx.x - CONSUMING, chunk = thread % 16, row = thread / 16;
  const uint32_t to = ring + (chunk / 8) * (LARGEST * 128) + row * 128 + ((chunk % 8) ^ row) * 16;
  int issued = 0;
  wait_for_launch_before();  // it writes x
  Turn turn, shown;
  for (int at = begin; at < end;) {
    const Segment s(p, d, at, end);
    uint32_t from[LARGEST / 8];
#pragma unroll
    for (int i = 0; i < LARGEST / 8; ++i) from[i] = (s.first + min(row + 8 * i, s.tokens - 1)) * (d.steps * 16) + chunk;
    for (int k = s.begin; k < s.end; ++k, ++at, ++issued, turn.next()) {
      barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);
#pragma unroll
      for (int i = 0; i < LARGEST / 8; ++i)
        if (8 * i < s.tokens) copy_sixteen(to + turn.stage * STAGE_BYTES + i * 1024, p.x + (from[i] + k * 16));
      end_of_copies();
      if (issued >= LATER) {  // the tensor cores can see the copies before these
        show_copies<LATER>();
        barrier_arrive(full + 8 * shown.stage);
        shown.next();
      }
    }
  }
  show_copies<0>();
  for (int i = min(issued, LATER); i > 0; --i, shown.next()) barrier_arrive(full + 8 * shown.stage);
}

__device__ __forceinline__ float bias_of(const Problem& p, int row) {
  return p.bias == nullptr ? 0.0f : HALF ? half_to_float(p.bias[row]) : __uint_as_float(uint32_t(p.bias[row]) << 16);
}

// A whole tile to out[token][row].
__device__ __forceinline__ void store_tile(const Problem& p, const Segment& s, const Rows& r, const Sums& sums, uint32_t exchange) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, mine = warp * 16 + lane / 4, column = r.column;
  const uint32_t to = exchange + threadIdx.x / 128 * OUT_BYTES;
  const float bias[2] = {mine < r.count ? bias_of(p, column + mine) : 0.0f, mine + 8 < r.count ? bias_of(p, column + mine + 8) : 0.0f};
#pragma unroll
  for (int i = 0; i < LARGEST / 8; i += 2) {
    if (8 * i >= s.tokens) break;
    uint32_t four[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int at = 4 * i + 2 * m;
      four[m] = pair_of(fmaf(sums[at], r.scale, bias[m % 2]), fmaf(sums[at + 1], r.scale, bias[m % 2]));
    }
    store_matrices(place(to, 8 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), four);
  }
  write_out<8>(to, p.out + int64_t(s.first) * p.out_stride + column, p.out_stride, s.tokens, r.count / 8);
}

// The sums of 8 tokens in a slot of `parts`: a thread's at its place.
__device__ __forceinline__ float4* part_at(const Problem& p, int slot, int eight) {
  return p.parts + (int64_t(slot) * (LARGEST / 8) + eight) * CONSUMING + threadIdx.x;
}

// The slot of a block's part of a tile: its first part, or its last one.
__device__ __forceinline__ int slot_of(const Division& d, int block, int tile) { return 2 * block + (d.begin(block) < tile * d.steps); }

__device__ __forceinline__ void store_part(const Problem& p, const Division& d, const Segment& s, const Sums& sums) {
  const int slot = slot_of(d, blockIdx.x, s.tile);
#pragma unroll
  for (int i = 0; i < LARGEST / 8; ++i)
    if (8 * i < s.tokens) *part_at(p, slot, i) = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  named_sync<CONSUMING>(ALL);
  if (threadIdx.x == 0) announce_part(p.arrived + s.tile);
}

// Adds all parts of a tile, for this block's share of the tokens.
__device__ __forceinline__ void join_parts(const Problem& p, const Division& d, const Segment& s) {
  const int from = d.block_of(s.tile * d.steps), n = d.block_of((s.tile + 1) * d.steps - 1) - from + 1;
  uint32_t* arrived = p.arrived + s.tile;
  if (threadIdx.x == 0) wait_for_parts(arrived, n);
  named_sync<CONSUMING>(ALL);
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, mine = warp * 16 + lane / 4;
  const Rows r = rows_of(p, d, s.row_tile * CONSUMERS + group);
  for (int i = blockIdx.x - from; 8 * i < s.tokens; i += n) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int part = 0; part < n; ++part) {
      const float4 more = __ldcg(part_at(p, slot_of(d, from + part, s.tile), i));
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    const float four[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int row = mine + m / 2 * 8, token = 8 * i + 2 * (lane % 4) + m % 2;
      if (row >= r.count || token >= s.tokens) continue;
      const float y = fmaf(four[m], r.scale, bias_of(p, r.column + row));
      p.out[int64_t(s.first + token) * p.out_stride + r.column + row] = uint16_t(pair_of(y, 0.0f));
    }
  }
  named_sync<CONSUMING>(ALL);
  if (threadIdx.x == 0 && count_reader(arrived) == uint32_t(n - 1)) *arrived = 0;
}

// The steps of a block.
__device__ __forceinline__ void multiply_steps(const Problem& p, const Division& d, int begin, int end, uint32_t ring, uint32_t full, uint32_t empty) {
  const uint32_t exchange = ring + STAGES * STAGE_BYTES, lookup = exchange + CONSUMERS * OUT_BYTES, table = lookup + threadIdx.x % 32 * 4;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) barrier_init(full + 8 * stage, PRODUCERS), barrier_init(empty + 8 * stage, 4 * CONSUMERS);
    show_barriers();
  }
  prepare_unit<TYPE>();
  if constexpr (LOOKS_UP) fill_lookup<TYPE>(lookup);
  __syncthreads();
  if (threadIdx.x >= CONSUMING) {
    fewer_registers<PRODUCER_REGISTERS>();
    produce(p, d, begin, end, ring, full, empty);
    return;
  }
  more_registers<REGISTERS>();
  Turn turn;
  for (int at = begin; at < end;) {
    const Segment s(p, d, at, end);
    const Rows r = rows_of(p, d, s.row_tile * CONSUMERS + threadIdx.x / 128);
    const int last = max(r.count - 1, 0), mine = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t low = r.first + min(mine, last), high = r.first + min(mine + 8, last);
    Sums sums;
    consume<DEPTH>(sums, s.tokens, r.weights, low, r.weights, high, TYPE::geometry(r.total, p.cols), p.cols, s.begin, s.end, table, ring, full, empty, turn);
    if (s.end - s.begin == d.steps) store_tile(p, s, r, sums, exchange);
    else store_part(p, d, s, sums);
    at += s.end - s.begin;
  }
}

// Adds up the tiles that a block has parts of: its first and its last one.
__device__ __forceinline__ void join_tiles(const Problem& p, const Division& d, int begin, int end) {
  const Segment one(p, d, begin, end), two(p, d, max((end - 1) / d.steps * d.steps, begin), end);
  if (one.end - one.begin < d.steps) join_parts(p, d, one);
  if (two.tile != one.tile && two.end - two.begin < d.steps) join_parts(p, d, two);
}

extern "C" __global__ void __launch_bounds__(CONSUMING + PRODUCERS, 1)
few_product(const uint8_t* first, const uint8_t* second, const uint8_t* third, int first_rows, int second_rows, int third_rows, int first_total,
            int second_total, int third_total, float first_scale, float second_scale, float third_scale, int from_row, int cols,
            const uint4* x, int tokens, const uint16_t* bias, uint16_t* out, int out_stride, float4* parts, uint32_t* arrived) {
  __shared__ uint64_t barriers[2 * STAGES];
  let_next_launch_start();
  const Problem p = {{first, second, third}, {first_rows, second_rows, third_rows}, {first_total, second_total, third_total},
                     {first_scale, second_scale, third_scale}, from_row, cols, tokens, out_stride, x, bias, out, parts, arrived};
  const Division d(p);
  const int begin = d.begin(blockIdx.x), end = d.begin(blockIdx.x + 1);
  if (begin == end) return;
  const uint32_t ring = (shared_address(shared) + 1023) / 1024 * 1024, full = shared_address(barriers), empty = full + 8 * STAGES;
  if (MULTIPLIES) multiply_steps(p, d, begin, end, ring, full, empty);
  if (JOINS && threadIdx.x < CONSUMING) join_tiles(p, d, begin, end);
}
