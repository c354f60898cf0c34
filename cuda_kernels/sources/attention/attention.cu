// Attention of the 1 to 8 newest positions of a sequence, from the projections q, k, v to the mixed
// heads, in one launch: head norms, rotation, storing the new rows in the cache, softmax(q K^T) V
// over the cache, and the join of the splits.
//
// grid (splits, kv heads), THREADS threads. A block takes one range of positions of one kv head,
// for all GROUP query heads that share it and all ROWS new positions: R = ROWS * GROUP rows over
// one pass of K and V. Ranges follow from the number of positions alone; blocks without a range
// return. Blocks of a kv head that share the work store (unnormalised mix, maximum, sum) of their
// range in memory. Where warps take their own tiles, the last blocks of a head wait for the parts of all its ranges and join them in the order
// of positions. Otherwise the last block to finish joins them.
//
// Compiled per shape: HEADS_KV, GROUP, ROWS, DK, DV, TYPE_K, TYPE_V, N_ROT, NEOX_PAIRS, HEAD_NORMS (2: after the rotation), HAD_K, HAD_V (block of the transform,
// or 0), MMA (tensor cores), BY_WARP (tiles of warps, not of the block), WARPS, RESIDENT (blocks of a
// multiprocessor), TILE (positions in shared memory), STAGES (tiles in flight), SHORTEST (range, a multiple of TILE),
// SHARED_BYTES, PART_FLOATS, and what only some models have: BIASES (of the projections), VALUE_NORM, GATE (1: after each query head, 2: in `gates`, for its
// result, 3: there, one for all elements of a head), SOFTPLUS (of gates instead of their sigmoid), SINKS, WINDOW (positions that a token sees, or 0), CHUNKED (it sees those from the last multiple
// of WINDOW on), SOFTCAP (of scores, or 0), TEMPERATURE, TEMPERATURE_LENGTH and TEMPERATURE_OFFSET (queries
// grow with the logarithm of the position), OWN_KV (0: another layer has stored the new rows of the cache).
#include "attention/cache.cuh"
#include "attention/rows.cuh"
#include "attention/join.cuh"
#include "attention/shared_join.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int R = ROWS * GROUP, HEADS = GROUP * HEADS_KV;
constexpr int STRIDE_K = DK * tile_bytes(TYPE_K) + 16, STRIDE_V = DV * tile_bytes(TYPE_V) + 16;  // bytes; rows start in other banks
constexpr int ROW_K = row_bytes(TYPE_K, DK), ROW_V = row_bytes(TYPE_V, DV);
constexpr float LOG2E = 1.4426950408889634f;
constexpr int NEW_ROWS = OWN_KV ? 2 * ROWS : 0, Q_STRIDE = GATE == 1 ? 2 * DK : DK;

// Encoded rows are in flight as they are stored.
constexpr bool DECODED = MMA && !is_float(TYPE_K);
static_assert(!MMA || BY_WARP || is_float(TYPE_K) == is_float(TYPE_V), "both are decoded, or none");
constexpr float CAP = SOFTCAP ? (float)(SOFTCAP) * LOG2E : 1.f;  // scores have the factor of exponentials

// The first position that the token at a position sees; below 0 where that is all.
__device__ __forceinline__ int first_seen(int position) {
    constexpr int LENGTH = WINDOW ? WINDOW : 1;
    return CHUNKED ? position / LENGTH * LENGTH : position + 1 - LENGTH;
}

#include "attention/fragments.cuh"  // before the choice, as files are included once
#include "attention/tile.cuh"
#if BY_WARP
#include "attention/warps.cuh"
#elif MMA
#include "attention/mma.cuh"
#else
#include "attention/scalar.cuh"
#endif

