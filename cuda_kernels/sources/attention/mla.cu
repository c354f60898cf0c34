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

// A warp's elements of all queries, in registers: every tile needs them, and to read them from shared memory each time would take
// longer than the tile takes to arrive.
struct Held {
    const int share = threadIdx.x / 32 % SHARES, half = threadIdx.x / 32 % WARPS / SHARES, lane = threadIdx.x % 32;
    u32 whole[HELD][4], rest[HELD][4];

    __device__ __forceinline__ void load(const char* q) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int k = min(share + SHARES * i, STEPS - 1);
            load_a(whole[i], q + 32 * k, STRIDE_Q, lane);
            load_a(rest[i], q + Mixer::Q_PART + 32 * k, STRIDE_Q, lane);
        }
    }

    // Shares of the scores of a tile, float32[SHARES, R, TILE].
    __device__ __forceinline__ void score(const char* tile_k, float* scores) const {
        constexpr int GROUPS = HALF_TILE / 8;  // of 8 positions
        const char* at = tile_k + (HALF_TILE * half + lane / 4) * STRIDE_K + lane % 4 * 4;
        float sum[GROUPS][2][4] = {};
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int k = share + SHARES * i;
            if (STEPS % SHARES && k >= STEPS) break;  // the same for all lanes
#pragma unroll
            for (int t = 0; t < GROUPS; t++) {
                const char* from = at + 8 * t * STRIDE_K + 32 * k;
                const u32 b[2] = {*(const u32*)from, *(const u32*)(from + 16)};
                mma(sum[t][0], whole[i], b);
                mma(sum[t][1], rest[i], b);
            }
        }
#pragma unroll
        for (int t = 0; t < GROUPS; t++)
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const int r = 8 * upper + lane / 4;
                *(float2*)(scores + (share * R + r) * TILE + HALF_TILE * half + 8 * t + lane % 4 * 2) =
                    make_float2(sum[t][0][2 * upper] + sum[t][1][2 * upper], sum[t][0][2 * upper + 1] + sum[t][1][2 * upper + 1]);
            }
    }
};

// The factor of queries at a position.
__device__ __forceinline__ float temperature(int position) {
    return TEMPERATURE ? 1.f + (float)(TEMPERATURE) * log1pf((float)(position / TEMPERATURE_LENGTH)) : 1.f;
}

__device__ __forceinline__ float2 two_halves(u32 w) {
    return HALF ? make_float2(half_to_float((u16)w), half_to_float((u16)(w >> 16)))
                : make_float2(bf16_to_float((u16)w), bf16_to_float((u16)(w >> 16)));
}

// COUNT rows of a matrix with COLS columns, by all threads: LANES of them share a row.
template <int COLS, int COUNT>
struct Rows {
    static constexpr int UNITS = COLS / 8;
    static constexpr int LANES = UNITS % 32 == 0 ? 32 : UNITS % 16 == 0 ? 16 : UNITS % 8 == 0 ? 8 : 4;
    static constexpr int EACH = (UNITS + LANES - 1) / LANES, GROUPS = THREADS / LANES, MINE = (COUNT + GROUPS - 1) / GROUPS;
    uint4 w[MINE][EACH];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    // Rows first .. first+COUNT-1 of `total` rows at `from`. A plain load of memory that no kernel writes would be moved to where it is
    // needed, after the wait for the previous launch.
    __device__ __forceinline__ void load(const uint4* from, int first, int total) {
#pragma unroll
        for (int m = 0; m < MINE; m++)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int row = first + group + GROUPS * m, unit = lane + LANES * e;
                const bool inside = group + GROUPS * m < COUNT && row < total && unit < UNITS;
                w[m][e] = inside ? __ldcg(from + (long long)row * UNITS + unit) : make_uint4(0, 0, 0, 0);
            }
    }

    // put(row, product) for every row that is there, in its first lane.
    template <typename Put>
    __device__ __forceinline__ void times(const float* x, int first, int total, Put put) const {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int unit = min(lane + LANES * e, UNITS - 1);  // zeros of w beyond the last
                const float4 a = *(const float4*)(x + 8 * unit), b = *(const float4*)(x + 8 * unit + 4);
                const float2 p = two_halves(w[m][e].x), q = two_halves(w[m][e].y), s = two_halves(w[m][e].z), t = two_halves(w[m][e].w);
                sum = fmaf(p.x, a.x, fmaf(p.y, a.y, fmaf(q.x, a.z, fmaf(q.y, a.w, sum))));
                sum = fmaf(s.x, b.x, fmaf(s.y, b.y, fmaf(t.x, b.z, fmaf(t.y, b.w, sum))));
            }
