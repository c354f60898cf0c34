// EXPERT_GATE_UP, EXPERT_GATE and EXPERT_GATE_BY, see experts.cu.
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
#if WEIGHED
    , const float* weighing
#endif
    ) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.y;
  const int always = SHARED_SLOTS ? shared_rows : 0, stride = gridDim.x * WARPS, begin = first_item(warp);
  int items = always + slots * hidden;   // with SOME_ABSENT, slots that are not absent are counted from 0 on
  const uint32_t ring = Ring<F>::of_warp(warp, A::BYTES);
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
  take_activations<F, 1, !PLAIN, false>(h + (int64_t)token * COLS, norm_weight, squares, shared_memory);   // while the router still chooses
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
  const float factor = PLAIN ? 1.0f : norm_factor(squares[0], eps);

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
#if WEIGHED
      if (!shared) scale[k] *= __ldcg(weighing + token * WEIGHED + slot + moved / hidden);
#endif
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
      if (SCALED || SHARED_SCALED || WEIGHED) y[k] *= scale[k];
      if (BIASED) y[k] += bias[k];
    }
    const float result = KIND == 0 ? joined(y[0], y[R - 1]) : KIND == 3 ? joined(before, y[0]) : y[0];
    if (item == begin) STAMP(FIRST_ITEM);
    if (lane == 0) *(shared ? shared_out + token * shared_pitch + item : out + token * pitch + item - always + moved) = expert >= 0 ? result : 0.0f;
  }
  STAMP(ENDED);
}