constexpr int WIDER = DK > DV ? DK : DV;
#if BY_WARP
// Shared memory: rings of the warps | queries | new k | new v (as they are stored) | a row for each warp, later its maxima and sums |
// sums of queries. Mixes of warps replace the rings, then what warps found in the parts of all ranges.
constexpr int LOADED = WARPS * RING, SCORES = WARPS * (WIDER > 2 * RP ? WIDER : 2 * RP), KEPT_K = padded_row(ROW_K), KEPT_V = padded_row(ROW_V), P_BYTES = Mixer::SUMS_BYTES;
#else
// Shared memory: tiles (encoded rows | the tile) | queries | new k | new v | scores (before: a row for each warp) |
// probabilities | rescaling, maxima, sums. The parts to join replace the tiles.
// Encoded rows are decoded to one tile.
constexpr int WHOLE = TILE * (STRIDE_K + STRIDE_V), STAGE = DECODED ? TILE * (ROW_K + ROW_V) : WHOLE;
constexpr int LOADED = STAGES * STAGE + (DECODED ? WHOLE : 0), KEPT_K = STRIDE_K, KEPT_V = STRIDE_V, P_BYTES = Mixer::P_BYTES;
constexpr int SCORES = R * TILE > WARPS * WIDER ? R * TILE : WARPS * WIDER;
#endif
constexpr int TILES = LOADED > Mixer::JOIN_BYTES ? LOADED : Mixer::JOIN_BYTES;
constexpr int AT_Q = TILES, AT_K = AT_Q + Mixer::Q_BYTES, AT_V = AT_K + ROWS * KEPT_K, AT_S = AT_V + ROWS * KEPT_V,
              AT_P = AT_S + SCORES * 4, AT_M = AT_P + P_BYTES, SHARED = AT_M + (BY_WARP ? 0 : 3 * R * 4);
// Blocks of a multiprocessor for which there are registers: with at most 128 in each thread, a block of the next launch fits next to this one.
// More than 8 queries of encoded rows need more.
constexpr bool FEW_REGISTERS = BY_WARP && THREADS <= 256 && DK + DV <= 256 && (R <= 8 || (is_float(TYPE_K) && is_float(TYPE_V)));
constexpr int FITTING = FEW_REGISTERS && RESIDENT < 2 ? 2 : RESIDENT;
constexpr bool WAITS = BY_WARP;  // for parts; otherwise the last block to finish joins them
constexpr bool SHARED_RANGES = TILES >= 528 * WARPS && (!HAD_V || 4 * Mixer::ANSWERS >= 528 * WARPS);  // there is room for what warps found
using Joined = JoinedRows<R, DV, WARPS, SHARED_RANGES>;
constexpr int PART = WAITS ? Joined::PART : R * DV + (2 * R + 3) / 4 * 4;  // floats that a range leaves in memory: mixes, maxima, sums
static_assert(sizeof(Joined::Found) == 528, "as SHARED_RANGES assumes");

// How many rows of a head a block joins: those whose mixes of all ranges are about FLOATS_TO_JOIN. Blocks that wait keep their places, and those that they wait
// for may still need one. So of a head's blocks gridDim.x / (2 RESIDENT) wait, or one, and in all no more than half of those that fit, or one for each head.
constexpr int FLOATS_TO_JOIN = 8192;
__device__ __forceinline__ int rows_to_join(int active) {
    const int joiners = max(1, min(active, (int)gridDim.x / (2 * RESIDENT)));
    return min(R, max(FLOATS_TO_JOIN / (active * DV), (R + joiners - 1) / joiners));
}
static_assert(SHARED == SHARED_BYTES && PART == PART_FLOATS, "sizes as the launching side computes them");
static_assert(DK % 8 == 0 && DV % 8 == 0 && SHORTEST % TILE == 0, "a shape this is made for");
static_assert(GATE != 1 || DK == DV, "gates are as long as results");

// A row to prepare: a new row of K or V, or a row of q. In this order, as new rows take longest.
struct Job {
    int i;        // which of the ROWS positions
    bool k, v;    // neither: a query, row r
    int r;

    __device__ __forceinline__ Job(int n) : i(n < NEW_ROWS ? n / 2 : (n - NEW_ROWS) / GROUP), k(n < NEW_ROWS && n % 2 == 0),
                                            v(n < NEW_ROWS && n % 2), r(n - NEW_ROWS) {}
};