#pragma unroll
            for (int d = LANES / 2; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
            const int row = first + group + GROUPS * m;
            if (lane == 0 && group + GROUPS * m < COUNT && row < total) put(row, sum);
        }
    }
};

// q float32[ROWS, HEADS, NOPE + ROPE]; kv float32[ROWS, RANK + ROPE]; norm float32[RANK]; angles float32[ROWS, ROPE/2, 2];
// w_k half[HEADS, RANK, NOPE]; cache [capacity, DK]; position: cached positions before these rows; queries [pairs, 2, DK] in the
// type of the cache, the rounded values and the rounding errors. Grid (HEADS + 1, ceil(RANK / KEY_ROWS)).
extern "C" __global__ void __launch_bounds__(THREADS)
latent_queries(const float* q, const float* kv, const float* __restrict__ norm, float eps, const float* angles,
               const uint4* __restrict__ w_k, u8* cache, const int* __restrict__ position, float scale, u16* queries) {
    __shared__ __align__(16) float x[ROWS * (DK > NOPE ? DK : NOPE)];
    constexpr int KEPT = TYPE_K == F32 ? 4 * DK : STRIDE_K;
    __shared__ __align__(16) char kept[WARPS * KEPT];
    __shared__ float absorbed[HADAMARD ? ROWS * KEY_ROWS : 1];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, p0 = *position;
    const bool is_head = head < HEADS;
    const int first = blockIdx.y * KEY_ROWS;
    Rows<NOPE, KEY_ROWS> rows;
    if (is_head) rows.load(w_k + (long long)head * RANK * (NOPE / 8), first, RANK);
    wait_for_inputs();
    start_dependents();
    if (!is_head) {  // the new rows of the cache
        if (blockIdx.y || warp >= ROWS) return;
        Row<RANK> c, weight;
        Row<ROPE> k;
        Turns<ROPE> turns;
        c.fetch(kv + warp * DK, lane);
        k.fetch(kv + warp * DK + RANK, lane);
        weight.fetch(norm, lane);
        turns.fetch(angles + warp * ROPE, lane);
        float* row = x + warp * DK;
        c.norm(weight, eps);
        k.put(row, lane);
        turns.template apply<NEOX_PAIRS>(row, lane);
        c.put(row + ROPE, lane);
        if (HADAMARD) hadamard_row(row, DK, HADAMARD, lane);
        store_row<TYPE_K, DK>(row, cache + (long long)(p0 + warp) * ROW_K, kept + warp * KEPT, lane);
        return;
    }
    const auto factor = [&](int row) { return scale * temperature(p0 + row) * LOG2E; };  // exponentials are powers of 2
    const auto put = [&](int row, int i, float value) {
        u16* to = queries + ((long long)row * HEADS + head) * 2 * DK + i;
        two_parts(value, to, to + DK);
    };
    for (int i = threadIdx.x; i < ROWS * NOPE; i += THREADS) {
        const int row = i / NOPE;
        x[i] = __ldcg(q + ((long long)row * HEADS + head) * (NOPE + ROPE) + i % NOPE) * factor(row);
    }
    __syncthreads();
    const int count = min(KEY_ROWS, RANK - first);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++)
        rows.times(x + row * NOPE, first, RANK, [&](int i, float sum) {
            if (HADAMARD) absorbed[row * KEY_ROWS + i - first] = sum;
            else put(row, ROPE + i, sum);
        });
    if (HADAMARD) {
        __syncthreads();
        if (warp < ROWS) {
            hadamard_row(absorbed + warp * KEY_ROWS, count, HADAMARD, lane);
            for (int i = lane; i < count; i += 32) put(warp, ROPE + first + i, absorbed[warp * KEY_ROWS + i]);
        }
    }
    if (blockIdx.y) return;
    __syncthreads();
    if (warp >= ROWS) return;
    Row<ROPE> turned;
    Turns<ROPE> turns;
    turned.fetch(q + ((long long)warp * HEADS + head) * (NOPE + ROPE) + NOPE, lane);
    turns.fetch(angles + warp * ROPE, lane);
    float* row = x + warp * ROPE;
    turned.put(row, lane);
    turns.template apply<NEOX_PAIRS>(row, lane);
    if (HADAMARD) hadamard_row(row, ROPE, HADAMARD, lane);
    for (int i = lane; i < ROPE; i += 32) put(warp, i, row[i] * factor(warp));
}

