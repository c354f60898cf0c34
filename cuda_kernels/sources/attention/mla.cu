// Latent attention of the 1 to 8 newest positions of a sequence in its absorbed form, in three
// launches. The cache has one row [rotated key | latent vector] of DK = ROPE + RANK elements per
// position, which is the key of all heads; its last RANK elements are their value.
//
//   latent_queries    new cache rows, and queries [rotated | W_k^T q] of all heads
//   latent_attention  softmax(q K^T) V over the cache, for one range of positions per block
//   latent_values     the join of the ranges, and W_v of every head
//
// A pair is a head of one of the new positions. A block of latent_attention takes R = 16 pairs over
// one pass of its range, and leaves (unnormalised mix, maximum, sum) of each.
//
// With CHOSEN (0: no), a row sees at most so many positions, which a list of its own names; then all
// pairs of a block are of one row, and ranges are of the list.
//
// Rows of an encoded cache, or of one in float32, come to shared memory as they are, and are rounded there to a tile of halves.
//
// Compiled per shape: ROWS, HEADS, NOPE, ROPE, RANK, VALUE, TYPE_K and TYPE_V (the cache's), HALF (of
// the matrices: 1 float16, 0 bfloat16), NEOX_PAIRS, TEMPERATURE, TEMPERATURE_LENGTH, TILE (positions
// in shared memory), STAGES (tiles in flight), TEAMS, THREADS (of a team), SHARES, SHORTEST (range, a multiple of TILE), MOST_SPLITS,
// KEY_ROWS and VALUE_ROWS (of a matrix, per block), CLUSTER (blocks of a head in latent_values, on devices with clusters), CHOSEN, HADAMARD (block
// of the transform of rows in the cache, 0: none; so queries are transformed, and mixtures transformed back), SHARED_BYTES, PART_FLOATS,
// WARPGROUP (attention by products of a warpgroup).
#define MMA 1  // other rows are decoded to halves
#include "attention/cache.cuh"
#include "attention/join.cuh"
#include "attention/rows.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int R = 16, PAIRS = ROWS * HEADS, HEADS_KV = 1, DK = ROPE + RANK, DV = RANK, HAD_V = 0;
constexpr int STRIDE_K = DK * 2 + 16, STRIDE_V = STRIDE_K;  // bytes; rows start in other banks
constexpr int ROW_K = row_bytes(TYPE_K, DK);
constexpr float LOG2E = 1.4426950408889634f;

#include "attention/mma.cuh"

// Warps share the elements of a score: SHARES of them have every SHARES-th 16 elements each, for half of the positions.
constexpr int HALF_TILE = TILE / (WARPS / SHARES), STEPS = DK / 16, HELD = (STEPS + SHARES - 1) / SHARES;

// Shared memory: queries | for each team: tiles | the decoded tile | shares of scores | probabilities | rescaling, maxima, sums.
constexpr bool DECODED = TYPE_K != F16 && TYPE_K != BF16;
constexpr int STAGE = DECODED ? (TILE * ROW_K + 15) / 16 * 16 : TILE * STRIDE_K;
constexpr int AT_T = STAGES * STAGE, AT_S = AT_T + (DECODED ? TILE * STRIDE_K : 0), AT_P = AT_S + SHARES * R * TILE * 4, AT_M = AT_P + Mixer::P_BYTES, OF_TEAM = AT_M + 3 * R * 4,
              SHARED = Mixer::Q_BYTES + TEAMS * OF_TEAM;
static_assert(!DECODED || ROW_K % 4 == 0, "rows that copies of 4 bytes make up");
static_assert(TEAMS == 1 || AT_S >= 4 * R * DV, "the mixes of a team fit into its tiles");
constexpr int PART = R * DV + 2 * R;  // floats that a range leaves in memory: mixes, maxima, sums
static_assert((WARPGROUP || SHARED == SHARED_BYTES) && PART == PART_FLOATS, "sizes as the launching side computes them");
static_assert(ROPE % 16 == 0 && RANK % 16 == 0 && NOPE % 8 == 0 && SHORTEST % TILE == 0 && ROWS <= WARPS, "a shape this is made for");

static_assert(HADAMARD == 0 || (ROPE % HADAMARD == 0 && KEY_ROWS % HADAMARD == 0 && RANK % HADAMARD == 0), "blocks of keys or of latent vectors alone");

constexpr int ROW_TILES = (HEADS + R - 1) / R;  // with CHOSEN

// The tile of a pair, and its number in it.
__device__ __forceinline__ int tile_of(int row, int head) { return CHOSEN ? row * ROW_TILES + head / R : (row * HEADS + head) / R; }
__device__ __forceinline__ int place_of(int row, int head) { return CHOSEN ? head % R : (row * HEADS + head) % R; }

// The positions that the last of the rows sees.
__device__ __forceinline__ int seen_of(int n_kv) { return CHOSEN ? min(n_kv, CHOSEN) : n_kv; }

// How the positions are divided: by their number alone. `active` of `splits` ranges are not empty.
struct Ranges {
    int size, active;
    __device__ __forceinline__ Ranges(int n_kv, int splits) {
        const int share = (n_kv + splits - 1) / splits;
        size = max(SHORTEST, (share + TILE - 1) / TILE * TILE);
        active = (n_kv + size - 1) / size;
    }
};

#include "attention/latent_queries.cuh"

#if WARPGROUP
#include "attention/latent_warpgroup.cuh"
#else
#include "attention/latent_tiles.cuh"
#endif

#include "attention/latent_values.cuh"
