// EXPERT_DOWN, see experts.cu.
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
  const uint32_t ring = Ring<F>::of_warp(warp, N * A::BYTES);
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
  take_activations<F, N, false>(x + (int64_t)token * N * COLS, nullptr, nullptr, shared_memory);
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
