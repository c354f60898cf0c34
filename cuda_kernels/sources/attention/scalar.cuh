// Scores and mixes of a tile in float32 with the general units: any cache type, any head size.
#pragma once
#include "attention/tile.cuh"

// Division of the mix among threads: a thread owns 4 elements of V, up to 8 rows, and every
// POSITION_GROUPS-th position.
constexpr int CHUNKS = DV / 4, GROUPS = THREADS / CHUNKS;
constexpr int ROW_GROUPS = (R + 7) / 8 < GROUPS ? (R + 7) / 8 : GROUPS;
constexpr int OWN = (R + ROW_GROUPS - 1) / ROW_GROUPS;
constexpr int POSITION_GROUPS = GROUPS / ROW_GROUPS;
constexpr int RP = (R + 3) / 4 * 4 + 4;  // floats from position to position of the probabilities

static_assert(THREADS % TILE == 0, "a thread takes one position");

struct Mixer {
    template <int TYPE, int D>
    static __device__ __forceinline__ void store(const float* row, const Fields<u8>& cache, char* kept, int lane) { store_row<TYPE, D>(row, cache, kept, lane); }

    static constexpr int Q_BYTES = R * DK * 4, P_BYTES = TILE * RP * 4, JOIN_BYTES = POSITION_GROUPS * R * DV * 4, ANSWERS = 0;
    const int chunk = threadIdx.x % CHUNKS, group = threadIdx.x / CHUNKS;
    const int row_group = group % ROW_GROUPS, position_group = group / ROW_GROUPS;
    const bool mixes = group < ROW_GROUPS * POSITION_GROUPS;
    float mix[OWN][4] = {};

    // Row r of the queries, ready in `row`, as `scores` reads it.
    static __device__ __forceinline__ void put_query(char* q, float*, int r, const float* row, float scale, int lane) {
        for (int i = lane; i < DK; i += 32) ((float*)q)[r * DK + i] = row[i] * scale;
    }

    // scores[r * TILE + i] of all rows and positions. A thread takes one position and up to 4 rows at a time.
    static __device__ __forceinline__ void score(const char* q, const char* tile_k, float* scores) {
        constexpr int PARTS = THREADS / TILE, AT_ONCE = R >= 4 * PARTS ? 4 : R >= 2 * PARTS ? 2 : 1;
        const int pos = threadIdx.x % TILE;
        for (int r0 = threadIdx.x / TILE * AT_ONCE; r0 < R; r0 += PARTS * AT_ONCE) {
            float sum[AT_ONCE] = {};
#pragma unroll 4
            for (int i = 0; i < DK; i += 8) {
                float x[8];
                read8<TYPE_K>(tile_k + pos * STRIDE_K, i, x);
#pragma unroll
                for (int o = 0; o < AT_ONCE; o++) {
                    const float4* w = (const float4*)((const float*)q + min(r0 + o, R - 1) * DK + i);
                    const float4 a = w[0], b = w[1];
                    sum[o] = fmaf(x[0], a.x, fmaf(x[1], a.y, fmaf(x[2], a.z, fmaf(x[3], a.w, sum[o]))));
                    sum[o] = fmaf(x[4], b.x, fmaf(x[5], b.y, fmaf(x[6], b.z, fmaf(x[7], b.w, sum[o]))));
                }
            }
#pragma unroll
            for (int o = 0; o < AT_ONCE; o++)
                if (r0 + o < R) scores[(r0 + o) * TILE + pos] = sum[o];
        }
    }

    static __device__ __forceinline__ void put_probability(char* p, int r, int i, float x) { ((float*)p)[i * RP + r] = x; }

    // The mix so far times rescale[r], plus the first n rows of the tile by their probabilities.
    __device__ __forceinline__ void add(const char* p, const char* tile_v, const float* rescale, int n) {
        if (!mixes) return;
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const float factor = rescale[min(row_group * OWN + o, R - 1)];
#pragma unroll
            for (int e = 0; e < 4; e++) mix[o][e] *= factor;
        }
#pragma unroll 2
        for (int i = position_group; i < n; i += POSITION_GROUPS) {
            float x[4];
            read4<TYPE_V>(tile_v + i * STRIDE_V, 4 * chunk, x);
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const float w = ((const float*)p)[i * RP + min(row_group * OWN + o, R - 1)];
#pragma unroll
                for (int e = 0; e < 4; e++) mix[o][e] = fmaf(w, x[e], mix[o][e]);
            }
        }
    }

    // put(r, i, x, y) for elements i, i + 1 of each row. Position groups are joined in their order, in `joined`.
    template <typename Put>
    __device__ __forceinline__ void finish(float* joined, Put put) {
        if (mixes)
#pragma unroll
            for (int o = 0; o < OWN; o++)
                if (row_group * OWN + o < R)
                    *(float4*)(joined + (position_group * R + row_group * OWN + o) * DV + 4 * chunk) =
                        make_float4(mix[o][0], mix[o][1], mix[o][2], mix[o][3]);
        __syncthreads();
        for (int i = 2 * threadIdx.x; i < R * DV; i += 2 * THREADS) {  // nobody else reads elements i, i + 1
            float2 sum = *(const float2*)(joined + i);
#pragma unroll
            for (int g = 1; g < POSITION_GROUPS; g++) {
                const float2 other = *(const float2*)(joined + g * R * DV + i);
                sum.x += other.x, sum.y += other.y;
            }
            put(i / DV, i % DV, sum.x, sum.y);
        }
    }
};
