// Attention of many rows to keys and values in half precision, on Hopper's tensor cores, after FlashAttention-2 and -3 (Dao, 2023; Shah et
// al., 2024): shares of a row are summed block by block with the largest score so far, and scores are never stored.
//
// out[row] = sum over positions of softmax(scale * q[row] . k[position]) v[position]. Each of the last n of `total` positions sees itself and
// all before it, or a window. A tile is ROWS rows that share a head of keys: row r is query r / group of head r % group of those that
// belong to it. A CUDA block stays on its multiprocessor and takes tile after tile. It is a producer warpgroup, which copies queries once for a
// tile, keys and values into rings of STAGES blocks of POSITIONS, and GROUPS consumer warpgroups of 64 rows each.
//
// Rows are in panels of 64 elements: 128 bytes each, whose chunks of 16 bytes are swizzled by the row. Keys are the second factor as they
// are; values are its transpose, which the instruction reads with a flag. Shares stay in registers, as its first factor.
//
// KEY, VALUE: elements of a head. HALF, OUT_HALF: 1 is float16, 0 bfloat16. CAPPED: scores become cap * tanh(score / cap).
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#include "prompt/common.cuh"
#include "prompt/overlap.cuh"
#include "prompt/barriers.cuh"
#include "prompt/wgmma_attention.cuh"

constexpr int STAGES = 2, ROWS = 64 * GROUPS, CONSUMERS = 128 * GROUPS, PRODUCERS = 128;
constexpr int REGISTERS = GROUPS == 3 ? 160 : 232, PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int KEY_PANELS = (KEY + 63) / 64, VALUE_PANELS = (VALUE + 63) / 64;
constexpr int Q_BYTES = KEY_PANELS * ROWS * 128, K_BYTES = KEY_PANELS * POSITIONS * 128, V_BYTES = VALUE_PANELS * POSITIONS * 128;
constexpr float LOG2E = 1.4426950408889634f;
#define LOWEST (-__int_as_float(0x7f800000))
constexpr int TURN = 1;  // named barriers of the consumers, in whose turn they multiply

struct Problem {
  const uint16_t *q, *k, *v;
  uint16_t* out;
  int64_t q_token, k_token, v_token, out_token;  // elements from one token to the next, also those of another sequence
  int n, total, group, heads, sequences;         // queries and positions of a sequence; heads of queries to one of keys; heads of keys
  int section, parts;                            // heads whose tiles are taken together; blocks that share the positions of a tile
  float* partial;                                // float[parts][sequences][heads][rows of whole tiles][VALUE], then two more of each row
  int window;
  float scale, cap;
  const float* sinks;  // a score of every head of queries whose share is left out, or null
  const uint16_t* gates;               // OUT_HALF, or null: results are multiplied by their sigmoid, or their softplus
  int64_t gate_token, gate_head;       // elements from one token and head to the next
  int gate_step;                       // elements from a gate to that of the next element of a head; 0: all have one
  uint32_t none;       // 0
  __device__ __forceinline__ int row_tiles() const { return (n * group + ROWS - 1) / ROWS; }
  __device__ __forceinline__ int pairs() const { return sequences * heads; }
};

// Rows from `row` on of head `head` of keys of a sequence, which are number `pair` of all; part `part` of it, blocks of positions `first` to `last`
// (none if that is less).
struct Tile {
  int row, pair, head, sequence, part, first, last;
  __device__ __forceinline__ bool empty() const { return last < first; }
};

// The tile of this block in its n-th turn. Those with most positions come first, among heads whose keys and values fit L2 together; blocks take
// them in turn, forward and back.
__device__ __forceinline__ bool find_tile(const Problem& p, int n, Tile& tile) {
  const int at = n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x), row_tiles = p.row_tiles();
  if (at >= row_tiles * p.pairs() * p.parts) return false;
  const int whole = at / p.parts, before = whole / (p.section * row_tiles) * p.section, size = min(p.section, p.pairs() - before);
  const int within = whole - before * row_tiles, pair = before + within % size, row = (row_tiles - 1 - within / size) * ROWS;
  const int start = p.total - p.n, one = start + row / p.group, end = start + min(p.n - 1, (row + ROWS - 1) / p.group);
  const int first = p.window ? max(0, one - p.window + 1) / POSITIONS : 0, last = end / POSITIONS, part = at % p.parts;
  const int share = (last - first + p.parts) / p.parts, begin = first + part * share;
  tile = {row, pair, pair % p.heads, pair / p.heads, part, begin, min(last, begin + share - 1)};
  return true;
}

