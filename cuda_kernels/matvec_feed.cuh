// A warp's pipeline: the stages of its items, one after the other, on their way from device memory to its ring in shared memory.
//
// Macros: as for matvec_ring.cuh, and BULK_COPIES: whether the bulk engine copies, where there is one (sm_90 on) and planes suit it.
// What is on its way needs no registers. A block's first stages load while the kernel in front of it ends: weights depend on no kernel.
#include "matvec_ring.cuh"

struct Row { const uint8_t* base; int64_t stored, row; };   // of a packed matrix of `stored` rows

// The rows of weights of items: at(item, k) is the k-th one; all lanes call it together, also for k that no item has. Items from one on
// and below end(item) have theirs in the same matrices, EACH rows further on from item to item.
template <int N_EACH, class At, class End> struct Items {
  static constexpr int EACH = N_EACH;
  At at;
  End end;
};
template <int N_EACH, class At, class End> DEV Items<N_EACH, At, End> items_of(At at, End end) { return {at, end}; }

// All lanes copy 16 bytes at a time. Pointers to pieces are kept where there are few.
template <class F, class Rows, bool BULK> struct Copies {
  typedef Ring<F> G;
  static constexpr int COUNT = R * F::STAGED;
  static constexpr bool KEPT = COUNT <= 6;
  const uint8_t* from[KEPT ? COUNT : F::STAGED];
  int steady = 0;   // items below it need no new pointers

  __device__ __forceinline__ Copies(int, uint32_t, int) {}

  __device__ __forceinline__ void start(const Rows& rows, int item, int chunk, int stride, int lane, uint32_t slot, uint32_t) {
    if (KEPT && chunk == 0 && item >= steady) {
      steady = rows.end(item);
      #pragma unroll
      for (int k = 0; k < R; k++) aim(rows.at(item, k), k, 0);
    }
    #pragma unroll
    for (int k = 0; k < R; k++) {
      if (!KEPT) aim(rows.at(item, k), 0, chunk);
      #pragma unroll
      for (int p = 0; p < F::STAGED; p++) {
        const uint8_t*& here = from[KEPT ? k * F::STAGED + p : p];
        G::fetch(p, slot + k * G::ROW, here, chunk, lane);
        here += chunk < CHUNKS - 1 ? G::step(p) : G::template jump<Rows::EACH>(p, stride);
      }
    }
  }

  __device__ __forceinline__ void aim(const Row& r, int k, int chunk) {
    const Geometry g = F::geometry(r.stored, COLS);
    #pragma unroll
    for (int p = 0; p < F::STAGED; p++) from[k * F::STAGED + p] = r.base + g.plane[p] + G::offset(p, r.row, chunk);
  }

  DEV void commit() { commit_copies(); }
  __device__ __forceinline__ void wait(uint32_t, uint32_t) {
    wait_for_copies<SLOTS - 1>();
    __syncwarp();
  }
};

