// Scores and mixes on tensor cores, warp by warp: every warp takes every WARPS-th tile of TILE positions of the block's range through a ring
// in shared memory, and keeps its maxima, sums and mixes to itself until the end. No barrier of the block is in the loop, so that
// the ring of every warp is always being filled.
//
// Products are turned: positions are the rows of the left operand, which has 16, and queries the columns of the right one, which
// has 8. Queries and probabilities are split into two parts (mma.cuh); up to 4 queries have both parts in the same 8 columns.
// Encoded rows are copied as they are stored. Their keys are multiplied as codes in bytes, by queries in two parts of 8 bits, and the scales of
// keys multiply scores; values are decoded to half precision in registers.
#pragma once
#include "attention/codes.cuh"

using RingK = InRing<TYPE_K, DK>;
using RingV = InRing<TYPE_V, DV>;
constexpr int TILE_K = TILE / 16 * RingK::BYTES, TILE_V = TILE / 16 * RingV::BYTES;
constexpr int RING_STAGE = TILE_K + TILE_V, RING = STAGES * RING_STAGE;  // of a warp
constexpr bool CODED_K = !is_float(TYPE_K), CODED_V = !is_float(TYPE_V), PACKED = R <= 4;
static_assert(TYPE_K == TYPE_V || ((CODED_K || TYPE_K == F16) && (CODED_V || TYPE_V == F16)), "products of one type of floats");
static_assert(TYPE_V != Q8_KV, "values have a scale per block");
constexpr int N_TILES = (R + 7) / 8, PARTS = PACKED ? 1 : 2, RP = 8 * N_TILES, M_TILES = TILE / 16;
constexpr int STRIDE_Q = CODED_K ? DK + 32 : DK * 2 + 16;
constexpr int STEPS = DK / (CODED_K ? 32 : 16);  // of a product
constexpr int HIGH_BITS = 8, LARGEST = 127 << HIGH_BITS;  // of a query in two parts of 8 bits: high and low ones
// Integers up to 2^22 have their value added to these bits, which are 1.5 * 2^23 as a float.
constexpr int AS_FLOAT = 0x4b400000;
constexpr float LET_GROW = 8.f;  // a power of 2: sums are scaled when a score exceeds the maximum so far by more
static_assert(R <= 16 && TILE % 16 == 0 && DK % 16 == 0 && DV % 16 == 0 && ROW_K % 4 == 0 && ROW_V % 4 == 0, "a shape this is made for");

#include "attention/ring.cuh"

// x and y in the type of the operands, and what that leaves of them.
__device__ __forceinline__ void both_parts(float x, float y, u32& whole, u32& rest) {
    u16 a, b, c, d;
    two_parts(x, &a, &c);
    two_parts(y, &b, &d);
    whole = a | (u32)b << 16, rest = c | (u32)d << 16;
}

using Keys = Codes<CODED_K ? TYPE_K : Q8_0, CODED_K ? DK : 32>;
using Values = Codes<CODED_V ? TYPE_V : Q8_0, CODED_V ? DV : 32>;
using RowsK = Rows<TYPE_K, DK>;
using RowsV = Rows<TYPE_V, DV>;

struct Mixer {
    template <int TYPE, int D>
    static __device__ __forceinline__ void store(const float* row, const Fields<u8>& cache, char* kept, int lane) { store_bytes<TYPE, D>(row, cache, kept, lane); }