#if WARPGROUP
#include "attention/latent_warpgroup.cuh"
#else
// A barrier of the THREADS threads of a team. The host has none for some threads only, so that all teams pass as many.
__device__ __forceinline__ void team_barrier(int team) {
#ifdef ON_HOST
    __syncthreads();
#else
    if (TEAMS == 1) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory");
#endif
}

// partial float32[tiles of R pairs, splits, PART]. TEAMS of THREADS threads take turns with the tiles of a range, as a tile takes them
// longer than it takes to arrive. Grid (splits, tiles). Pairs after the last are arbitrary, and so are their results.
// chosen int32[n_rows, CHOSEN]: ascending positions that a row sees, -1 after the last; without CHOSEN null, and n_rows is ROWS.
extern "C" __global__ void __launch_bounds__(TEAMS * THREADS)
latent_attention(const u16* queries, const u8* cache, const int* __restrict__ position, float* __restrict__ partial, const int* chosen,
                 int n_rows) {
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    const int team = TEAMS == 1 ? 0 : threadIdx.x / THREADS, thread = TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS;
    char *q = shared, *mine_of_all = shared + Mixer::Q_BYTES + team * OF_TEAM, *tiles_held = mine_of_all, *probabilities = mine_of_all + AT_P;
    float *scores = (float*)(mine_of_all + AT_S), *rescale = (float*)(mine_of_all + AT_M), *maxima = rescale + R, *sums = maxima + R;
    const int warp = thread / 32, lane = thread % 32, own = CHOSEN ? blockIdx.y / ROW_TILES : 0;  // its row
    const int pair = CHOSEN ? own * HEADS + blockIdx.y % ROW_TILES * R : blockIdx.y * R;
    const int p0 = *position, n_kv = seen_of(p0 + (CHOSEN ? n_rows : ROWS));
    const int* list = chosen + (long long)own * CHOSEN;
    const Ranges ranges(n_kv, gridDim.x);
    const int first = (int)blockIdx.x * ranges.size, last = min(first + ranges.size, n_kv);
    if (first >= n_kv) return;

    // Positions from .. until-1 as far as they are in a tile; the team's tiles are numbered by rounds.
    auto load = [&](int round, int from, int until) {
        const int at = first + (round * TEAMS + team) * TILE, low = max(at, from), high = min(min(at + TILE, last), until);
        if constexpr (DECODED) {
            char* to = tiles_held + round % STAGES * STAGE + (low - at) * ROW_K;
            const u8* from = cache + (long long)low * ROW_K;
            const int bytes = (high - low) * ROW_K, whole = !CHOSEN && (((u64)from | (u64)((low - at) * ROW_K)) & 15) == 0 ? bytes / 16 : 0;
            for (int i = thread; i < whole; i += THREADS) copy16<true>(to + i * 16, from + i * 16);
            for (int i = 4 * whole + thread; i < bytes / 4; i += THREADS) {
                const u8* row = CHOSEN ? cache + (long long)max(0, __ldcg(list + low + 4 * i / ROW_K)) * ROW_K - 4 * i / ROW_K * ROW_K : from;
                copy_few<4>(to + i * 4, row + i * 4);
            }
            return;
        }
        constexpr int PARTS = ROW_K / 16;
        char* to = tiles_held + round % STAGES * STAGE + (low - at) * STRIDE_K;
        for (int i = thread; i < (high - low) * PARTS; i += THREADS) {
            const long long row = CHOSEN ? max(0, __ldcg(list + low + i / PARTS)) : low + i / PARTS;
            copy16<(ROW_K >= 128)>(to + i / PARTS * STRIDE_K + i % PARTS * 16, cache + row * ROW_K + i % PARTS * 16);
        }
    };
    // A probability of 0 times the memory after the last row could be NaN.
    auto clear = [&](int round) {
        const int n = last - (first + (round * TEAMS + team) * TILE);
        char* from = tiles_held + (DECODED ? AT_T : round % STAGES * STAGE) + n * STRIDE_K;
        const int parts = n > 0 && n < TILE ? (15 - (n - 1) % 16) * (STRIDE_K / 16) : 0;
        for (int i = thread; i < parts; i += THREADS) *(uint4*)(from + i * 16) = make_uint4(0, 0, 0, 0);
    };
    // The cache rows of earlier steps do not depend on the previous launch, but the choice of them does.
    if (CHOSEN) wait_for_inputs();
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        load(s, 0, CHOSEN ? n_kv : p0);
        if (!DECODED) clear(s);
    }
    for (int r = thread; r < R; r += THREADS) maxima[r] = -INFINITY, sums[r] = 0.f;

    wait_for_inputs();
    start_dependents();
    constexpr int UNITS = DK / 8;
    for (int i = threadIdx.x; i < 2 * R * UNITS; i += TEAMS * THREADS) {
        const int unit = i % UNITS, part = i / UNITS % 2, r = i / UNITS / 2;
        copy16<true>(q + part * Mixer::Q_PART + r * STRIDE_Q + unit * 16, (const u8*)(queries + ((long long)(pair + r) * 2 + part) * DK + unit * 8));
    }