// Copies of the producer. Each is reported to the barrier `full` of its place once it has ended and the tensor cores can see it, which is when
// the next one is on its way, or before the producer waits.
struct Copies {
  uint32_t pending = 0;
  __device__ __forceinline__ void wait_for(uint32_t empty, uint32_t phase) {
    if (barrier_passed(empty, phase)) return;
    flush();
    barrier_wait(empty, phase);
  }
  __device__ __forceinline__ void issued(uint32_t full) {
    end_of_copies();
    if (pending) {
      show_copies<1>();
      barrier_arrive(pending);
    }
    pending = full;
  }
  __device__ __forceinline__ void flush() {
    if (!pending) return;
    show_copies<0>();
    barrier_arrive(pending);
    pending = 0;
  }
};

// Rows of ELEMENTS to panels of LENGTH rows. A thread copies its chunk of 16 bytes of every panel, of every sixteenth row; `at(row)` is where a
// row begins.
template <int ELEMENTS, int LENGTH, class At>
__device__ __forceinline__ void copy_rows(uint32_t to, At at) {
  const int thread = threadIdx.x - CONSUMERS, row = thread / 8, chunk = thread % 8;
  to += row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll 2
  for (int i = 0; i < LENGTH / 16; ++i, to += 2048) {
    const uint16_t* from = at(row + 16 * i) + 8 * chunk;
#pragma unroll
    for (int panel = 0; panel < (ELEMENTS + 63) / 64; ++panel)
      if (64 * panel + 64 <= ELEMENTS || 64 * panel + 8 * chunk < ELEMENTS)
        copy_sixteen(to + panel * (LENGTH * 128), from + 64 * panel);
  }
}

// Rows `first` to first + POSITIONS - 1; beyond the last of `total` rows, which nothing sees, that one again.
template <int ELEMENTS>
__device__ __forceinline__ void copy_block(uint32_t to, const uint16_t* from, int64_t stride, int first, int total) {
  copy_rows<ELEMENTS, POSITIONS>(to, [&](int row) { return from + min(first + row, total - 1) * stride; });
}

__device__ __forceinline__ void copy_queries(const Problem& p, const Tile& tile, uint32_t to) {
  const uint16_t* from = p.q + int64_t(tile.sequence) * p.n * p.q_token + tile.head * p.group * KEY;
  copy_rows<KEY, ROWS>(to, [&](int i) {
    const int row = min(tile.row + i, p.n * p.group - 1);
    return from + row / p.group * p.q_token + row % p.group * KEY;
  });
}

struct Places { uint32_t q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty; };

__device__ __forceinline__ void produce(const Problem& p, const Places& at) {
  Copies copies;
  Ring<STAGES> of_k, of_v;
  Tile tile;
  int taken = 0;
  for (int n = 0; find_tile(p, n, tile); ++n) {
    if (tile.empty()) continue;
    const int64_t before = int64_t(tile.sequence) * p.total;
    const uint16_t *k = p.k + before * p.k_token + tile.head * KEY, *v = p.v + before * p.v_token + tile.head * VALUE;
    const auto keys = [&](int block) {
      copies.wait_for(at.k_empty + 8 * of_k.stage, of_k.round ^ 1);
      copy_block<KEY>(at.k + of_k.stage * K_BYTES, k, p.k_token, block * POSITIONS, p.total);
      copies.issued(at.k_full + 8 * of_k.stage);
      of_k.next();
    };
    keys(tile.last);
    copies.wait_for(at.q_empty, taken % 2 ^ 1);
    copy_queries(p, tile, at.q);
    copies.issued(at.q_full);
    ++taken;
    for (int block = tile.last; block >= tile.first; --block) {  // keys of the next block, then values of this one
      if (block > tile.first) keys(block - 1);
      copies.wait_for(at.v_empty + 8 * of_v.stage, of_v.round ^ 1);
      copy_block<VALUE>(at.v + of_v.stage * V_BYTES, v, p.v_token, block * POSITIONS, p.total);
      copies.issued(at.v_full + 8 * of_v.stage);
      of_v.next();
    }
  }
  copies.flush();
}