    static constexpr int Q_PART = RP * STRIDE_Q, Q_BYTES = 2 * Q_PART;
    // Floats of a row that warps join: a word more after every 16, and rows that begin 4 banks apart, so that what lanes store goes to different
    // banks. Rows to transform have their place after those of all warps.
    static constexpr int JOINED = (DV + DV / 16 + 11) / 16 * 16 + 4, ANSWERS = WARPS * R * JOINED;
    static constexpr bool OWN_RING = !HAD_V && 4 * R * JOINED <= RING;  // the rows of a warp fit where its tiles were: it need not wait for others
    static constexpr int WARP_JOINED = OWN_RING ? RING / 4 : R * JOINED;
    static constexpr int JOIN_BYTES = 4 * (ANSWERS + (HAD_V ? R * DV : 0));
    static __device__ constexpr int joined_at(int r, int i) { return r * JOINED + i + i / 16; }
    // Of queries that multiply codes: their units | sums of blocks, for minima.
    static constexpr int MINIMA = CODED_K && Keys::MIN ? STEPS * RP : 0, SUMS_BYTES = CODED_K ? 4 * (RP + MINIMA) : 0;
    static constexpr bool Q_IN_REGISTERS = STEPS * N_TILES * PARTS * 2 <= 32;
    // Lanes: `j` counts positions (or elements of V), and queries 2 t, 2 t + 1 of every 8 belong to a lane.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = lane / 4, t = lane % 4;
    float mix[DV / 16][N_TILES][4] = {};
    float most[N_TILES][2], sum[N_TILES][2];

