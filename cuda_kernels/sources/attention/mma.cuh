// Scores and mixes of a tile on tensor cores, for caches in half precision (or bfloat16) with heads
// of a multiple of 16. Keys and values are used as they are; those of encoded types are rounded to
// half precision. Queries and probabilities are split
// into two parts, the rounded value and the rounding error, so that only the last bits of float32
// are lost (with bfloat16, 16 bits remain).
#pragma once
#include "attention/fragments.cuh"
#include "attention/tile.cuh"

constexpr int M_TILES = (R + 15) / 16, N_TILES = (DV / 8 + WARPS - 1) / WARPS;  // of rows; of 8 value elements for each warp
constexpr int STRIDE_Q = DK * 2 + 16, STRIDE_P = TILE * 2 + 16;                 // bytes
static_assert(DK % 16 == 0 && DV % 16 == 0 && (TYPE_K == BF16) == (TYPE_V == BF16), "a shape this is made for");

struct Mixer {
    template <int TYPE, int D>
    static __device__ __forceinline__ void store(const float* row, const Fields<u8>& cache, char* kept, int lane) { store_row<TYPE, D>(row, cache, kept, lane); }

    static constexpr int Q_PART = 16 * M_TILES * STRIDE_Q, P_PART = 16 * M_TILES * STRIDE_P;
    static constexpr int Q_BYTES = 2 * Q_PART, P_BYTES = 2 * P_PART, JOIN_BYTES = HAD_V ? R * DV * 4 : 0, ANSWERS = 0;
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    float mix[M_TILES][N_TILES][4] = {};

    static __device__ __forceinline__ void put_query(char* q, float*, int r, const float* row, float scale, int lane) {
        u16* to = (u16*)(q + r * STRIDE_Q);
        for (int i = lane; i < DK; i += 32) two_parts(row[i] * scale, to + i, to + Q_PART / 2 + i);
    }

    // A warp takes 8 positions at a time. Rows from R on are arbitrary, and their results are not
    // read.
    template <int P_TILES = TILE / (8 * WARPS)>  // of 8 positions for each warp
    static __device__ __forceinline__ void score(const char* q, const char* tile_k, float* scores) {
        static_assert(P_TILES * 8 * WARPS == TILE, "a tile this is made for");
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const char* at = tile_k + (8 * warp + lane / 4) * STRIDE_K + lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float sum[P_TILES][2][4] = {};
#pragma unroll
            for (int k = 0; k < DK / 16; k++) {
                u32 whole[4], rest[4];
                load_a(whole, q + 16 * m * STRIDE_Q + 32 * k, STRIDE_Q, lane);
                load_a(rest, q + Q_PART + 16 * m * STRIDE_Q + 32 * k, STRIDE_Q, lane);
#pragma unroll
                for (int t = 0; t < P_TILES; t++) {
                    const char* from = at + 8 * WARPS * t * STRIDE_K + 32 * k;
                    const u32 b[2] = {*(const u32*)from, *(const u32*)(from + 16)};
                    mma(sum[t][0], whole, b);
                    mma(sum[t][1], rest, b);
                }
            }
#pragma unroll
            for (int t = 0; t < P_TILES; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = 16 * m + 8 * half + lane / 4;
                    if (r < R)
                        *(float2*)(scores + r * TILE + 8 * (warp + WARPS * t) + lane % 4 * 2) =
                            make_float2(sum[t][0][2 * half] + sum[t][1][2 * half], sum[t][0][2 * half + 1] + sum[t][1][2 * half + 1]);
                }
        }
    }

    static __device__ __forceinline__ void put_probability(char* p, int r, int i, float x) {
        u16* to = (u16*)(p + r * STRIDE_P) + i;
        two_parts(x, to, to + P_PART / 2);
    }

    // A warp takes every WARPS-th group of 8 value elements. Rows of V from n up to the next multiple of 16 must be numbers.
    __device__ __forceinline__ void add(const char* p, const char* tile_v, const float* rescale, int n) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float factor = rescale[min(16 * m + 8 * half + lane / 4, R - 1)];
#pragma unroll
                for (int t = 0; t < N_TILES; t++) mix[m][t][2 * half] *= factor, mix[m][t][2 * half + 1] *= factor;
            }
#pragma unroll 4
        for (int k = 0; k < (n + 15) / 16; k++) {
            u32 b[N_TILES][2];
#pragma unroll
            for (int t = 0; t < N_TILES; t++)
                load_b_turned(b[t], tile_v + 16 * k * STRIDE_V + 16 * min(warp + WARPS * t, DV / 8 - 1), STRIDE_V, lane);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                u32 whole[4], rest[4];
                load_a(whole, p + 16 * m * STRIDE_P + 32 * k, STRIDE_P, lane);
                load_a(rest, p + P_PART + 16 * m * STRIDE_P + 32 * k, STRIDE_P, lane);
#pragma unroll
                for (int t = 0; t < N_TILES; t++) {
                    mma(mix[m][t], whole, b[t]);
                    mma(mix[m][t], rest, b[t]);
                }
            }
        }
    }

    // put(r, i, x, y) for elements i, i + 1 of each row.
    template <typename Put>
    __device__ __forceinline__ void finish(float* joined, Put put) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int t = 0; t < N_TILES; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = 16 * m + 8 * half + lane / 4, group = warp + WARPS * t;
                    if (r < R && group < DV / 8) put(r, 8 * group + lane % 4 * 2, mix[m][t][2 * half], mix[m][t][2 * half + 1]);
                }
    }
};