// A descriptor of a factor in panels, whose columns (or, of a transposed one, rows) are 16 of the sum: groups of 8 rows are 1024 bytes apart, and
// panels of a transposed one `panel` bytes.
__device__ __forceinline__ uint64_t factor_at(uint32_t at, int panel) {
  return uint64_t(64 | 1 << 30) << 32 | uint32_t(at >> 4 | panel >> 4 << 16);
}

#ifndef ON_HOST
// The registers of a product that has ended: the compiler must not read them before.
template <int COUNT>
__device__ __forceinline__ void settle(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// Scores of 64 rows and POSITIONS: of a thread, those of rows r and r + 8 (h = 0 and 1), r = lane / 4 of its warp's 16. Number i is that of h = i / 2 % 2
// and position i / 4 * 8 + i % 2 after `lane % 4 * 2`.
using Scores = float[POSITIONS / 2];
using Shares = uint32_t[POSITIONS / 4];
using Mixes = float[VALUE / 2];

__device__ __forceinline__ void multiply_keys(Scores& s, uint32_t q, uint32_t k) {
#pragma unroll
  for (int i = 0; i < KEY / 16; ++i)
    Both<POSITIONS>::run(s, factor_at(q + i / 4 * (ROWS * 128) + i % 4 * 32, 16), factor_at(k + i / 4 * (POSITIONS * 128) + i % 4 * 32, 16), i > 0);
  wgmma_commit();
}

__device__ __forceinline__ void multiply_values(Mixes& o, const Shares& shares, uint32_t v) {
#pragma unroll
  for (int i = 0; i < POSITIONS / 16; ++i) {
    const uint32_t a[4] = {shares[4 * i], shares[4 * i + 1], shares[4 * i + 2], shares[4 * i + 3]};
    Transposed<VALUE>::run(o, a, factor_at(v + i * 2048, POSITIONS * 128), true);
  }
  wgmma_commit();
}

// The last and first position that each row of a thread sees; its largest score and the sum of its shares so far.
struct Sight { int last[2], first[2]; };
struct Softmax { float most[2], sum[2]; };

// Scores to shares in float32: 2 to the power of what a score times `unit` is below the largest one. `factor` is what sums so far are multiplied by.
// block: position of the first score.
__device__ __forceinline__ void shares_of(Scores& s, const Sight& sight, int block, float unit, float cap, Softmax& so_far, float (&factor)[2]) {
  if constexpr (CAPPED) {
#pragma unroll
    for (int i = 0; i < POSITIONS / 2; ++i) {  // tanh(x) = 1 - 2 / (exp(2x) + 1)
      s[i] = fmaf(inverse_of(exp2_of(s[i] * unit) + 1.0f), -2.0f * cap, cap);
    }
    unit = 1.0f;
  }
  const int lane = threadIdx.x % 32, most_of_block = block + POSITIONS - 1;
  const bool whole = most_of_block <= min(sight.last[0], sight.last[1]) && block >= max(sight.first[0], sight.first[1]);
  if (!__all_sync(0xffffffffu, whole)) {
    const int at = block + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < POSITIONS / 2; ++i) {
      const int position = at + i / 4 * 8 + i % 2, h = i / 2 % 2;
      if (position > sight.last[h] || position < sight.first[h]) s[i] = LOWEST;
    }
  }
  float now[2] = {so_far.most[0], so_far.most[1]}, base[2], sum[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < POSITIONS / 2; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
    now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
    base[h] = now[h] == LOWEST ? 0.0f : now[h] * unit;
    factor[h] = exp2_of(fmaf(so_far.most[h], unit, -base[h]));
    so_far.most[h] = now[h];
  }
#pragma unroll
  for (int i = 0; i < POSITIONS / 2; ++i) {
    s[i] = exp2_of(fmaf(s[i], unit, -base[i / 2 % 2]));
    sum[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) so_far.sum[h] = fmaf(so_far.sum[h], factor[h], sum[h]);
}

// Shares rounded, as the first factor of a product. The compiler takes the registers of such a factor for free once the product is issued, which
// still reads them: `none`, 0, and what they held are joined here, so that they keep it until the product has ended.
__device__ __forceinline__ void rounded(Shares& shares, const Scores& s, uint32_t none) {
#pragma unroll
  for (int i = 0; i < POSITIONS / 4; ++i) shares[i] = pack2<HALF>(s[2 * i], s[2 * i + 1]) | (shares[i] & none);
}

// The sum over the four lanes that have a row.
__device__ __forceinline__ float over_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What results of a token (of all sequences) and head are multiplied by, from element `at` on; null for 1.
__device__ __forceinline__ const uint16_t* gates_of(const Problem& p, int64_t token, int head, int at) {
  return p.gates == nullptr ? nullptr : p.gates + token * p.gate_token + head * p.gate_head + at * p.gate_step;
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(__expf(-fabsf(x))); }

// Two results, gated if there are gates, rounded. step: 1 if each has its own gate, 0 if both have one.
__device__ __forceinline__ uint32_t result(float one, float two, const uint16_t* gates, int step) {
  if (gates != nullptr) {
    const float2 gate = unpack2<OUT_HALF>(step ? *reinterpret_cast<const uint32_t*>(gates) : *gates * 0x10001u);
    if (SOFTPLUS) one *= softplus(gate.x), two *= softplus(gate.y);
    else one /= 1.0f + __expf(-gate.x), two /= 1.0f + __expf(-gate.y);
  }
  return pack2<OUT_HALF>(one, two);
}

__device__ __forceinline__ void write_out(const Problem& p, const Tile& tile, int row, Mixes& o, Softmax& softmax, float unit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h, token = r / p.group, head = tile.head * p.group + r % p.group;
    float sum = over_four(softmax.sum[h]);
    if (token >= p.n) continue;
    if (p.sinks != nullptr) sum += exp2_of(fmaf(p.sinks[head], LOG2E, -softmax.most[h] * (CAPPED ? 1.0f : unit)));
    const float inverse = 1.0f / sum;
    const int64_t of_all = int64_t(tile.sequence) * p.n + token;
    uint16_t* to = p.out + of_all * p.out_token + head * VALUE + lane % 4 * 2;
    const uint16_t* gates = gates_of(p, of_all, head, lane % 4 * 2);
#pragma unroll
    for (int b = 0; b < VALUE / 8; ++b)
      *reinterpret_cast<uint32_t*>(to + 8 * b) =
          result(o[4 * b + 2 * h] * inverse, o[4 * b + 2 * h + 1] * inverse, gates == nullptr ? nullptr : gates + 8 * b * p.gate_step, p.gate_step);
  }
}