    // A sink is a score without a value.
    __device__ __forceinline__ void start(const float* sinks, bool sink, int head) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool counts = SINKS && sink && warp == 0;
                most[n][e] = counts ? sinks[head * GROUP + min(query_of(n, e), R - 1) % GROUP] * LOG2E : -INFINITY;
                sum[n][e] = counts && j == 0 ? 1.f : 0.f;
            }
    }

    static __device__ __forceinline__ void put_query(char* q, float* sums, int r, const float* row, float scale, int lane) {
        if constexpr (CODED_K) {
            put_bytes(q, sums, r, row, scale, lane);
        } else {
            u16* to = (u16*)(q + r * STRIDE_Q);
            for (int i = lane; i < DK; i += 32) two_parts(row[i] * scale, to + i, to + Q_PART / 2 + i);
        }
    }

    static __device__ __forceinline__ void put_bytes(char* q, float* sums, int r, const float* row, float scale, int lane) {
        constexpr int ROUNDS = (DK + 127) / 128;
        float x[ROUNDS][4], largest = 0.f, odd = 0.f;  // elements 128 round + 4 lane and the three after it, of block 4 round + lane / 8
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int at = 128 * round + 4 * lane;
            const float4 of_row = DK % 128 == 0 || at < DK ? *(const float4*)(row + at) : make_float4(0.f, 0.f, 0.f, 0.f);
            x[round][0] = of_row.x * scale, x[round][1] = of_row.y * scale, x[round][2] = of_row.z * scale, x[round][3] = of_row.w * scale;
#pragma unroll
            for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[round][i])), odd += x[round][i] * 0.f;
        }
        // NaN and infinities make all scores of the query NaN.
        const float unit = __any_sync(0xffffffff, odd != 0.f) ? __int_as_float(0x7fffffff) : __fdiv_rn(warp_max(largest), (float)LARGEST);
        const float inverse = unit == 0.f ? 0.f : __fdiv_rn(1.f, unit);
        if (lane == 0) sums[r] = unit * (1.f / Keys::LARGER);
        char* to = q + r * STRIDE_Q;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int at = 128 * round + 4 * lane;
            const bool there = DK % 128 == 0 || at < DK;
            int high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int whole = max(-LARGEST, min(LARGEST, (int)rintf(x[round][i] * inverse)));
                high[i] = (whole + (1 << HIGH_BITS - 1)) >> HIGH_BITS, low[i] = whole - (high[i] << HIGH_BITS);
            }
            if constexpr (Keys::NEIGHBOURS) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int place = at / 32 * 32 + Keys::place_of(at % 32 + i);
                    if (there) to[place] = (char)high[i], to[Q_PART + place] = (char)low[i];
                }
            } else {  // neighbours stay together
                const int place = at / 32 * 32 + Keys::place_of(at % 32);
                if (there) *(u32*)(to + place) = four_bytes(high), *(u32*)(to + Q_PART + place) = four_bytes(low);
            }
            if constexpr (MINIMA) {
                float all = x[round][0] + x[round][1] + x[round][2] + x[round][3];
#pragma unroll
                for (int d = 1; d < 8; d *= 2) all += __shfl_xor_sync(0xffffffff, all, d);
                if (there && lane % 8 == 0) sums[RP + at / 32 * RP + r] = all;
            }
        }
    }

    // Rows from R on have to be numbers.
    static __device__ __forceinline__ void clear_queries(char* q, float* sums) {
        if constexpr (constexpr int WORDS = (RP - R) * STRIDE_Q / 4; WORDS > 0)
            for (int i = threadIdx.x; i < 2 * WORDS; i += THREADS) ((u32*)(q + i / WORDS * Q_PART + R * STRIDE_Q))[i % WORDS] = 0;
        for (int i = threadIdx.x; i < SUMS_BYTES / 4; i += THREADS)
            if (i % RP >= R) sums[i] = 0.f;
    }

    // Step k of the products with queries 8 n .. 8 n + 7. Encoded keys have their elements in the order of `Codes::of_row`.
    __device__ __forceinline__ void query(const char* q, int k, int n, int part, u32 (&b)[2]) const {
        const char* row = q + (PACKED ? j / 4 * Q_PART + j % 4 * STRIDE_Q : part * Q_PART + (8 * n + j) * STRIDE_Q) + 32 * k;
        if constexpr (CODED_K) {
            const uint2 w = *(const uint2*)(row + 8 * t);
            b[0] = w.x, b[1] = w.y;
        } else {
            b[0] = *(const u32*)(row + 4 * t), b[1] = *(const u32*)(row + 4 * t + 16);
        }
    }

    // The query that column e (0 or 1) of a lane belongs to.
    __device__ __forceinline__ int query_of(int n, int e) const { return PACKED ? (2 * t + e) % 4 : 8 * n + 2 * t + e; }

    // Tiles of positions first .. last-1 of the block. Those from p0 on are in new_k and new_v, if this layer stores them (OWN_KV).
    __device__ __forceinline__ void run(char* ring, const char* q, const float* sums_q, const u8* cache_k, const u8* cache_v, const char* new_k,
                                        const char* new_v, int first, int last, int p0, int head) {
        char* own = ring + warp * RING;
        const int tiles = (last - first + TILE - 1) / TILE, n_old = OWN_KV ? p0 : p0 + ROWS;
        u32 held[Q_IN_REGISTERS ? STEPS : 1][N_TILES][PARTS][2];
        if constexpr (Q_IN_REGISTERS)
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int part = 0; part < PARTS; part++) query(q, k, n, part, held[k][n][part]);
        int stage = 0, next = warp + STAGES * WARPS, left = min(last, n_old) - (first + next * TILE);  // positions from the next tile to copy on
        const u8 *next_k = RowsK::tile(cache_k, first + next * TILE, head), *next_v = RowsV::tile(cache_v, first + next * TILE, head);
        for (int tile = warp; tile < tiles; tile += WARPS) {
            char *tile_k = own + stage * RING_STAGE, *tile_v = tile_k + TILE_K;
            const int at = first + tile * TILE;
            const bool has_new = OWN_KV && at + TILE > p0, inside = at + TILE <= p0 + 1 && (!WINDOW || at >= first_seen(p0 + ROWS - 1));
            wait_for_copies<2 * STAGES - 2>();
            __syncwarp();
            if (has_new) {
                insert<RingK, ROW_K, padded_row(ROW_K)>(tile_k, new_k, at, p0);
                insert<RingV, ROW_V, padded_row(ROW_V)>(tile_v, new_v, at, p0);
                __syncwarp();
            }

            float s[M_TILES][N_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) score(tile_k + m * RingK::BYTES, q, held, sums_q, s[m]);
            __syncwarp();
            if (next < tiles) RowsK::copy(tile_k, next_k, left);
            end_of_copies();

            probabilities(s, at, p0, inside);
            u32 p[M_TILES][N_TILES][PARTS][2];
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 whole, rest;
                        both_parts(s[m][n][2 * half], s[m][n][2 * half + 1], whole, rest);
                        if constexpr (PACKED) p[m][n][0][half] = turned(t < 2 ? whole : rest);
                        else p[m][n][0][half] = turned(whole), p[m][n][PARTS - 1][half] = turned(rest);
                    }