// The factor of queries at a position.
__device__ __forceinline__ float temperature(int position) {
    return TEMPERATURE ? 1.f + (float)(TEMPERATURE) * log1pf((float)((position + TEMPERATURE_OFFSET) / TEMPERATURE_LENGTH)) : 1.f;
}

// q float32[ROWS, HEADS, DK], with GATE 1 [ROWS, HEADS, 2 * DK]; gates float32[ROWS, HEADS, DV], with GATE 3 [ROWS, HEADS]; k float32[ROWS, HEADS_KV, DK]; v float32[ROWS, HEADS_KV, DV]; head norms float32[DK];
// biases float32[HEADS, Q_STRIDE], [HEADS_KV, DK], [HEADS_KV, DV]; sinks float32[HEADS]; angles float32[ROWS, N_ROT/2, 2];
// caches [capacity, HEADS_KV, row], of encoded types [capacity / CACHE_TILE, rounded up, HEADS_KV, CACHE_TILE rows]; position: cached positions before these
// rows; partial float32[HEADS_KV, splits, PART], all NOT_THERE; tickets u32[HEADS_KV], zero; out float32[ROWS, HEADS, DV].
extern "C" __global__ void __launch_bounds__(THREADS, FITTING)
attention(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ q_norm,
          const float* __restrict__ k_norm, float eps, const float* __restrict__ angles, u8* cache_k, u8* cache_v,
          const int* __restrict__ position, float scale, const float* __restrict__ q_bias, const float* __restrict__ k_bias,
          const float* __restrict__ v_bias, const float* __restrict__ sinks, float* partial, u32* tickets, float* __restrict__ out
#if GATE >= 2
          , const float* __restrict__ gates
#endif
          ) {
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    char *queries = shared + AT_Q, *new_k = shared + AT_K, *new_v = shared + AT_V, *probabilities = shared + AT_P;
    float* scores = (float*)(shared + AT_S);
#if !BY_WARP
    float *rescale = (float*)(shared + AT_M), *maxima = rescale + R, *sums = maxima + R;
#endif

    const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int p0 = *position, n_kv = p0 + ROWS;
    const int start = WINDOW ? max(0, first_seen(p0)) / TILE * TILE : 0, n_seen = n_kv - start;
    const int share = (n_seen + (int)gridDim.x - 1) / (int)gridDim.x;
    const int range = max(SHORTEST, (share + TILE - 1) / TILE * TILE), active = (n_seen + range - 1) / range;
    if ((int)blockIdx.x >= active) return;
    // The first blocks have the last ranges: they start first, and new rows take longest.
    const int part = active - 1 - (int)blockIdx.x, first = start + part * range, last = min(first + range, n_kv);
    const int n_old = OWN_KV ? p0 : n_kv;  // cached positions
    if (!OWN_KV) wait_for_inputs();        // an earlier launch of this step has stored the new ones

    // The cache rows of earlier steps do not depend on the previous launch.
#if BY_WARP
    Mixer mixer;
    Mixer::begin(shared, cache_k, cache_v, first, last, n_old, head);
    mixer.start(sinks, part == 0, head);
    Mixer::clear_queries(queries, (float*)probabilities);
    auto place = [&](int, int i, bool value) { return value ? new_v + i * KEPT_V : new_k + i * KEPT_K; };
#else
    auto load = [&](int tile) {
        const int at = first + tile * TILE, old = min(min(at + TILE, last), n_old) - at;
        char* to = shared + tile % STAGES * STAGE;
        if constexpr (DECODED) {
            load_rows<TYPE_K, DK>(to, cache_k, at, old, head);
            load_rows<TYPE_V, DV>(to + TILE * ROW_K, cache_v, at, old, head);
        } else {
            load_tile<TYPE_K, DK, STRIDE_K, ROW_K>(to, cache_k, at, old, head);
            load_tile<TYPE_V, DV, STRIDE_V, ROW_V>(to + TILE * STRIDE_K, cache_v, at, old, head);
        }
        end_of_copies();
    };
    auto tile_at = [&](int tile) { return shared + (DECODED ? STAGES : tile % STAGES) * STAGE; };
    // A probability of 0 times the memory after the last row could be NaN.
    auto clear = [&](int tile) {
        const int n = last - (first + tile * TILE);
        char* from = tile_at(tile) + TILE * STRIDE_K + n * STRIDE_V;
        const int parts = MMA && n > 0 && n < TILE ? (15 - (n - 1) % 16) * (STRIDE_V / 16) : 0;
        for (int i = threadIdx.x; i < parts; i += THREADS) *(uint4*)(from + i * 16) = make_uint4(0, 0, 0, 0);
    };
    // The place of a new row of position p: its tile, or a separate buffer if the tile is loaded
    // later.
    auto place = [&](int p, int i, bool value) {
        const int tile = (p - first) / TILE, row = (p - first) % TILE;
        if (DECODED || tile >= STAGES) return value ? new_v + i * STRIDE_V : new_k + i * STRIDE_K;
        return shared + tile * STAGE + (value ? TILE * STRIDE_K + row * STRIDE_V : row * STRIDE_K);
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        load(s);
        if (!DECODED) clear(s);
    }
    for (int r = threadIdx.x; r < R; r += THREADS) {  // a sink is a score without a value
        const bool sink = SINKS && part == 0;
        maxima[r] = sink ? sinks[head * GROUP + r % GROUP] * LOG2E : -INFINITY;
        sums[r] = sink ? 1.f : 0.f;
    }
#endif
    Row<DK> norm_q, norm_k;
    if (HEAD_NORMS) norm_q.fetch(q_norm, lane), norm_k.fetch(k_norm, lane);

    wait_for_inputs();
    // Not earlier: while the previous launch still fills the multiprocessors, blocks of the next
    // one do not fit next to this one's. They would go in pairs to the multiprocessors that are
    // free first and leave none for others, and this would continue as long as launches overlap.
    start_dependents();
    constexpr int JOBS = R + NEW_ROWS, AT_ONCE = JOBS > WARPS ? 2 : 1;
    const int first_job = last > p0 ? 0 : NEW_ROWS;  // are new rows in this range?
    auto job_of = [&](int turn) { return first_job + turn * WARPS + (turn % 2 ? WARPS - 1 - warp : warp); };  // who has a new row has no second job, if others can
#pragma unroll 1
    for (int turn = 0; first_job + turn * WARPS < JOBS; turn += AT_ONCE) {
        Row<DK> x[AT_ONCE];
        Row<DV> value[AT_ONCE];
        Turns<N_ROT> turns[AT_ONCE];
        bool mine[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int n = job_of(turn + j);
            const Job job(n);
            const int p = p0 + job.i;
            mine[j] = n < JOBS && (n >= NEW_ROWS || (p >= first && p < last));
            if (!mine[j]) continue;
            if (job.v) {
                value[j].fetch(v + (job.i * HEADS_KV + head) * DV, lane);
                if (BIASES) value[j].plus(v_bias + head * DV, lane);
            } else {
                const int query = head * GROUP + job.r % GROUP;
                x[j].fetch(job.k ? k + (job.i * HEADS_KV + head) * DK : q + (job.i * HEADS + query) * Q_STRIDE, lane);
                if (BIASES) x[j].plus(job.k ? k_bias + head * DK : q_bias + query * Q_STRIDE, lane);
                turns[j].fetch(angles + job.i * N_ROT, lane);
            }
        }
        float* row = scores + warp * WIDER;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (!mine[j]) continue;
            const Job job(job_of(turn + j));
            const int p = p0 + job.i;
            __syncwarp();
            if (job.v) {
                if (VALUE_NORM) value[j].divide(eps);
                value[j].put(row, lane);
                if (HAD_V) hadamard_row(row, DV, HAD_V, lane);
                Mixer::store<TYPE_V, DV>(row, in_cache<TYPE_V, DV>(cache_v, p, head, HEADS_KV), place(p, job.i, true), lane);
            } else {
                if (HEAD_NORMS == 1) x[j].norm(job.k ? norm_k : norm_q, eps);
                x[j].put(row, lane);
                turns[j].template apply<NEOX_PAIRS>(row, lane);
                if (HEAD_NORMS == 2) {
                    x[j].take(row, lane);
                    x[j].norm(job.k ? norm_k : norm_q, eps);
                    x[j].put(row, lane);
                }
                if (HAD_K) hadamard_row(row, DK, HAD_K, lane);
                if (job.k) Mixer::store<TYPE_K, DK>(row, in_cache<TYPE_K, DK>(cache_k, p, head, HEADS_KV), place(p, job.i, false), lane);
                else Mixer::put_query(queries, (float*)probabilities, job.r, row, scale * temperature(p) * LOG2E, lane);  // exponentials are powers of 2
            }
        }
    }