#pragma unroll
    for (int s = 0; s < STAGES; s++)
        if (!CHOSEN) load(s, p0, n_kv);
    end_of_copies();  // one group has all of the first tiles
#pragma unroll
    for (int s = 1; s < STAGES; s++) end_of_copies();

    Mixer mixer;
    Held held;
    const int tiles = (last - first + TILE - 1) / TILE;
    wait_for_copies<STAGES - 1>();
    __syncthreads();
    held.load(q);
    for (int round = 0; round * TEAMS < tiles; round++) {
        const int at = first + (round * TEAMS + team) * TILE, n = min(TILE, last - at);
        const char *tile_k = tiles_held + (DECODED ? AT_T : round % STAGES * STAGE), *tile_v = tile_k + ROPE * 2;
        const bool any = TEAMS == 1 || n > 0;
        wait_for_copies<STAGES - 1>();
        team_barrier(team);
        if constexpr (DECODED) {
            const u8* rows = (const u8*)tiles_held + round % STAGES * STAGE;
            for (int i = thread; i < n * (DK / 8); i += THREADS) {
                const int row = i / (DK / 8), part = i % (DK / 8);
                *(uint4*)(tiles_held + AT_T + row * STRIDE_K + part * 16) =
                    decode_halves<TYPE_K, DK>(rows + row * ROW_K, part);
            }
            clear(round);
            team_barrier(team);
            load(round + STAGES, 0, n_kv);
            end_of_copies();
        }
        if (any) held.score(tile_k, scores);
        team_barrier(team);

        // Probabilities against the running maximum: a warp takes AT_ONCE rows, so that they need not wait for each other's sums.
        // A short tile has positions for some of its lanes.
        constexpr int AT_ONCE = R / WARPS, EACH = (TILE + 31) / 32;
        if (any) {
            float s[AT_ONCE][EACH], most[AT_ONCE], before[AT_ONCE], base[AT_ONCE], sum[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int r = warp + WARPS * j;
                const int visible = min(n, seen_of(p0 + (CHOSEN ? own : min((pair + r) / HEADS, ROWS - 1)) + 1) - at);
                most[j] = -INFINITY, sum[j] = 0.f, before[j] = maxima[r];
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int position = 32 * i + lane;
                    float score = 0.f;
                    if (TILE % 32 == 0 || lane < TILE)
#pragma unroll
                        for (int share = 0; share < SHARES; share++) score += scores[(share * R + r) * TILE + position];
                    s[j][i] = position < visible ? score : -INFINITY;
                    most[j] = fmaxf(most[j], s[j][i]);
                }
            }
#pragma unroll
            for (int d = 16; d; d >>= 1)
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) most[j] = fmaxf(most[j], __shfl_xor_sync(0xffffffff, most[j], d));
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                most[j] = fmaxf(before[j], most[j]);
                base[j] = most[j] == -INFINITY ? 0.f : most[j];  // a row that sees nothing of this range yet
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const float p = exp2f(s[j][i] - base[j]);
                    if (TILE % 32 == 0 || lane < TILE) Mixer::put_probability(probabilities, warp + WARPS * j, 32 * i + lane, p);
                    sum[j] += p;
                }
            }
