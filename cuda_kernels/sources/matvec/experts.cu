// Products with the experts that a router chose, for each token on its own: blockIdx.y is the token.
//
// Macros as for matvec.cu (X_ROWS is 1 for gates, and the number of experts per token for EXPERT_DOWN) and KIND:
// EXPERT_GATE_UP  out[token, slot] = joined(G norm(h), U norm(h)) with the matrices of expert ids[token, slot] (units/gating.cuh)
// EXPERT_GATE     out[token, slot] = G norm(h), where gate and up are of two types; EXPERT_GATE_BY  out = joined(out, U norm(h))
// EXPERT_DOWN     h[token] += sum over slots, in ascending order, of weights[token, slot] * D x[token, slot]
// BIASED: products have a bias per expert and row, SCALED: a factor per expert; a null pointer stands for none. SHARED_SCALED: a shared
// expert's matrices have factors, too.
//
// STAGE_ROWS, for EXPERT_DOWN: slots of an item. Fewer than all: an item is a part of a row, and the sums of a row's parts are added in their order at the
// end, from shared memory. So stages are shorter, more of them are on their way, and warps have more nearly as much to do.
//
// JOINED_SLOTS, for EXPERT_DOWN with rows that are one stage and no multiple of a step: lanes take the granules of an item's rows one after
// the other, as if they were one row. So a step has a granule for every lane, and slots in shared memory are no longer than rows.
//
// SHARED_SLOTS, for EXPERT_GATE_UP: there is a shared expert, which all tokens use. Its rows come first, as no choice is needed to fetch them.
// For EXPERT_DOWN: so many slots after those of the router are its columns. `ids` are of the other slots, `weights` of all.
//
// A slot with a negative id contributes 0. SOME_ABSENT: there are such slots, as another device has their experts or they count for too little,
// and they take no time; without it such a slot takes as long as others.
//
// EXPERT_GATE_UP knows which weights it needs when the kernel in front, the router, has ended. Until
// then it norms and rounds h, which must be older than that kernel: the router lets it start when h is complete.
// EXPERT_DOWN follows it, and may not start before that, so it reads the choice at once: `ids` and `weights` must be older than the kernel
// in front of it.
#include "matvec/feed.cuh"
#include "units/gating.cuh"

#ifndef SHARED_SLOTS
#define SHARED_SLOTS 0
#endif
#ifndef SHARED_SCALED
#define SHARED_SCALED 0
#endif

typedef Format<TYPE> F;
typedef Activations<F> A;

// The place of the lane-th bit that is set, 31 if there is none.
DEV int place_of_bit(uint32_t bits, int lane) {
  int at = 0;
  #pragma unroll
  for (int width = 16; width; width /= 2) {
    const int below = __popc(bits >> at & ((1u << width) - 1));
    if (lane >= below) lane -= below, at += width;
  }
  return at;
}

#if KIND != 1

// The sums over a warp of two values, right in lane 0.
DEV void pair_sums(float& a, float& b, int lane) {
  const bool upper = lane & 16;
  float mine = upper ? b : a, other = upper ? a : b;
  mine += __shfl_xor_sync(~0u, other, 16);
  #pragma unroll
  for (int o = 8; o; o >>= 1) mine += __shfl_xor_sync(~0u, mine, o);
  a = mine, b = __shfl_xor_sync(~0u, mine, 16);
}
// The slot and the row of an item, by a product instead of a division, whose quotient may be one too small.
struct Place { int slot, row; };
struct Places {
  const int hidden;
  const uint32_t inverse;
  __device__ __forceinline__ Places(int hidden) : hidden(hidden), inverse(0xFFFFFFFFu / hidden) {}
  __device__ __forceinline__ Place of(int item) const {
    const int slot = __umulhi(item, inverse), row = item - slot * hidden;
    return row < hidden ? Place{slot, row} : Place{slot + 1, row - hidden};
  }
};

// Rows of expert e: gate rows from e * per_expert on, up rows from e * per_expert + first_up on. Of the shared expert shared_rows of each; up
// from row shared_stored - shared_rows on, of its own matrix or of that of both. pitch: from token to token.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KERNEL(
    const float* h, const float* norm_weight, float eps, const uint8_t* gate, const uint8_t* up, int64_t stored, int per_expert,
    int first_up, const int* ids, int slots, int hidden, const float* gate_bias, const float* up_bias, const float* gate_scale,
    const float* up_scale, const uint8_t* shared_gate, const uint8_t* shared_up, int64_t shared_stored, int shared_rows, float* shared_out,
    int64_t shared_pitch, int64_t pitch, float* out