#if BY_WARP
    __syncthreads();
    mixer.run(shared, queries, (const float*)probabilities, cache_k, cache_v, new_k, new_v, first, last, p0, head);
#else
    Mixer mixer;
    const int tiles = (last - first + TILE - 1) / TILE;
    for (int t = 0; t < tiles; t++) {
        const int at = first + t * TILE, n = min(TILE, last - at);
        char *tile_k = tile_at(t), *tile_v = tile_k + TILE * STRIDE_K;
        wait_for_copies<STAGES - 1>();
        __syncthreads();
        if constexpr (DECODED) {
            const char* rows = shared + t % STAGES * STAGE;
            const int old = min(n, n_old - at);
            decode_tile<TYPE_K, DK, STRIDE_K, ROW_K>(tile_k, rows, old);
            decode_tile<TYPE_V, DV, STRIDE_V, ROW_V>(tile_v, rows + TILE * ROW_K, old);
            clear(t);
        }
        if (OWN_KV && (DECODED || t >= STAGES) && at + n > p0) {
            insert_new<STRIDE_K>(tile_k, new_k, at, p0, n);
            insert_new<STRIDE_V>(tile_v, new_v, at, p0, n);
            if constexpr (!DECODED) {
                clear(t);
                __syncthreads();
            }
        }
        if constexpr (DECODED) {
            __syncthreads();
            load(t + STAGES);
        }
        Mixer::score(queries, tile_k, scores);
        __syncthreads();

        // Probabilities against the running maximum: a warp takes a row. A short tile has positions for some of its lanes.
        constexpr int EACH = (TILE + 31) / 32;
        for (int r = warp; r < R; r += WARPS) {
            const int visible = min(n, p0 + r / GROUP + 1 - at), hidden = WINDOW ? first_seen(p0 + r / GROUP) - at : 0;
            float s[EACH], most = -INFINITY;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int position = 32 * i + lane;
                s[i] = position < visible && position >= hidden ? scores[r * TILE + position] : -INFINITY;
                if (SOFTCAP) s[i] = s[i] == -INFINITY ? s[i] : CAP * tanhf(s[i] / CAP);
                most = fmaxf(most, s[i]);
            }
            const float before = maxima[r], now = fmaxf(before, warp_max(most));
            const float base = now == -INFINITY ? 0.f : now;  // a row that sees nothing of this range yet
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const float p = exp2f(s[i] - base);
                if (TILE % 32 == 0 || lane < TILE) Mixer::put_probability(probabilities, r, 32 * i + lane, p);
                sum += p;
            }
            sum = warp_sum(sum);
            __syncwarp();  // all lanes have read the maximum so far
            if (lane == 0) {
                const float factor = exp2f(before - base);
                rescale[r] = factor;
                sums[r] = fmaf(sums[r], factor, sum);
                maxima[r] = now;
            }
        }
        __syncthreads();
        mixer.add(probabilities, tile_v, rescale, n);
        if constexpr (!DECODED) {
            __syncthreads();
            load(t + STAGES);  // commits a group in any case, so that the count of groups in flight stays the same
        }
    }
    if (Mixer::JOIN_BYTES) {
        wait_for_copies<0>();
        __syncthreads();
    }
