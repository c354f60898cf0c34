// Weights of tiles on their way from device memory to a warp: its own ring of SLOTS stages in shared memory, for several.cu.
//
// A stage is a step (256 columns) of 16 rows, of which the last eight may be of another matrix. Of each plane it has a piece of every row. A piece begins at a
// multiple of 16 bytes, or, where rows are not a multiple of 16 bytes, after the few bytes that precede it in its 16 (see matvec/ring.cuh).
#pragma once
#include "matvec/columns.cuh"

template <class T> struct TileRing {
  static_assert(256 % T::BLOCK == 0, "a step has whole blocks");
  static constexpr int ROWS = 16;
  // Of a plane that is not of row headers: bytes of a row, of a piece, and of the place for a piece.
  CONST bool has(int p) { return !T::plane_per_row(p); }
  CONST int row_bytes(int p) { return COLS / T::BLOCK * T::plane_bytes(p); }
  CONST int piece(int p) { return 256 / T::BLOCK * T::plane_bytes(p); }
  CONST bool aligned(int p) { return row_bytes(p) % 16 == 0 && piece(p) % 16 == 0; }
  CONST int space(int p) { return !has(p) ? 0 : aligned(p) ? piece(p) : (piece(p) + 15) / 16 * 16 + 16; }
  CONST int begin(int p) { return p == 0 ? 0 : begin(p - 1) + ROWS * space(p - 1); }
  static constexpr int SLOT = begin(T::PLANES), BYTES = SLOTS * SLOT;   // of a stage, of a warp

  struct Rows { const uint8_t* base; int stored, first, last; };   // of a packed matrix of `stored` rows: from `first`; past `last` that one again
  struct Tile { Rows low, high; };                                 // rows 0 to 7 and 8 to 15

  // Starts the copies of step `step` of a tile to `slot`; all lanes.
  DEV void fetch(uint32_t slot, const Tile& tile, int step, int lane) { fetch_plane<0>(slot, tile, step, lane); }

  template <int p> DEV void fetch_plane(uint32_t slot, const Tile& tile, int step, int lane) {
    if constexpr (p < T::PLANES) {
      if constexpr (has(p)) {
        constexpr int CHUNKS = space(p) / 16, ROW_BYTES = row_bytes(p), PIECE = piece(p), BEGIN = begin(p), ALL = ROWS * CHUNKS;
        const uint8_t* low = tile.low.base + T::geometry(tile.low.stored, COLS).plane[p] + step * PIECE;
        const uint8_t* high = tile.high.base + T::geometry(tile.high.stored, COLS).plane[p] + step * PIECE;
        #pragma unroll
        for (int i = 0; i < ALL; i += 32) {
          const int chunk = (i + lane) % CHUNKS, r = (i + lane) / CHUNKS;
          const bool upper = r >= ROWS / 2;
          const int row = min((upper ? tile.high.first : tile.low.first) + r % (ROWS / 2), upper ? tile.high.last : tile.low.last);
          const uint8_t* from = (upper ? high : low) + (int64_t)row * ROW_BYTES;
          int bytes = PIECE;
          if (ROW_BYTES % PIECE) bytes = min(bytes, ROW_BYTES - step * PIECE);
          if constexpr (!aligned(p)) {
            const int before = (int)((uint64_t)from & 15);
            from -= before;
            bytes += before;
          }
          constexpr bool WHOLE = aligned(p) && ROW_BYTES % PIECE == 0;
          copy16(slot + BEGIN + 16 * (i + lane), from + 16 * chunk, (ALL % 32 == 0 || i + lane < ALL) && (WHOLE || 16 * chunk < bytes), ROW_BYTES >= 256);
        }
      }
      fetch_plane<p + 1>(slot, tile, step, lane);
    }
  }

  // Where row r of a stage is, as a geometry of one row from the step's first column on, relative to shared_memory.
  DEV Geometry row_in(uint32_t slot, const Rows& rows, int r, int step) {
    Geometry g;
    g.blocks = 256 / T::BLOCK;
    g.units = STEP_UNITS;
    place_plane<0>(g, slot - shared_address(shared_memory), min(rows.first + r % (ROWS / 2), rows.last), r, step);
    return g;
  }
  template <int p> DEV void place_plane(Geometry& g, uint32_t stage, int row, int r, int step) {
    if constexpr (p < T::PLANES) {
      constexpr int BEGIN = begin(p), SPACE = space(p), ROW_BYTES = row_bytes(p), PIECE = piece(p);
      g.plane[p] = stage + BEGIN + r * SPACE;
      if constexpr (has(p) && !aligned(p)) g.plane[p] += (int)(((int64_t)row * ROW_BYTES + step * PIECE) & 15);   // planes begin at multiples of 16
      place_plane<p + 1>(g, stage, row, r, step);
    }
  }

  // What a row's header says, a factor of the row.
  DEV float header(const Rows& rows, int r) {
    if constexpr (UnitHeader<T>::value) {
      const uint8_t* at = rows.base + T::geometry(rows.stored, COLS).plane[T::HEADER_PLANE] + (int64_t)min(rows.first + r % (ROWS / 2), rows.last) * T::HEADER_BYTES;
      if constexpr (T::HEADER_BYTES == 2) return half_to_float(__ldg((const uint16_t*)at));
      else return __ldg((const float*)at);
    }
    return 1;
  }
};
