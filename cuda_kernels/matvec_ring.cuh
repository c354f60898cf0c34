// A warp's pipeline: weights on their way from device memory into its own part of shared memory, SLOTS stages deep.
//
// Macros: SLOTS, STAGE_STEPS, STAGE_ROWS. A stage is P steps (P * 32 granules) of a row of each of R rows of weights. What is on its
// way needs no registers. A block's first stages load while the kernel in front of it ends: weights depend on no kernel.
// A piece of a plane begins at a multiple of 16 bytes, or, where rows are no multiple of 16 bytes, behind the few bytes that precede
// it in its 16 (planes begin at multiples of 256 bytes and are made up to them, so nothing beyond a matrix is read).
#include "matvec_formats.cuh"

constexpr int P = STAGE_STEPS, R = STAGE_ROWS, CHUNKS = (STEPS + P - 1) / P;   // stages of a row; the last one may have fewer steps

// Whether step p of a stage is one of the row's. Known when compiled but for the last stage's.
DEV bool has_step(int chunk, int p) { return STEPS % P == 0 || p < (STEPS - 1) % P + 1 || chunk < CHUNKS - 1; }

template <class F> struct Ring {
  static constexpr int ELEMENTS = P * 32 * F::G;
  CONST int piece(int p) { return F::bytes(p, ELEMENTS); }
  CONST bool in_line(int p) { return F::plane_per_row(p) && 16 % F::plane_bytes(p) == 0; }   // never over the border of its 16 bytes
  CONST bool aligned(int p) { return F::row_bytes(p) % 16 == 0 && (F::plane_per_row(p) || piece(p) % 16 == 0); }
  CONST int room(int p) { return aligned(p) ? piece(p) : in_line(p) ? 16 : (piece(p) + 15) / 16 * 16 + 16; }
  CONST int begin(int p) { return p == 0 ? 0 : begin(p - 1) + room(p - 1); }
  static constexpr int ROW = begin(F::PLANES), SLOT = R * ROW, BYTES = SLOTS * SLOT;   // shared memory of a row, a stage, a warp

  DEV int64_t offset(int p, int64_t row, int chunk) { return row * F::row_bytes(p) + (F::plane_per_row(p) ? 0 : chunk * piece(p)); }

  // Starts the copies of one row's stage; all lanes.
  DEV void fetch(uint32_t slot, const uint8_t* base, const Geometry& g, int64_t row, int chunk, int lane) {
    #pragma unroll
    for (int p = 0; p < F::PLANES; p++) {
      int64_t at = offset(p, row, chunk);
      if (in_line(p)) {
        copy16(slot + begin(p), base + g.plane[p] + (at & ~int64_t(15)), lane == 0, false);
        continue;
      }
      int bytes = piece(p);
      if (!F::plane_per_row(p) && F::row_bytes(p) % piece(p)) bytes = min(bytes, F::row_bytes(p) - chunk * piece(p));
      if (!aligned(p)) {
        bytes = (bytes + (int)(at & 15) + 15) & ~15;
        at &= ~int64_t(15);
      }
      const uint8_t* from = base + g.plane[p] + at + 16 * lane;
      uint32_t to = slot + begin(p) + 16 * lane;
      #pragma unroll
      for (int i = 0; i < room(p); i += 512) {
        bool whole = i + 512 <= room(p) && aligned(p) && F::row_bytes(p) % piece(p) == 0;
        copy16(to + i, from + i, whole || i + 16 * lane < bytes, F::row_bytes(p) >= 1024);
      }
    }
  }

  // Has a stage brought to L2; all lanes.
  DEV void prefetch(const uint8_t* base, const Geometry& g, int64_t row, int chunk, int lane) {
    #pragma unroll
    for (int p = 0; p < F::PLANES; p++) {
      int bytes = piece(p);
      if (!F::plane_per_row(p) && F::row_bytes(p) % piece(p)) bytes = min(bytes, F::row_bytes(p) - chunk * piece(p));
      const uint8_t* from = base + g.plane[p] + offset(p, row, chunk);
      #pragma unroll
      for (int i = 0; i < piece(p); i += 32 * 128)   // a line for each lane
        if (i + 128 * lane < bytes) bring_to_l2(from + i + 128 * lane);
    }
  }

  DEV Stage stage(uint32_t slot, int64_t row, int chunk) {
    Stage s;
    #pragma unroll
    for (int p = 0; p < F::PLANES; p++) s.at[p] = slot + begin(p) + (aligned(p) ? 0 : (int)(offset(p, row, chunk) & 15));
    return s;
  }
};

DEV void end_of_stage() { commit_copies(); }
DEV void wait_for_stage() {   // the oldest of SLOTS
  wait_for_copies<SLOTS - 1>();
  __syncwarp();
}