#if SHARED_SCALED
    , float shared_gate_scale, float shared_up_scale
#endif
    ) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.y;
  const int always = SHARED_SLOTS ? shared_rows : 0, stride = gridDim.x * WARPS, begin = first_item(warp);
  int items = always + slots * hidden;   // with SOME_ABSENT, slots that are not absent are counted from 0 on
  const uint32_t ring = shared_address(shared_memory) + A::BYTES + warp * Ring<F>::BYTES;
  const typename F::Lane constants(lane);
  const Places places(hidden);
  int mine = -1, original = lane;   // slot lane's expert, and its place among all slots

  int64_t routed = 0;   // row of an item's expert
  auto source = [&](int item, int k) -> Row {   // k = 0 comes before k = 1, which needs no shuffle of its own
    if (SHARED_SLOTS && item < always)
      return k == 0 ? Row{shared_gate, shared_stored, item} : Row{shared_up, shared_stored, item + shared_stored - shared_rows};
    if (k == 0) {
      const Place at = places.of(item - always);
      routed = (int64_t)max(__shfl_sync(~0u, mine, at.slot), 0) * per_expert + at.row;
    }
    return k == 0 ? Row{gate, stored, routed} : Row{up, stored, routed + first_up};
  };
  auto end = [&](int item) { return SHARED_SLOTS && item < always ? always : item - places.of(item - always).row + hidden; };
  auto matrices = feed_later<F>(items_of<1>(source, end), begin, items, stride, lane, ring);
  const int early = SHARED_SLOTS ? matrices.fill(0, always) : 0;
  prepare_unit<TYPE>();
  static __shared__ float squares[1][WARPS];
  quantize<F, 1, true, false>(h + (int64_t)token * COLS, norm_weight, squares, shared_memory);   // while the router still chooses
  __syncthreads();   // not after the first stages, where every warp would wait until all have requested theirs
  STAMP(INPUT_READY);
  wait_for_predecessor();
  STAMP(WAIT_ENDED);
  allow_successor();   // not earlier: it reads the router's choice as soon as it starts
  if (lane < slots) mine = __ldcg(ids + token * slots + lane);
#if SOME_ABSENT
  const uint32_t present = __ballot_sync(~0u, mine >= 0);
  original = place_of_bit(present, lane), mine = __shfl_sync(~0u, mine, original);
  matrices.items = items = always + __popc(present) * hidden;
  for (int slot = 0; slot < slots; slot++)
    for (int i = blockIdx.x * THREADS + threadIdx.x; !(present >> slot & 1) && i < hidden; i += gridDim.x * THREADS)
      out[token * pitch + slot * hidden + i] = 0;