#endif

    // This range is either the whole result or a part of it.
    float *joined = (float*)shared, *answers = joined + Mixer::ANSWERS;
    auto place_of = [&](int r) { return (r / GROUP) * HEADS + head * GROUP + r % GROUP; };
    auto gate = [&](int r, int i) {  // of element i of a result
        if (!GATE) return 1.f;
#if GATE == 2
        const float g = __ldcg(gates + place_of(r) * DV + i);
#elif GATE == 3
        const float g = __ldcg(gates + place_of(r));
#else
        const float g = __ldcg(q + place_of(r) * Q_STRIDE + DK + i) + (BIASES ? q_bias[(head * GROUP + r % GROUP) * Q_STRIDE + DK + i] : 0.f);
#endif
        if (SOFTPLUS) return fmaxf(g, 0.f) + log1pf(expf(-fabsf(g)));
        return __fdiv_rn(1.f, 1.f + expf(-g));
    };
    auto answer = [&](int r, int i, float x, float y) {
        if (HAD_V) *(float2*)(answers + r * DV + i) = make_float2(x, y);
        else *(float2*)(out + place_of(r) * DV + i) = make_float2(x * gate(r, i), y * gate(r, i + 1));
    };
    float *parts = partial + (long long)head * gridDim.x * PART, *own_part = parts + (long long)part * PART;
    auto keep = [&](int r, int i, float x, float y, float most, float sum) {
        if (active == 1) {
            const float by = __fdividef(1.f, sum);
            answer(r, i, x * by, y * by);
        } else if constexpr (WAITS) {
            put_part(own_part + r * DV + i, x, y);
            if (i % 128 == 0) put_part(Joined::sums_of(own_part, r, i / 128), most, sum);
        } else {
            *(float2*)(own_part + r * DV + i) = make_float2(x, y);
            if (i == 0) own_part[R * DV + r] = most, own_part[R * DV + R + r] = sum;
        }
    };