#pragma unroll
            for (int m = 0; m < M_TILES; m++) add(tile_v + m * RingV::BYTES, p[m]);
            __syncwarp();
            if (next < tiles) RowsV::copy(tile_v, next_v, left);
            end_of_copies();
            next += WARPS, left -= WARPS * TILE, next_k += RowsK::NEXT, next_v += RowsV::NEXT;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }

    // The first tiles of the ring, two groups of copies each. A tile is copied when the one before is there: what the
    // previous launch still reads or stores would otherwise wait for all of them.
    static __device__ __forceinline__ void begin(char* ring, const u8* cache_k, const u8* cache_v, int first, int last, int n_old, int head) {
        const int warp = threadIdx.x / 32, tiles = (last - first + TILE - 1) / TILE;
#pragma unroll 1  // code that runs once is fetched once
        for (int s = 0; s < STAGES; s++) {
            const int tile = warp + s * WARPS, at = first + tile * TILE;
            char* to = ring + warp * RING + s * RING_STAGE;
            if (tile < tiles) RowsK::copy(to, RowsK::tile(cache_k, at, head), min(last, n_old) - at);
            end_of_copies();
            if (tile < tiles) RowsV::copy(to + TILE_K, RowsV::tile(cache_v, at, head), min(last, n_old) - at);
            end_of_copies();
            if (s + 1 < STAGES) wait_for_copies<0>();
        }
    }

    template <class Ring, int ROW, int KEPT>
    __device__ __forceinline__ void insert(char* tile, const char* kept, int at, int p0) const {
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            const int row = p0 + i - at;
            if (row < 0 || row >= TILE) continue;
#pragma unroll 1  // it runs once
            for (int w = lane; w < ROW / 4; w += 32) *(u32*)(tile + Ring::place(row, 4 * w)) = ((const u32*)(kept + i * KEPT))[w];
        }
    }

    // The product of codes of 16 positions in bytes with step b of a part of the queries, and AS_FLOAT added.
    template <typename Held>
    __device__ __forceinline__ void multiply_bytes(const u32 (&a)[4], const char* q, const Held& held, int b, int n, int part, int (&c)[4]) const {
        const int from[4] = {AS_FLOAT, AS_FLOAT, AS_FLOAT, AS_FLOAT};
        if constexpr (Q_IN_REGISTERS) {
            mma_bytes(c, a, held[b][n][part], from);
        } else {
            u32 of_q[2];
            query(q, b, n, part, of_q);
            mma_bytes(c, a, of_q, from);
        }
    }

    // s[n]: positions of rows j and j + 8, queries 2 t and 2 t + 1 of every 8.
    template <typename Held>
    __device__ __forceinline__ void score(const char* tile_k, const char* q, const Held& held, const float* sums_q, float (&s)[N_TILES][4]) const {
        auto multiply = [&](int k, const u32(&a)[4], float(&c)[N_TILES][PARTS][4]) {
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    if constexpr (Q_IN_REGISTERS) mma(c[n][part], a, held[k][n][part]);
                    else {
                        u32 b[2];
                        query(q, k, n, part, b);
                        mma(c[n][part], a, b);
                    }
                }
        };
        auto total = [&](const float(&c)[PARTS][4], int i) { return PACKED ? c[0][i] : c[0][i] + c[PARTS - 1][i]; };
        if constexpr (CODED_K) {
            const char* row = tile_k + j * RingK::PITCH;
            const char* other = row + 8 * RingK::PITCH;
            const char* of_scales = tile_k + RingK::SCALES + j * RingK::SCALES_PITCH;
            const typename Keys::Scales scales[2] = {typename Keys::Scales(of_scales), typename Keys::Scales(of_scales + 8 * RingK::SCALES_PITCH)};
            float all[N_TILES][PARTS][4] = {}, minima[N_TILES][4] = {};
#pragma unroll
            for (int b = 0; b < STEPS; b++) {
                u32 x[2], y[2];
                Keys::of_row(row, b, t, x, RingK::swap(j));
                Keys::of_row(other, b, t, y, RingK::swap(j));
                const u32 a[4] = {x[0], y[0], x[1], y[1]};
                const float d[2] = {scales[0].factor(b), scales[1].factor(b)};
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        int c[4];
                        multiply_bytes(a, q, held, b, n, part, c);
#pragma unroll
                        for (int i = 0; i < 4; i++) all[n][part][i] = fmaf(d[i / 2], __int_as_float(c[i]) - __int_as_float(AS_FLOAT), all[n][part][i]);
                    }
                    if constexpr (MINIMA) {
                        const float2 of_q = *(const float2*)(sums_q + RP + b * RP + 8 * n + 2 * t);
                        const float m[2] = {scales[0].minimum(b), scales[1].minimum(b)};
#pragma unroll
                        for (int i = 0; i < 4; i++) minima[n][i] = fmaf(m[i / 2], i % 2 ? of_q.y : of_q.x, minima[n][i]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                constexpr float by = 1 << HIGH_BITS;
                const float2 units = *(const float2*)(sums_q + (PACKED ? 2 * t % 4 : 8 * n + 2 * t));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float parts = PACKED ? (t < 2 ? by : 1.f) * all[n][0][i] : fmaf(by, all[n][0][i], all[n][PARTS - 1][i]);
                    s[n][i] = fmaf(i % 2 ? units.y : units.x, parts, minima[n][i]);
                }
            }
        } else {
            float c[N_TILES][PARTS][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                u32 a[4];
                load_a(a, tile_k + 32 * k, RingK::PITCH, lane);
                multiply(k, a, c);
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = total(c[n], i);
        }
        if constexpr (PACKED)
#pragma unroll
            for (int i = 0; i < 4; i++) s[0][i] += __shfl_xor_sync(0xffffffff, s[0][i], 2);
    }

    // Scores become exponentials against the running maximum.
    __device__ __forceinline__ void probabilities(float (&s)[M_TILES][N_TILES][4], int at, int p0, bool inside) {
        bool grows = false;
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = s[m][n][i];
                    if (SOFTCAP) x = CAP * tanhf(x / CAP);
                    if (!inside) {
                        const int p = at + 16 * m + 8 * (i / 2) + j, newest = p0 + query_of(n, i % 2) / GROUP;
                        if (p > newest || (WINDOW && p < first_seen(newest))) x = -INFINITY;
                    }
                    grows |= x > most[n][i % 2] + LET_GROW;
                }
        if (__any_sync(0xffffffff, grows)) {
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float now = most[n][e];
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) now = fmaxf(now, fmaxf(s[m][n][e], s[m][n][e + 2]));
#pragma unroll
                    for (int d = 4; d < 32; d *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, d));
                    const float factor = now == -INFINITY ? 1.f : exp2f(most[n][e] - now);
                    most[n][e] = now;
                    sum[n][e] *= factor;