#endif
  matrices.fill(early, items);
  STAMP(REQUESTED);
  const float factor = norm_factor(squares[0], eps);

  const uint32_t words = shared_address(shared_memory) + 16 * lane, records = words + 16 * A::PARTS * A::GRANULES - (16 - A::RECORD) * lane;
  int slot = -1, slot_end = always, expert = 0;   // of the item: the first item of the next slot; without a division for each item
  int64_t shift = 0;                          // from an item to its row
  int moved = 0;                              // from a slot that is not absent to its place in the result
  #pragma unroll 1
  for (int item = begin; item < items; item += stride) {
    const bool shared = item < always;
    if (item >= slot_end) {
      while (item >= slot_end) slot++, slot_end += hidden;
      expert = __shfl_sync(~0u, mine, slot);
      shift = (int64_t)max(expert, 0) * per_expert - slot * hidden - always;
      if (SOME_ABSENT) moved = (__shfl_sync(~0u, original, slot) - slot) * hidden;
    }
    const int64_t row = shift + item, of_matrices = shared ? shared_stored : stored;
    const int64_t up_from = shared ? shared_stored - shared_rows : first_up;
    const float *biases[2] = {gate_bias, up_bias}, *scales[2] = {gate_scale, up_scale};
    const float before = KIND == 3 && lane == 0 ? __ldcg(out + token * pitch + item + moved) : 0;
    float sum[R], by[R], bias[R], scale[R];   // what is not a sum is asked for here and needed at the end
    uint32_t header[R];
    #pragma unroll
    for (int k = 0; k < R; k++) {
      sum[k] = bias[k] = 0, by[k] = scale[k] = 1;
      if (BIASED && biases[k] && !shared) bias[k] = __ldg(biases[k] + row + k * first_up);
      if (SCALED && scales[k] && !shared) scale[k] = __ldg(scales[k] + max(expert, 0));
#if SHARED_SCALED
      if (shared) scale[k] = k ? shared_up_scale : shared_gate_scale;
#endif
      if (F::ROW_FACTOR && !F::HEADER_STAGED) {
        const uint8_t* matrix = k ? shared ? shared_up : up : shared ? shared_gate : gate;
        header[k] = row_header_bits<F>(matrix, of_matrices, row + k * up_from);
      }
    }
    #pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      matrices.wait();
      if (item == begin && chunk == 0) STAMP(WEIGHTS_THERE);
      Stage stage[R];
      #pragma unroll
      for (int k = 0; k < R; k++) {
        stage[k] = Ring<F>::stage(matrices.slot + k * Ring<F>::ROW, row + k * up_from, chunk);
        if (F::HEADER_STAGED && chunk == 0) by[k] = Ring<F>::row_factor(matrices.slot + k * Ring<F>::ROW, row + k * up_from);
      }
      #pragma unroll (ROLLED ? 1 : P)
      for (int p = 0; p < P; p++) {
        if (!has_step(chunk, p)) break;
        const typename F::Input in = F::input(words + chunk * (512 * P), records + chunk * (32 * A::RECORD * P), p);
        typename F::Weights w[R];
        #pragma unroll
        for (int k = 0; k < R; k++) w[k] = F::prepare(F::load(stage[k], p, lane), constants, lane);
        float v[R];
        products<F, R>(w, in, v);
        #pragma unroll
        for (int k = 0; k < R; k++) {
          if (COLS % (32 * F::G * STEPS)) v[k] = (chunk * P + p) * 32 + lane < COLS / F::G ? v[k] : 0;   // past a row's end there is arbitrary data
          sum[k] += v[k];
        }
      }
      matrices.next();
    }
    float y[R];
    if (R == 2) pair_sums(sum[0], sum[R - 1], lane);
    else sum[0] = warp_sum(sum[0]);
    #pragma unroll
    for (int k = 0; k < R; k++) {
      y[k] = sum[k] * (F::HEADER_STAGED ? factor * by[k] : factor);
      if (F::ROW_FACTOR && !F::HEADER_STAGED) y[k] *= F::row_factor(header[k]);
      if (SCALED || SHARED_SCALED) y[k] *= scale[k];
      if (BIASED) y[k] += bias[k];
    }
    const float result = KIND == 0 ? joined(y[0], y[R - 1]) : KIND == 3 ? joined(before, y[0]) : y[0];
    if (item == begin) STAMP(FIRST_ITEM);
    if (lane == 0) *(shared ? shared_out + token * shared_pitch + item : out + token * pitch + item - always + moved) = expert >= 0 ? result : 0.0f;
  }
  STAMP(ENDED);
}