#if BY_WARP
    mixer.finish(joined, (float2*)scores, keep);
#else
    mixer.finish(joined, [&](int r, int i, float x, float y) { keep(r, i, x, y, maxima[r], sums[r]); });
#endif
    int first_row = 0, end_of_rows = R;
    if (active > 1) {
        if constexpr (WAITS) {
            const int rows = rows_to_join(active), piece = (int)blockIdx.x - (active - (R + rows - 1) / rows);
#ifndef ON_HOST
            if (piece < 0) return;
            first_row = piece * rows, end_of_rows = min(R, first_row + rows);
#else  // blocks run one after the other: the last one joins all
            if ((int)blockIdx.x + 1 < active) return;
#endif
            for (int r = first_row; r < end_of_rows; r += rows) {  // once, but on a host
                __syncthreads();                                   // all have read the mixes of warps that are replaced
                Joined(rows).join(r, parts, active, (Joined::Found*)shared, [&](int r, int i, float4 x) {
                    answer(r, i, x.x, x.y);
                    answer(r, i + 2, x.z, x.w);
                });
            }
        } else {
            if (!last_to_arrive(tickets + head, active)) return;
            // The share of every part in each row comes first, then sums whose loads do not wait.
            float* share = (float*)queries;  // R shares of each block fit: the launching side sees to that
            for (int r = warp; r < R; r += WARPS) shares_of_ranges<PART, R, 2>(parts + R * DV + r, active, share + r * active, lane);
            __syncthreads();
            for (int i = 4 * threadIdx.x; i < R * DV; i += 4 * THREADS) {
                const float4 sum = join_ranges<PART>(parts + i, 0, active, share + i / DV * active);
                answer(i / DV, i % DV, sum.x, sum.y);
                answer(i / DV, i % DV + 2, sum.z, sum.w);
            }
        }
    }
    if (HAD_V) {
        __syncthreads();
        for (int r = first_row + warp; r < end_of_rows; r += WARPS) {
            hadamard_row(answers + r * DV, DV, HAD_V, lane);
            for (int i = lane; i < DV; i += 32) out[place_of(r) * DV + i] = answers[r * DV + i] * gate(r, i);
        }
    }
}
