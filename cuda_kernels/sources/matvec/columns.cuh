// Rounded activations as the right factor of `multiply_bytes`, for several.cu; round.cu writes them.
//
// Macros: COLS, X_ROWS, STEPS (of 256 columns, as many as a row needs), SUMS (of activations of a unit of 32, besides its scale: what
// weights have in common is multiplied by them; 0, 1, or 2 for sums of 16), SCALED_SUMS (they are times the scale, in float32; else sums of codes).
#include "matvec/common.cuh"

constexpr int UNITS = COLS / 32, STEP_UNITS = 8, PADDED_UNITS = STEPS * STEP_UNITS;   // a row is padded with zeros
constexpr int PLACES = N <= 2 ? 2 : N <= 4 ? 4 : 8, PAIRS = PLACES / 2;               // rows of activations, padded
static_assert(COLS % 32 == 0 && STEPS == (UNITS + STEP_UNITS - 1) / STEP_UNITS, "whole units, steps of 256 columns");

// Of unit u, sixteen codes of half h of row n are 16 bytes. Rows are permuted, so that lanes that store codes of a row do it to different banks.
// Then come RECORDS words of each unit and row: the scale, and sums; and then the squares of chunks of each row.
struct Columns {
  static constexpr int HALF_BYTES = 16 * PLACES, UNIT_BYTES = 2 * HALF_BYTES;
  static constexpr int RECORDS = 1 + SUMS, AT_RECORDS = PADDED_UNITS * UNIT_BYTES, UNIT_RECORDS = 4 * PLACES * RECORDS;
  static constexpr int CHUNK = 2048, CHUNKS = (COLS + CHUNK - 1) / CHUNK;
  static constexpr int AT_SQUARES = AT_RECORDS + PADDED_UNITS * UNIT_RECORDS, BYTES = (AT_SQUARES + 4 * PLACES * CHUNKS + 15) / 16 * 16;
  CONST int place(int n, int unit, int half) { return (n ^ unit ^ half << 2) % PLACES; }

  // Elements 8 v .. 8 v + 7 of row n. By whole warps, with neighbouring v.
  DEV void store(uint8_t* to, int n, int v, const float (&f)[8]) {
    const int unit = v / 4, half = v / 2 % 2;
    const Rounded r = rounded(f);
    *(int2*)(to + unit * UNIT_BYTES + half * HALF_BYTES + 16 * place(n, unit, half) + 8 * (v % 2)) = make_int2(r.word[0], r.word[1]);
    const int second = SUMS ? __shfl_xor_sync(~0u, r.sum, 2) : 0;
    if (v % 4) return;
    float* record = (float*)(to + AT_RECORDS + unit * UNIT_RECORDS) + n;
    record[0] = r.scale;
    if (SUMS) record[PLACES] = sum_of(SUMS == 1 ? r.sum + second : r.sum, r.scale);
    if (SUMS == 2) record[2 * PLACES] = sum_of(second, r.scale);
  }
  DEV float sum_of(int codes, float scale) { return SCALED_SUMS ? scale * codes : __int_as_float(codes); }
  DEV void store_square(uint8_t* to, int n, int chunk, float square) { ((float*)(to + AT_SQUARES))[n * CHUNKS + chunk] = square; }
  // The sum of squares of a row.
  DEV float square(const uint8_t* at, int n) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) sum += ((const float*)(at + AT_SQUARES))[n * CHUNKS + i];
    return sum;
  }
};