// Where row `row` of a part of a tile is among all rows of `partial`.
__device__ __forceinline__ int64_t partial_row(const Problem& p, int part, int pair, int row) {
  return (int64_t(part) * p.pairs() + pair) * p.row_tiles() * ROWS + row;
}

// The largest score of a row and the sum of its shares, after all rows of `partial`.
__device__ __forceinline__ float2* partial_sums(const Problem& p) {
  return reinterpret_cast<float2*>(p.partial + partial_row(p, p.parts, 0, 0) * VALUE);
}

// What a part of the positions gives: for `flash_join`.
__device__ __forceinline__ void write_part(const Problem& p, const Tile& tile, int row, Mixes& o, Softmax& softmax, float unit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = over_four(softmax.sum[h]);
    const int64_t r = partial_row(p, tile.part, tile.pair, row + 8 * h);
    if (lane % 4 == 0) partial_sums(p)[r] = make_float2(softmax.most[h] * (CAPPED ? 1.0f : unit), sum);
    if (tile.empty()) continue;
#pragma unroll
    for (int b = 0; b < VALUE / 8; ++b)
      *reinterpret_cast<float2*>(p.partial + r * VALUE + 8 * b + lane % 4 * 2) = make_float2(o[4 * b + 2 * h], o[4 * b + 2 * h + 1]);
  }
}