#pragma unroll
                    for (int v = 0; v < DV / 16; v++) mix[v][n][e] *= factor, mix[v][n][e + 2] *= factor;
                }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float base = most[n][e] == -INFINITY ? 0.f : most[n][e];  // a query that sees nothing yet
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float& x = s[m][n][2 * half + e];
                        x = exp2f(x - base);
                        sum[n][e] += x;
                    }
            }
    }

    __device__ __forceinline__ void add(const char* tile_v, const u32 (&p)[N_TILES][PARTS][2]) {
        auto multiply = [&](int v, const u32(&a)[4]) {
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int part = 0; part < PARTS; part++) mma(mix[v][n], a, p[n][part]);
        };
        if constexpr (CODED_V) {
            // Of rows 2 t, 2 t + 1 of products, and 8 later.
            auto row_of = [&](int i) { return 2 * t + i % 2 + i / 2 * 8; };
            auto codes_of = [&](int i) { return tile_v + row_of(i) * RingV::PITCH; };
            auto scale_of = [&](int i) { return tile_v + RingV::SCALES + row_of(i) * RingV::SCALES_PITCH; };
#pragma unroll
            for (int g = 0; g < Values::GROUPS; g++) {
                u32 x[4][Values::WORDS], d[2], least[2];
                const int scale = Values::At::scale(Values::block_of(g, j));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Values::of_group(codes_of(2 * i), g, j, x[2 * i], RingV::swap(row_of(2 * i)));
                    Values::of_group(codes_of(2 * i + 1), g, j, x[2 * i + 1], RingV::swap(row_of(2 * i + 1)));
                    if constexpr (Values::MIN) {
                        const u32 first = *(const u32*)(scale_of(2 * i) + scale), second = *(const u32*)(scale_of(2 * i + 1) + scale);
                        d[i] = __byte_perm(first, second, 0x5410), least[i] = __byte_perm(first, second, 0x7632);
                    } else {
                        d[i] = *(const u16*)(scale_of(2 * i) + scale) | (u32) * (const u16*)(scale_of(2 * i + 1) + scale) << 16;
                    }
                }
                auto value = [&](u32 codes, int i) {
                    if constexpr (Values::MIN) return fma_halves(codes, d[i], least[i]);
                    else return times_halves(codes, d[i]);
                };
#pragma unroll
                for (int k = 0; k < Values::WORDS; k++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {  // elements 2 h and 2 h + 1 of word k
                        const u32 first = __byte_perm(x[0][k], x[1][k], h ? 0x7362 : 0x5140), second = __byte_perm(x[2][k], x[3][k], h ? 0x7362 : 0x5140);
                        const u32 a[4] = {value(Values::low_pair(first), 0), value(Values::high_pair(first), 0), value(Values::low_pair(second), 1),
                                          value(Values::high_pair(second), 1)};
                        multiply(2 * (g * Values::WORDS + k) + h, a);
                    }
            }
        } else {
#pragma unroll
            for (int v = 0; v < DV / 16; v++) {
                u32 a[4];
                load_a_turned(a, tile_v + 32 * v, RingV::PITCH, lane);
                multiply(v, a);
            }
        }
    }

    // put(r, i, x, y, most, sum) for elements i, i + 1 of each row, its maximum and its sum. Warps are joined in their order, in `joined`. `of_warps`:
    // RP for each warp.
    template <typename Put>
    __device__ __forceinline__ void finish(float* joined, float2* of_warps, Put put) {
        wait_for_copies<0>();
        if constexpr (OWN_RING) __syncwarp();
        else __syncthreads();
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int d = 4; d < 32; d *= 2) sum[n][e] += __shfl_xor_sync(0xffffffff, sum[n][e], d);
                const int r = query_of(n, e);
                if (j == 0 && r < R && (!PACKED || t < 2)) of_warps[warp * RP + r] = make_float2(most[n][e], sum[n][e]);
            }
        float* own = joined + warp * WARP_JOINED;