#pragma unroll
            for (int d = 16; d; d >>= 1)
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) sum[j] += __shfl_xor_sync(0xffffffff, sum[j], d);
            __syncwarp();  // all lanes have read the maxima so far
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int r = warp + WARPS * j;
                if (lane == 0) {
                    const float factor = exp2f(before[j] - base[j]);
                    rescale[r] = factor;
                    sums[r] = fmaf(sums[r], factor, sum[j]);
                    maxima[r] = most[j];
                }
            }
        }
        team_barrier(team);
        if (any) mixer.add(probabilities, tile_v, rescale, n);
        team_barrier(team);
        if (DECODED) continue;
        load(round + STAGES, 0, n_kv);
        clear(round + STAGES);
        end_of_copies();  // a group in any case, so that the count of groups in flight stays the same
    }
    float* mine = partial + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * PART;
    if (TEAMS == 1) {
        mixer.finish(nullptr, [&](int r, int i, float x, float y) { *(float2*)(mine + r * DV + i) = make_float2(x, y); });
        for (int r = thread; r < R; r += THREADS) mine[R * DV + r] = maxima[r], mine[R * DV + R + r] = sums[r];
        return;
    }
    // The first of two teams adds what the other one has left in its tiles.
    const float* others = (const float*)(shared + Mixer::Q_BYTES + OF_TEAM);
    wait_for_copies<0>();
    team_barrier(team);
    if (team == 1) {
        mixer.finish(nullptr, [&](int r, int i, float x, float y) { *(float2*)((float*)tiles_held + r * DV + i) = make_float2(x, y); });
    }
    __syncthreads();
    if (team == 1) return;
    const float *other_maxima = (const float*)((const char*)others + AT_M) + R, *other_sums = other_maxima + R;
    const auto factor = [&](int r, bool other) {
        const float most = fmaxf(maxima[r], other_maxima[r]), m = other ? other_maxima[r] : maxima[r];
        return exp2f(m - (most == -INFINITY ? 0.f : most));
    };
    for (int r = thread; r < R; r += THREADS) {
        mine[R * DV + r] = fmaxf(maxima[r], other_maxima[r]);
        mine[R * DV + R + r] = fmaf(sums[r], factor(r, false), other_sums[r] * factor(r, true));
    }
    mixer.finish(nullptr, [&](int r, int i, float x, float y) {
        const float a = factor(r, false), b = factor(r, true);
        const float2 other = *(const float2*)(others + r * DV + i);
        *(float2*)(mine + r * DV + i) = make_float2(fmaf(x, a, other.x * b), fmaf(y, a, other.y * b));
    });
}
#endif

// On devices with clusters, the blocks of a head are one cluster: each joins its CHUNK of every row and stores it in the shared memory
// of all.
constexpr bool TOGETHER = HAS_CLUSTERS && CLUSTER > 1;
constexpr int ALONE = 3;  // so many ranges every block joins by itself
constexpr int CHUNK = RANK / CLUSTER, UNITS = ROWS * CHUNK / 4, WIDE = UNITS < THREADS ? UNITS : THREADS, GROUPS = THREADS / WIDE;
// With few rows, threads share the ranges of an element.
constexpr int SHARING = 4 * THREADS / (ROWS * RANK) >= 4 ? 4 : 4 * THREADS / (ROWS * RANK) >= 2 ? 2 : 1;
constexpr int SUMS = (TOGETHER ? GROUPS * UNITS * 4 : 4) > (SHARING > 1 ? SHARING * ROWS * RANK : 4) ? GROUPS * UNITS * 4
                     : SHARING > 1 ? SHARING * ROWS * RANK : 4;
static_assert(RANK % (4 * CLUSTER) == 0, "chunks of whole units");