__device__ __forceinline__ void release(uint32_t empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void consume(const Problem& p, const Places& at) {
  const int own = threadIdx.x / 128, within = own * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t q = at.q + own * 64 * 128;
  const float unit = CAPPED ? 2 * LOG2E * p.scale / p.cap : p.scale * LOG2E, cap = p.cap * LOG2E;
  Ring<STAGES> of_k, of_v;
  Scores s;
  Shares shares;
  Mixes o;
#pragma unroll
  for (int i = 0; i < POSITIONS / 2; ++i) s[i] = 0;
#pragma unroll
  for (int i = 0; i < POSITIONS / 4; ++i) shares[i] = 0;
  Tile tile;
  int taken = 0;
  if (own == GROUPS - 1) named_arrive<256>(TURN);
  for (int n = 0; find_tile(p, n, tile); ++n) {
    const int row = tile.row + within, start = p.total - p.n;
    Sight sight;
    Softmax softmax = {{LOWEST, LOWEST}, {0, 0}};
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sight.last[h] = start + min((row + 8 * h) / p.group, p.n - 1);
      sight.first[h] = p.window ? sight.last[h] - p.window + 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < VALUE / 2; ++i) o[i] = 0;
    if (tile.empty()) {
      write_part(p, tile, row, o, softmax, unit);
      continue;
    }
    barrier_wait(at.q_full, taken++ % 2);
    barrier_wait(at.k_full + 8 * of_k.stage, of_k.round);
    wgmma_fence();
    multiply_keys(s, q, at.k + of_k.stage * K_BYTES);
    wgmma_wait<0>();
    settle(s);
    release(at.k_empty + 8 * of_k.stage);
    of_k.next();
    shares_of(s, sight, tile.last * POSITIONS, unit, cap, softmax, factor);
    rounded(shares, s, p.none);
    for (int block = tile.last - 1; block >= tile.first; --block) {
      barrier_wait(at.k_full + 8 * of_k.stage, of_k.round);
      named_sync<256>(TURN + own);
      wgmma_fence();
      multiply_keys(s, q, at.k + of_k.stage * K_BYTES);
      barrier_wait(at.v_full + 8 * of_v.stage, of_v.round);
      multiply_values(o, shares, at.v + of_v.stage * V_BYTES);
      named_arrive<256>(TURN + (own + 1) % GROUPS);
      wgmma_wait<1>();
      settle(s);
      release(at.k_empty + 8 * of_k.stage);
      of_k.next();
      shares_of(s, sight, block * POSITIONS, unit, cap, softmax, factor);
      wgmma_wait<0>();
      settle(o);
      release(at.v_empty + 8 * of_v.stage);
      of_v.next();
      if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < VALUE / 2; ++i) o[i] *= factor[i / 2 % 2];
      }
      rounded(shares, s, p.none);
    }
    release(at.q_empty);
    barrier_wait(at.v_full + 8 * of_v.stage, of_v.round);
    wgmma_fence();
    multiply_values(o, shares, at.v + of_v.stage * V_BYTES);
    wgmma_wait<0>();
    settle(o);
    release(at.v_empty + 8 * of_v.stage);
    of_v.next();
    if (p.parts == 1) write_out(p, tile, row, o, softmax, unit);
    else write_part(p, tile, row, o, softmax, unit);
  }
}

