// Weights on their way from device memory to a warp: its own ring of SLOTS stages in shared memory.
//
// Macros: SLOTS, STAGE_STEPS, STAGE_ROWS. A stage is P steps (P * 32 granules) of a row of each of R rows of weights.
// A piece of a plane begins at a multiple of 16 bytes, or, where rows are not a multiple of 16 bytes, after the few bytes that precede
// it in its 16 (planes begin at multiples of 256 bytes and are padded to them, so nothing beyond a matrix is read).
#include "matvec/formats.cuh"

constexpr int P = STAGE_STEPS, R = STAGE_ROWS, CHUNKS = (STEPS + P - 1) / P;   // stages of a row; the last one may have fewer steps

// Whether step p of a stage is one of the row's. Known when compiled but for the last stage's.
DEV bool has_step(int chunk, int p) { return STEPS % P == 0 || p < (STEPS - 1) % P + 1 || chunk < CHUNKS - 1; }

// What differs from plane to plane is a constant of the plane's number, a template parameter: loops over planes are not unrolled
// where there are many, and then every copy would work it out again.
template <class F> struct Ring {
  static constexpr int ELEMENTS = JOINED_SLOTS ? COLS : P * 32 * F::G;   // of a stage
  CONST int piece(int p) { return F::bytes(p, ELEMENTS); }
  CONST bool aligned(int p) { return F::row_bytes(p) % 16 == 0 && piece(p) % 16 == 0; }
  // Whether L2 takes in whole lines of 128 bytes: shorter rows gain nothing by it.
  CONST bool in_lines(int p) { return F::row_bytes(p) >= 256; }
  CONST int space(int p) { return aligned(p) ? piece(p) : (piece(p) + 15) / 16 * 16 + 16; }
  CONST int begin(int p) { return p == 0 ? 0 : begin(p - 1) + space(p - 1); }
  static constexpr int HEADER = begin(F::STAGED);   // where the 16 bytes with a row's header are, in its first stage
  static constexpr int ROW = HEADER + (F::HEADER_STAGED ? 16 : 0), SLOT = R * ROW, BYTES = SLOTS * SLOT;   // of a row, a stage, a warp

  // Where the ring of a warp begins, after `before` bytes. In a register of each lane: see units/policy.cuh.
  DEV uint32_t of_warp(int warp, int before) { return in_register(shared_address(shared_memory) + before + warp * BYTES); }

  // From the piece of a stage to that of its row's next one, and from a row's last one to the first one of the row `rows` further on.
  DEV int jump(int p, int rows) { return rows * F::row_bytes(p) - (CHUNKS - 1) * piece(p); }

  DEV int64_t offset(int p, int64_t row, int chunk) { return row * F::row_bytes(p) + chunk * piece(p); }

  // Starts the copies of a plane's piece of one row's stage, which begins at `at`; all lanes.
  template <int p> DEV void fetch(uint32_t slot, const uint8_t* at, int chunk, int lane) {
    constexpr int BEGIN = begin(p), SPACE = space(p), PIECE = piece(p), ROW_BYTES = F::row_bytes(p);
    constexpr bool ALIGNED = aligned(p), WHOLE = ALIGNED && ROW_BYTES % PIECE == 0, LINES = in_lines(p);
    const int before = (int)((uint64_t)at & 15);
    if (!ALIGNED) at -= before;
    int bytes = PIECE;
    if (ROW_BYTES % PIECE) bytes = min(bytes, ROW_BYTES - chunk * PIECE);
    if (!ALIGNED) bytes = (bytes + before + 15) & ~15;
    const uint8_t* from = at + 16 * lane;
    uint32_t to = slot + BEGIN + 16 * lane;
    #pragma unroll
    for (int i = 0; i < SPACE; i += 512) copy16(to + i, from + i, (WHOLE && i + 512 <= SPACE) || i + 16 * lane < bytes, LINES);
  }

  // The 16 bytes with a row's header, of the plane at `headers`.
  DEV void fetch_header(uint32_t slot, const uint8_t* headers, int64_t row, int lane) {
    if constexpr (F::HEADER_STAGED) copy16(slot + HEADER, headers + (row * F::HEADER_BYTES & ~(int64_t)15), lane == 0, false);
  }
  DEV float row_factor(uint32_t slot, int64_t row) {
    if constexpr (F::HEADER_STAGED) return F::row_factor(shared2(slot + HEADER + ((int)row * F::HEADER_BYTES & 15)));
    return 1;
  }

  DEV Stage stage(uint32_t slot, int64_t row, int chunk) {
    Stage s;
    find(s, slot, row, chunk);
    return s;
  }
  template <int p = 0> DEV void find(Stage& s, uint32_t slot, int64_t row, int chunk) {
    if constexpr (p < F::STAGED) {
      constexpr int BEGIN = begin(p);
      s.at[p] = slot + BEGIN + (aligned(p) ? 0 : (int)(offset(p, row, chunk) & 15));
      find<p + 1>(s, slot, row, chunk);
    }
  }
};
