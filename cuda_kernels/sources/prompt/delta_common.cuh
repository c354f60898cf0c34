// What kernels of delta nets over many tokens have in common: the shape, the inverse of a triangle and products with it.
#pragma once
#include "prompt/recurrent.cuh"

constexpr int GROUP = VALUE_HEADS / KEY_HEADS, PAST = TAPS - 1;
constexpr int CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE;
constexpr int TURN = 2 * KEY + 2 * GROUP * VALUE;  // elements of a key head if JOINED
static_assert(KEY % 4 == 0 && VALUE % 4 == 0 && VALUE_HEADS % KEY_HEADS == 0 && TAPS >= 2, "a shape this is made for");

// The key head of value head `head`.
__device__ __forceinline__ int key_head(int head) { return TILED ? head % KEY_HEADS : head / GROUP; }

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }

constexpr int THREADS = 256;  // of all kernels but `heads`
constexpr int KEYS = (KEY + 15) / 16 * 16, VALUES = (VALUE + 15) / 16 * 16;  // lengths in shared memory, with zeros at the end
constexpr int KEY_PITCH = halves_pitch(KEYS), VALUE_PITCH = second_pitch(VALUES), SQUARE_PITCH = first_pitch(CHUNK);

// The products of 16 rows of T beta in shared memory and HALF_OF of the columns of b, from `first` on, to out[CHUNK][LENGTH]: in float32 as they are,
// or in float16.
template <int LENGTH, int HALF_OF, class B, class T>
__device__ __forceinline__ void times_t(const float* t, const B* b, int pitch, int row, int first, T* out) {
    float d[HALF_OF / 8][4] = {};
    by_columns(d, t + row * SQUARE_PITCH, SQUARE_PITCH, b + first, pitch, row + 16);  // T ends at its diagonal
    const int g = threadIdx.x % 32 / 4, two = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < HALF_OF / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int column = first + 8 * i + two;
            if (column >= LENGTH) continue;
            const float x = d[i][2 * h], y = d[i][2 * h + 1];
            T* at = out + (row + g + 8 * h) * LENGTH + column;
            if constexpr (sizeof(T) == 4) *(float2*)at = make_float2(x, y);
            else store_two(at, x, y);
        }
}

// What is below the diagonal of inverses of two blocks of SIZE together, for all pairs of blocks of the square: -T2 (L T1). A thread has column j of T1 and
// a quarter of the rows.
template <int SIZE>
__device__ __forceinline__ void pair_up(float* square, int j, int quarter) {
    constexpr int P = SQUARE_PITCH, MINE = SIZE / 4;
    const bool left = j % (2 * SIZE) < SIZE;
    const int top = j / (2 * SIZE) * 2 * SIZE, first = top + SIZE + quarter * MINE;
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        float y[MINE] = {};
        const int from = turn ? top + SIZE : top;
        if (left)
#pragma unroll 4
            for (int m = from; m < from + SIZE; m++) {
                const float x = square[m * P + j];
#pragma unroll
                for (int i = 0; i < MINE; i++) y[i] = fmaf(square[(first + i) * P + m], x, y[i]);
            }
        __syncthreads();
        if (left)
#pragma unroll
            for (int i = 0; i < MINE; i++) square[(first + i) * P + j] = turn ? -y[i] : y[i];
        __syncthreads();
    }
}

// The strictly lower part L of a square in shared memory becomes (I + L)^-1 times the columns' `betas`, rounded, with zeros above the diagonal; by a block.
// First the inverses of PART x PART blocks on the diagonal, a thread for a column, from above to below; then pairs of blocks, twice.
__device__ __forceinline__ void invert(float* square, const float* betas) {
    constexpr int PART = 16, P = SQUARE_PITCH;
    const int j = threadIdx.x % CHUNK, quarter = threadIdx.x / CHUNK;
    if (threadIdx.x < CHUNK) {
        const float* l = square + j / PART * PART * (P + 1);
        float t[PART];
#pragma unroll
        for (int i = 0; i < PART; i++) {
            float sum[2] = {0.f, 0.f};
#pragma unroll
            for (int m = 0; m < i; m++) sum[m % 2] = fmaf(l[i * P + m], t[m], sum[m % 2]);
            t[i] = (i == j % PART ? 1.f : 0.f) - (sum[0] + sum[1]);
        }
        __syncwarp();  // a block on the diagonal is that of half a warp
#pragma unroll
        for (int i = 0; i < PART; i++) square[(j / PART * PART + i) * P + j] = t[i];
    }
    __syncthreads();
    pair_up<PART>(square, j, quarter);
    pair_up<2 * PART>(square, j, quarter);
    for (int i = quarter; i < CHUNK; i += THREADS / CHUNK) {
        float& x = square[i * P + j];
        x = i >= j ? rounded(x * betas[j]) : 0.f;
    }
}