#define PROBLEM                                                                                                                          \
  const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, int64_t q_token, int64_t k_token, int64_t v_token,              \
      int64_t out_token, int n, int total, int group, int heads, int sequences, int section, int parts, float *partial, int window,       \
      float scale, float cap, const float *sinks, const uint16_t *gates, int64_t gate_token, int64_t gate_head, int gate_step, uint32_t none
#define OF_PROBLEM                                                                                                                       \
  {q, k, v, out, q_token, k_token, v_token, out_token, n, total, group, heads, sequences, section, parts, partial, window, scale, cap,     \
   sinks, gates, gate_token, gate_head, gate_step, none}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) flash_attention(PROBLEM) {
  follow_launch_before();
#ifndef ON_HOST
  extern __shared__ uint8_t shared[];
#endif
  __shared__ uint64_t barriers[2 + 4 * STAGES];
  const Problem p = OF_PROBLEM;
  const uint32_t tile = (shared_address(shared) + 1023) / 1024 * 1024, bar = shared_address(barriers) + 16;
  const Places at = {tile, tile + Q_BYTES, tile + Q_BYTES + STAGES * K_BYTES, bar - 16, bar - 8,
                     bar, bar + 8 * STAGES, bar + 16 * STAGES, bar + 24 * STAGES};
  if (threadIdx.x == 0) {
    barrier_init(at.q_full, PRODUCERS), barrier_init(at.q_empty, CONSUMERS / 32);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(at.k_full + 8 * i, PRODUCERS), barrier_init(at.k_empty + 8 * i, CONSUMERS / 32);
      barrier_init(at.v_full + 8 * i, PRODUCERS), barrier_init(at.v_empty + 8 * i, CONSUMERS / 32);
    }
    show_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    fewer_registers<PRODUCER_REGISTERS>();
    produce(p, at);
  } else {
    more_registers<REGISTERS>();
    consume(p, at);
  }
}

// out = the rows of all parts joined, in their order. A warp for a row of a token and head.
extern "C" __global__ void __launch_bounds__(128) flash_join(PROBLEM) {
  follow_launch_before();
  const Problem p = OF_PROBLEM;
  const int lane = threadIdx.x % 32, every = p.heads * p.group, job = blockIdx.x * 4 + threadIdx.x / 32;
  if (job >= p.sequences * p.n * every) return;
  const int head = job % every, token = job / every % p.n, sequence = job / every / p.n, pair = sequence * p.heads + head / p.group;
  const int row = token * p.group + head % p.group;
  const float sink = p.sinks == nullptr ? LOWEST : p.sinks[head] * LOG2E;
  float most = sink, sum = 0, o[(VALUE + 63) / 64][2] = {};
  for (int part = 0; part < p.parts; ++part) most = fmaxf(most, partial_sums(p)[partial_row(p, part, pair, row)].x);
  if (p.sinks != nullptr) sum = exp2_of(sink - most);
  for (int part = 0; part < p.parts; ++part) {
    const int64_t r = partial_row(p, part, pair, row);
    const float2 of_part = partial_sums(p)[r];
    if (of_part.x == LOWEST) continue;
    const float share = exp2_of(of_part.x - most);
    sum = fmaf(of_part.y, share, sum);
#pragma unroll
    for (int i = 0; i < (VALUE + 63) / 64; ++i) {
      const int at = 64 * i + 2 * lane;
      if (at >= VALUE) break;
      const float2 two = *reinterpret_cast<const float2*>(p.partial + r * VALUE + at);
      o[i][0] = fmaf(two.x, share, o[i][0]), o[i][1] = fmaf(two.y, share, o[i][1]);
    }
  }
  const float inverse = 1.0f / sum;
  const int64_t of_all = int64_t(sequence) * p.n + token;
  uint16_t* to = p.out + of_all * p.out_token + head * VALUE;
#pragma unroll
  for (int i = 0; i < (VALUE + 63) / 64; ++i) {
    const int at = 64 * i + 2 * lane;
    if (at < VALUE)
      *reinterpret_cast<uint32_t*>(to + at) = result(o[i][0] * inverse, o[i][1] * inverse, gates_of(p, of_all, head, at), p.gate_step);
  }
}