#pragma unroll
        for (int v = 0; v < DV / 16; v++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = mix[v][n][i];
                    if constexpr (PACKED) x += __shfl_xor_sync(0xffffffff, x, 2);
                    const int r = query_of(n, i % 2), word = v / 2;
                    const int element = CODED_V ? Values::element(word / Values::WORDS, word % Values::WORDS, j, v % 2 * 2 + i / 2) : 16 * v + j + 8 * (i / 2);
                    if (r < R && (!PACKED || t < 2)) own[joined_at(r, element)] = x;
                }
        __syncthreads();
#pragma unroll 1
        for (int i = 2 * threadIdx.x; i < R * DV; i += 2 * THREADS) {
            const int r = i / DV;
            float all = -INFINITY, total = 0.f, x = 0.f, y = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all = fmaxf(all, of_warps[w * RP + r].x);
            const float base = all == -INFINITY ? 0.f : all;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 of_warp = of_warps[w * RP + r];
                const float* other = joined + w * WARP_JOINED + joined_at(r, i % DV);
                const float factor = exp2f(of_warp.x - base);
                total = fmaf(factor, of_warp.y, total), x = fmaf(factor, other[0], x), y = fmaf(factor, other[1], y);
            }
            put(r, i % DV, x, y, all, total);
        }
    }
};
