// A warp's pipeline: the stages of its items, one after the other, on their way from device memory to its ring in shared memory.
//
// What is on its way needs no registers. A block's first stages load while the kernel in front of it ends: weights depend on no kernel.
#include "matvec/ring.cuh"

// The first item of a warp. ACROSS: neighbouring items are in different blocks, so that no block has more than one item more than another;
// else in one block.
DEV int first_item(int warp) { return ACROSS ? warp * gridDim.x + blockIdx.x : blockIdx.x * WARPS + warp; }

struct Row { const uint8_t* base; int64_t stored, row; };   // of a packed matrix of `stored` rows

// The rows of weights of items: at(item, k) is the k-th one; all lanes call it together. Items from one on and below end(item) have theirs
// in the same matrices, `EACH` rows further on from item to item; LAST_EACH for those from the FROM-th one on.
// Of the bits of a feed's `present` those from first(item) on are for the item's rows.
struct Zero { __device__ __forceinline__ int operator()(int) const { return 0; } };
template <int EACH, int FROM, int LAST_EACH, class At, class End, class First> struct Items {
  CONST int each(int k) { return k < FROM ? EACH : LAST_EACH; }
  At at;
  End end;
  First first;
};
template <int EACH, int FROM = R, int LAST_EACH = EACH, class At, class End, class First = Zero>
DEV Items<EACH, FROM, LAST_EACH, At, End, First> items_of(At at, End end, First first = {}) {
  return {at, end, first};
}

#ifndef PACED
#define PACED 0
#endif
#ifndef SOME_ABSENT
#define SOME_ABSENT 0
#endif

template <class F, class Rows> struct Feed {
  typedef Ring<F> G;
  static constexpr bool KEPT = ADVANCES;   // pointers to pieces advance from stage to stage, or each stage works them out
  const Rows rows;
  int items;
  const int stride, lane;
  const uint32_t ring;       // of the warp
  uint32_t slot;             // of the stage that is read next
  int item, chunk = 0;       // of the stage that is fetched next
  int steady = 0;            // items below it need no new pointers
  const uint32_t present;    // bit first(item) + k: the k-th row of an item is there to fetch; read with SOME_ABSENT
  const uint8_t* from[KEPT ? R * F::STAGED : F::STAGED];

  __device__ __forceinline__ Feed(const Rows& rows, int begin, int items, int stride, int lane, uint32_t ring, uint32_t present)
      : rows(rows), items(items), stride(stride), lane(lane), ring(ring), slot(ring), item(begin), present(present) {}

  __device__ __forceinline__ bool has(int of_item, int k) const { return !SOME_ABSENT || present >> (rows.first(of_item) + k) & 1; }

  // Starts the copies of the first stages, from stage s on, while they are of items below `until`, the number of items for all. Returns the
  // next stage. PACED: a stage is copied when the one before is there. The kernel in front still runs and reads its activations, which
  // would otherwise wait for all copies of this one.
  __device__ __forceinline__ int fill(int s, int until) {
    uint32_t to = ring + s * G::SLOT;
    #pragma unroll 1
    for (; s < SLOTS && (until >= items || item < until); s++) {
      fetch(to);
      advance_address<G::SLOT>(to);
      if (PACED && s + 1 < SLOTS) wait_for_copies<0>();
    }
    return s;
  }

  __device__ __forceinline__ void aim(const Row& r, int k) { aim_from<0>(r, F::geometry(r.stored, COLS), k); }

  template <int p> __device__ __forceinline__ void aim_from(const Row& r, const Geometry& g, int k) {
    if constexpr (p < F::STAGED) {
      from[k * F::STAGED + p] = r.base + g.plane[p] + G::offset(p, r.row, chunk);
      aim_from<p + 1>(r, g, k);
    }
  }

  __device__ __forceinline__ void header(uint32_t to, const Row& r) {
    if constexpr (F::HEADER_STAGED) G::fetch_header(to, r.base + F::geometry(r.stored, COLS).plane[F::HEADER_PLANE], r.row, lane);
  }

  // The pieces of plane p and those after it of the stage's row k.
  template <int p> __device__ __forceinline__ void fetch_from(uint32_t to, int k) {
    if constexpr (p < F::STAGED) {
      const uint8_t*& here = from[KEPT ? k * F::STAGED + p : p];
      G::template fetch<p>(to, here, chunk, lane);
      if (KEPT) here += chunk < CHUNKS - 1 ? G::piece(p) : G::jump(p, stride * Rows::each(k));
      fetch_from<p + 1>(to, k);
    }
  }

  __device__ __forceinline__ void fetch(uint32_t to) {
    if (item < items) {
      if (KEPT && chunk == 0 && item >= steady) {
        steady = rows.end(item);
        #pragma unroll
        for (int k = 0; k < R; k++)
          if (has(item, k)) aim(rows.at(item, k), k);
      }
      if (F::HEADER_STAGED && chunk == 0)
        #pragma unroll
        for (int k = 0; k < R; k++)
          if (has(item, k)) header(to + k * G::ROW, rows.at(item, k));
      #pragma unroll
      for (int k = 0; k < R; k++) {
        if (!has(item, k)) continue;
        if (!KEPT) aim(rows.at(item, k), 0);
        fetch_from<0>(to + k * G::ROW, k);
      }
    }
    commit_copies();
    if (++chunk == CHUNKS) {
      chunk = 0;
      item += stride;
    }
  }

  // Waits for the next stage: then it is in `slot`.
  __device__ __forceinline__ void wait() {
    wait_for_copies<SLOTS - 1>();
    __syncwarp();
  }

  // All lanes have read it: its slot takes in another one.
  __device__ __forceinline__ void next() {
    __syncwarp();
    fetch(slot);
    slot = slot == ring + (SLOTS - 1) * G::SLOT ? ring : slot + G::SLOT;
  }
};
// Without copies until `fill`.
template <class F, class Rows> DEV Feed<F, Rows> feed_later(const Rows& rows, int begin, int items, int stride, int lane, uint32_t ring) {
  return {rows, begin, items, stride, lane, ring, ~0u};
}
template <class F, class Rows> DEV Feed<F, Rows> feed(const Rows& rows, int begin, int items, int stride, int lane, uint32_t ring, uint32_t present = ~0u) {
  Feed<F, Rows> all(rows, begin, items, stride, lane, ring, present);
  all.fill(0, items);
  return all;
}