// The bulk engine copies: each lane starts one piece of a stage, with a pointer that goes on from stage to stage. A barrier per slot counts
// the bytes that have come.
template <class F, class Rows> struct Copies<F, Rows, true> {
  typedef Ring<F> G;
  static constexpr int COUNT = R * F::STAGED, TURNS = (COUNT + 31) / 32;   // pieces of a stage; of them for a lane
  struct Piece { const uint8_t* from; uint32_t to; int bytes, last, step, jump; } pieces[TURNS];
  int steady = 0;
  // Whether the rows of following items are a multiple of 16 bytes away.
  CONST bool even(int p = 0) { return p == F::STAGED || ((G::aligned(p) || WARPS * F::row_bytes(p) % 16 == 0) && even(p + 1)); }
  CONST int bytes_of_row(bool last, int p = 0) {
    return p == F::STAGED ? 0 : (last ? G::last_bulk(p) : G::bulk(p)) + bytes_of_row(last, p + 1);
  }

  __device__ __forceinline__ Copies(int lane, uint32_t barriers, int stride) {
    if (lane < SLOTS) start_barrier(barriers + 8 * lane);
    barriers_started();
    __syncwarp();
    #pragma unroll
    for (int t = 0; t < TURNS; t++) {
      const int k = (32 * t + lane) / F::STAGED, mine = (32 * t + lane) % F::STAGED;
      #pragma unroll
      for (int p = 0; p < F::STAGED; p++)
        if (p == mine)
          pieces[t] = {nullptr, uint32_t(k * G::ROW + G::begin(p)), G::bulk(p), G::last_bulk(p), G::step(p),
                       G::template jump<Rows::EACH>(p, stride)};
    }
  }

  __device__ __forceinline__ void aim(const Rows& rows, int item, int lane) {
    steady = even() ? rows.end(item) : item;
    #pragma unroll
    for (int t = 0; t < TURNS; t++) {
      const int mine = (32 * t + lane) % F::STAGED;
      const Row r = rows.at(item, (32 * t + lane) / F::STAGED);
      const Geometry g = F::geometry(r.stored, COLS);
      #pragma unroll
      for (int p = 0; p < F::STAGED; p++)
        if (p == mine) pieces[t].from = r.base + g.plane[p] + (r.row * F::row_bytes(p) & (G::in_line(p) ? ~int64_t(15) : ~int64_t(0)));
    }
  }

  __device__ __forceinline__ void start(const Rows& rows, int item, int chunk, int, int lane, uint32_t slot, uint32_t barrier) {
    if (chunk == 0 && item >= steady) aim(rows, item, lane);
    const bool last = chunk == CHUNKS - 1;
    if (lane == 0) expect_bytes(barrier, last ? R * bytes_of_row(true) : R * bytes_of_row(false));
    #pragma unroll
    for (int t = 0; t < TURNS; t++)
      if (32 * t + lane < COUNT) {
        copy_bulk(slot + pieces[t].to, pieces[t].from, last ? pieces[t].last : pieces[t].bytes, barrier);
        pieces[t].from += last ? pieces[t].jump : pieces[t].step;
      }
  }
  DEV void commit() {}
  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) { wait_for_bytes(barrier, parity); }
};

template <class F, class Rows> struct Feed {
  const Rows rows;
  const int items, stride, lane;
  const uint32_t ring, barriers;        // of the warp; a barrier is 8 bytes
  uint32_t slot, barrier, parity = 0;   // of the stage that is read next
  int item, chunk = 0;                  // of the stage that is fetched next
  Copies<F, Rows, BULK_COPIES && HAS_BULK_COPIES && Ring<F>::in_bulk(0)> copies;

  __device__ __forceinline__ Feed(const Rows& rows, int begin, int items, int stride, int lane, uint32_t ring, uint32_t barriers)
      : rows(rows), items(items), stride(stride), lane(lane), ring(ring), barriers(barriers), slot(ring), barrier(barriers), item(begin),
        copies(lane, barriers, stride) {
    #pragma unroll 1
    for (int s = 0; s < SLOTS; s++) fetch(ring + s * Ring<F>::SLOT, barriers + 8 * s);
  }

  __device__ __forceinline__ void fetch(uint32_t to, uint32_t counter) {
    if (item < items) copies.start(rows, item, chunk, stride, lane, to, counter);
    copies.commit();
    if (++chunk == CHUNKS) {
      chunk = 0;
      item += stride;
    }
  }

  // Waits for the next stage: then it lies in `slot`.
  __device__ __forceinline__ void wait() { copies.wait(barrier, parity); }

  // All lanes have read it: its slot takes in another one.
  __device__ __forceinline__ void next() {
    __syncwarp();
    fetch(slot, barrier);
    const bool around = slot == ring + (SLOTS - 1) * Ring<F>::SLOT;
    slot = around ? ring : slot + Ring<F>::SLOT;
    barrier = around ? barriers : barrier + 8;
    parity ^= around;
  }
};
template <class F, class Rows>
DEV Feed<F, Rows> feed(const Rows& rows, int begin, int items, int stride, int lane, uint32_t ring, uint32_t barriers) {
  return {rows, begin, items, stride, lane, ring, barriers};
}
