// latent_attention of mla.cu on tensor cores (mma), tile by tile.
#pragma once

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
                    decode_halves<TYPE_K, DK>(fields_of<TYPE_K, DK>(rows + row * ROW_K), part);
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