// w_v half[HEADS, VALUE, RANK]; out float32[ROWS, HEADS, VALUE]. Grid (HEADS, ceil(VALUE / VALUE_ROWS)), in clusters (1, CLUSTER).
extern "C" __global__ void __launch_bounds__(THREADS)
latent_values(const float* partial, const int* __restrict__ position, int splits, const uint4* __restrict__ w_v, float* __restrict__ out) {
    __shared__ __align__(16) float x[ROWS * RANK];
    __shared__ float share[ROWS * MOST_SPLITS];
    __shared__ __align__(16) float sums[SUMS];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * VALUE_ROWS;
    const int active = Ranges(seen_of(*position + ROWS), splits).active;
    const bool together = TOGETHER && active > ALONE;
    if (together) arrive_in_cluster();  // the others may store here
    Rows<RANK, VALUE_ROWS> rows;
    rows.load(w_v + (long long)head * VALUE * (RANK / 8), first, VALUE);
    wait_for_inputs();
    start_dependents();
    // The share of every range in each row comes first, then sums whose loads do not wait.
    const auto parts = [&](int row) { return partial + (long long)tile_of(row, head) * splits * PART; };
    // Where blocks join together, a thread's part of its first ranges is on its way meanwhile.
    constexpr int AHEAD = TOGETHER && UNITS <= THREADS ? 12 : 0;
    const int group = threadIdx.x / WIDE, each = (active + GROUPS - 1) / GROUPS, from = min(group * each, active), until = min(from + each, active);
    const auto place = [&](int unit) {  // of the part, in the first range
        const int row = unit / (CHUNK / 4);
        return parts(row) + place_of(row, head) * DV + blockIdx.y * CHUNK + unit % (CHUNK / 4) * 4;
    };
    float4 ahead[AHEAD ? AHEAD : 1];
    if (together && group < GROUPS) {
        const float* mixes = place(threadIdx.x % WIDE);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (from + j < until) ahead[j] = __ldcg((const float4*)(mixes + (from + j) * PART));
    }
    if (warp < ROWS)
        shares_of_ranges<PART, R, 4>(parts(warp) + R * DV + place_of(warp, head), active, share + warp * MOST_SPLITS, lane);
    __syncthreads();
    if (together) {
        if (group < GROUPS)
            for (int unit = threadIdx.x % WIDE; unit < UNITS; unit += WIDE) {
                const float* shares = share + unit / (CHUNK / 4) * MOST_SPLITS;
                float4 sum = join_ranges<PART>(place(unit), min(from + AHEAD, until), until, shares);
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    if (from + j < until) add_range(sum, shares[from + j], ahead[j]);
                *(float4*)(sums + (group * UNITS + unit) * 4) = sum;
            }
        __syncthreads();
        wait_for_cluster();
        for (int i = threadIdx.x; i < UNITS * CLUSTER; i += THREADS) {
            const int unit = i % UNITS, row = unit / (CHUNK / 4);
            float4 sum = *(const float4*)(sums + unit * 4);
#pragma unroll
            for (int g = 1; g < GROUPS; g++) {
                const float4 more = *(const float4*)(sums + (g * UNITS + unit) * 4);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            store_in_block(x + row * RANK + blockIdx.y * CHUNK + unit % (CHUNK / 4) * 4, i / UNITS, sum);
        }
        arrive_in_cluster();
        wait_for_cluster();
    } else if (SHARING == 1) {
        for (int i = 4 * threadIdx.x; i < ROWS * RANK; i += 4 * THREADS) {
            const int row = i / RANK, r = place_of(row, head);
            *(float4*)(x + i) = join_ranges<PART>(parts(row) + r * DV + i % RANK, 0, active, share + row * MOST_SPLITS);
        }
    } else {
        const int i = 4 * (threadIdx.x % (THREADS / SHARING)), row = i / RANK, r = place_of(row, head), g = threadIdx.x / (THREADS / SHARING);
        const int each = (active + SHARING - 1) / SHARING, from = min(g * each, active);
        if (i < ROWS * RANK)
            *(float4*)(sums + g * ROWS * RANK + i) =
                join_ranges<PART, 16>(parts(row) + r * DV + i % RANK, from, min(from + each, active), share + row * MOST_SPLITS);
        __syncthreads();
        for (int e = threadIdx.x; e < ROWS * RANK; e += THREADS) {
            float sum = sums[e];
#pragma unroll
            for (int s = 1; s < SHARING; s++) sum += sums[s * ROWS * RANK + e];
            x[e] = sum;
        }
    }
    __syncthreads();
    if (HADAMARD) {
        if (warp < ROWS) hadamard_row(x + warp * RANK, RANK, HADAMARD, lane);
        __syncthreads();
    }
#pragma unroll 1
    for (int row = 0; row < ROWS; row++)
        rows.times(x + row * RANK, first, VALUE, [&](int i, float sum) { out[((long long)row * HEADS + head) * VALUE + i] = sum; });
}