#else

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) expert_down(
    const float* x, const uint8_t* down, int64_t stored, int rows, const int* ids, const float* weights, const float* bias,
    const float* scale, const uint8_t* shared_down, float* h
#if SHARED_SCALED
    , float shared_scale
#endif
    ) {
  constexpr int ROUTED = N - SHARED_SLOTS;
  constexpr bool DIVIDED = R < N;
  constexpr int PARTS = N / R;
  static_assert(N % R == 0 && !(DIVIDED && ADVANCES), "parts of a row have as many slots, and each its own pointers");
  allow_successor();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.y;
  float* const sums = (float*)(shared_memory + N * A::BYTES + WARPS * Ring<F>::BYTES);   // of parts
  const uint32_t ring = shared_address(shared_memory) + N * A::BYTES + warp * Ring<F>::BYTES;
  const typename F::Lane constants(lane);
  prepare_unit<TYPE>();
  const int mine = lane < ROUTED ? __ldcg(ids + token * ROUTED + lane) : lane < N ? 0 : -1;
  const bool shared = SHARED_SLOTS && lane >= ROUTED;
  const float share = mine >= 0 ? __ldcg(weights + token * N + lane) : 0.0f;
#if SHARED_SCALED
  const float own = shared ? shared_scale * share : share;
#else
  const float own = share;
#endif
  const float factor = SCALED && scale && share != 0 && !shared ? share * __ldg(scale + mine) : own;
#if SOME_ABSENT
  const uint32_t present = __ballot_sync(~0u, mine >= 0);
  const int kept = __popc(present), kth = place_of_bit(present, lane), before_lane = __popc(present & ((1u << lane) - 1));
  const int parts = DIVIDED ? (kept + R - 1) / R : 1;   // of the slots that are there
#else
  constexpr uint32_t present = ~0u;
  constexpr int parts = PARTS;
#endif

  // Items are rows, or parts of the block's rows: R slots, of which place k has slot_at(item, k).
  const int block_rows = (rows + (int)gridDim.x - 1 - (int)blockIdx.x) / (int)gridDim.x, items = DIVIDED ? parts * block_rows : rows;
  const int stride = DIVIDED ? WARPS : gridDim.x * WARPS, begin = DIVIDED ? warp : first_item(warp);
  const auto row_of_block = [&](int i) { return i * (int)gridDim.x + (int)blockIdx.x; };
  const auto row_in_matrix = [&](int item) { return DIVIDED ? row_of_block(item / parts) : item; };
  const auto first_place = [&](int item) { return DIVIDED ? item % parts * R : 0; };   // of all that are there
  const auto slot_at = [&](int item, int k) {
#if SOME_ABSENT
    if (DIVIDED) return __shfl_sync(~0u, kth, min(first_place(item) + k, 31));
#endif
    return first_place(item) + k;
  };

  // A row of the shared expert is SHARED_SLOTS rows of COLS elements, as if it were a matrix of more rows.
  auto row_of = [&](int item, int slot) -> int64_t {
    const int64_t of_all = row_in_matrix(item), routed = (int64_t)max(__shfl_sync(~0u, mine, slot), 0) * rows + of_all;
    return SHARED_SLOTS && slot >= ROUTED ? of_all * SHARED_SLOTS + slot - ROUTED : routed;
  };
  auto source = [&](int item, int k) -> Row {   // the same piece of a row of every slot's expert
    const int slot = slot_at(item, k);
    const int64_t row = row_of(item, slot);
    return SHARED_SLOTS && slot >= ROUTED ? Row{shared_down, (int64_t)rows * SHARED_SLOTS, row} : Row{down, stored, row};
  };
  auto end = [&](int) { return items; };
#if SOME_ABSENT
  const uint32_t places = !DIVIDED ? present : kept < 32 ? (1u << kept) - 1 : ~0u;
#else
  constexpr uint32_t places = ~0u;
#endif
  auto matrices = feed<F>(items_of<1, ROUTED, SHARED_SLOTS>(source, end, first_place), begin, items, stride, lane, ring, places);
  const auto own_row = [&](int item) { return shared ? (int64_t)row_in_matrix(item) : (int64_t)mine * rows + row_in_matrix(item); };   // slot lane's, where rows have factors
#if SOME_ABSENT
  const int own_place = DIVIDED ? mine >= 0 ? before_lane : -R : lane;   // of slot lane
#else
  const int own_place = lane;
#endif
  const auto takes_part = [&](int item) { return item < items && (!DIVIDED || (own_place >= first_place(item) && own_place < first_place(item) + R)); };
  quantize<F, N, false>(x + (int64_t)token * N * COLS, nullptr, nullptr, shared_memory);
  __syncthreads();
  STAMP(INPUT_READY);

  const uint32_t words = shared_address(shared_memory) + 16 * lane, records = words + 16 * A::PARTS * A::GRANULES - (16 - A::RECORD) * lane;
  const auto header_of = [&](int item) {   // of slot lane's row; asked for an item before it is needed
    return F::ROW_FACTOR && !F::HEADER_STAGED && factor != 0 && takes_part(item) ? row_header_bits<F>(shared ? shared_down : down, shared ? rows : stored, own_row(item)) : 0u;
  };
  const auto bias_of = [&](int item) { return BIASED && bias && share != 0 && !shared && takes_part(item) ? __ldg(bias + own_row(item)) : 0.0f; };
  const float first_before = DIVIDED && (int)threadIdx.x < block_rows ? h[(int64_t)token * rows + row_of_block(threadIdx.x)] : 0.0f;
  uint32_t header = header_of(begin);
  float added = bias_of(begin);   // to slot lane's product
  #pragma unroll 1
  for (int item = begin; item < items; item += stride) {
    float sum = share * added, before = lane == 0 && !DIVIDED ? h[(int64_t)token * rows + item] : 0.0f, weight = factor;   // slot lane's, times its row's factor
    const int from = first_place(item);
    if (F::ROW_FACTOR && !F::HEADER_STAGED) weight = factor != 0 ? factor * F::row_factor(header) : 0.0f;
    header = header_of(item + stride);
    if (BIASED) added = bias_of(item + stride);
    #pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      matrices.wait();
      if (item == begin && chunk == 0) STAMP(WEIGHTS_THERE);
      if (F::HEADER_STAGED && chunk == 0 && factor != 0 && takes_part(item))
        weight *= Ring<F>::row_factor(matrices.slot + (own_place - from) * Ring<F>::ROW, own_row(item));
      constexpr int OF_ROW = COLS / F::G, ALL = JOINED_SLOTS ? R * OF_ROW : 0;
      #pragma unroll (ROLLED ? 1 : 32)
      for (int first = 0; first < ALL; first += 32) {
#if SOME_ABSENT
        const int there = DIVIDED ? min(R, kept - from) : kept, all = there * OF_ROW;
        if (first >= all) break;
        const int at = first + lane, of_kept = min(at / OF_ROW, there - 1), granule = min(at - of_kept * OF_ROW, OF_ROW - 1);
        const int slot = __shfl_sync(~0u, kth, from + of_kept), place = DIVIDED ? of_kept : slot;
#else
        const int all = ALL, at = first + lane, place = min(at / OF_ROW, R - 1), slot = from + place, granule = min(at - place * OF_ROW, OF_ROW - 1);
#endif
        const int64_t row = row_of(item, slot);
        const float by = __shfl_sync(~0u, weight, slot);
        const Stage stage = Ring<F>::stage(matrices.slot + place * Ring<F>::ROW, row, 0);
        const typename F::Weights w[1] = {F::prepare(F::load(stage, 0, granule), constants, granule)};
        const uint32_t x = shared_address(shared_memory) + slot * A::BYTES + 16 * granule;
        float v[1];
        products<F, 1>(w, F::input(x, x + 16 * A::PARTS * A::GRANULES, 0), v);
        if (by != 0 && at < all) sum += by * v[0];   // keeps out, too, what is not a number in an expert that nobody chose
      }
      #pragma unroll (ROLLED ? 1 : R)
      for (int k = 0; k < (JOINED_SLOTS ? 0 : R); k++) {
        if (!matrices.has(item, k)) continue;
        const int slot = slot_at(item, k);
        const int64_t row = row_of(item, slot);
        const float by = __shfl_sync(~0u, weight, slot);
        float part = 0;
        const Stage stage = Ring<F>::stage(matrices.slot + k * Ring<F>::ROW, row, chunk);
        #pragma unroll (ROLLED ? 1 : P)
        for (int p = 0; p < P; p++) {
          if (!has_step(chunk, p)) break;
          const int at = chunk * P;
          const typename F::Weights w[1] = {F::prepare(F::load(stage, p, lane), constants, lane)};
          float v[1];
          products<F, 1>(w, F::input(words + slot * A::BYTES + at * 512, records + slot * A::BYTES + at * (32 * A::RECORD), p), v);
          if (COLS % (32 * F::G * STEPS)) v[0] = (at + p) * 32 + lane < COLS / F::G ? v[0] : 0;   // past a row's end there is arbitrary data
          part += v[0];
        }
        if (by != 0) sum += by * part;   // as above
      }
      matrices.next();
    }
    sum = warp_sum(sum);
    if (item == begin) STAMP(FIRST_ITEM);
    if (lane == 0) *(DIVIDED ? sums + item : h + (int64_t)token * rows + item) = before + sum;
  }
  STAMP(ENDED);
  if (!DIVIDED) return;
  __syncthreads();
  for (int i = threadIdx.x; i < block_rows; i += THREADS) {
    float sum = 0;
    #pragma unroll
    for (int part = 0; part < PARTS; part++) sum += part < parts ? sums[parts * i + part] : 0;
    float* to = h + (int64_t)token * rows + row_of_block(i);
    *to = (i < THREADS ? first_before : *to) + sum;
  }
  STAMP(ENDED);
}

#endif
