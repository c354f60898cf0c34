// Rows of quantized caches in prompts: new ones are encoded, those that attention reads become halves.
//
// Compiled per ROW_TYPE (of the cache), LENGTH (elements of a row), HADAMARD (block of the transform, or 0) and ALONE (rows one after the other, as of
// latent attention, not in tiles).
#include "attention/encode.cuh"
#include "prompt/overlap.cuh"
#include "attention/rows.cuh"

constexpr int WARPS = 8, UNITS = LENGTH / 8;

template <class Byte>
__device__ __forceinline__ Fields<Byte> row_of(Byte* cache, int position, int head, int heads) {
    if constexpr (ALONE) return fields_of<ROW_TYPE, LENGTH>(cache + ((long long)position * heads + head) * row_bytes(ROW_TYPE, LENGTH));
    else return in_cache<ROW_TYPE, LENGTH>(cache, position, head, heads);
}

// x float32[rows / heads, heads, LENGTH] to positions from `position` of the cache; a warp for each row.
extern "C" __global__ void __launch_bounds__(32 * WARPS) store_rows(const float* x, u8* cache, int position, int heads, int rows) {
    follow_launch_before();
    __shared__ __align__(16) float held[WARPS][LENGTH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    float* mine = held[warp];
    for (int i = lane; i < LENGTH; i += 32) mine[i] = x[(long long)row * LENGTH + i];
    __syncwarp();
    if (HADAMARD) hadamard_row(mine, LENGTH, HADAMARD, lane);
    encode_row<ROW_TYPE, LENGTH>(mine, row_of(cache, position + row / heads, row % heads, heads), lane, [](int, float) {});
}

// out float16[rows, heads, LENGTH] of positions from `position`; a thread for each 8 elements.
extern "C" __global__ void __launch_bounds__(256) read_rows(const u8* cache, uint4* out, int position, int heads, long long units) {
    follow_launch_before();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= units) return;
    const int row = (int)(i / UNITS);
    out[i] = decode_halves<ROW_TYPE, LENGTH>(row_of(cache, position + row / heads, row % heads, heads), (int)(i % UNITS));
}
