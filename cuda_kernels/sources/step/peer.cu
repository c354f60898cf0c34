// Sums and concatenations over the GPUs of one host for a decoding step, in one launch and without a barrier. Every rank stores its
// elements in the memory of all, its own as well, each pair of 8 bytes with the number of the exchange next to the value, and waits until
// the pairs of all have this number. Values are added in the order of ranks, so that all ranks get the same bits.
//
// A rank's memory has two places for exchanges in turn, each with `units` units of 16 bytes (two pairs) per sending rank. Two are
// enough: a rank begins exchange e + 2 of a block after it has the values of exchange e + 1, which the others have sent after they had read
// those of exchange e. Block b always has the same elements and its own count of exchanges; all ranks launch the same grids.
//
// RANKS: how many ranks there are. What belongs to `rank` comes as arguments of its own (`memory`, `first`, `own`): an index that is no constant
// would put the others into local memory.
#include "step/common.cuh"
#include "step/peer_memory.cuh"

constexpr int THREADS = 128, EACH = 4;  // elements of a thread

struct Peers {
    u64 at[8];
};

__device__ __forceinline__ u64 place(u64 memory, u32 number, int sender, u32 units, u32 unit) {
    return memory + 16ull * (((number & 1) * RANKS + sender) * (u64)units + unit);
}

// Wait for the elements of all ranks, two units of each, which are read together.
__device__ __forceinline__ void receive(u64 memory, u32 number, u32 units, u32 unit, u64 most, u32* missing, float4 (&y)[RANKS]) {
    Patience patience(most, missing);
    for (int late = 0;; patience.wait(late)) {
        uint4 found[RANKS][2];
#pragma unroll
        for (int p = 0; p < RANKS; p++)
#pragma unroll
            for (int half = 0; half < 2; half++) found[p][half] = load16(place(memory, number, p, units, unit) + 16 * half);
        late = -1;
#pragma unroll
        for (int p = 0; p < RANKS; p++) {
            const uint4 a = found[p][0], b = found[p][1];
            if (((a.y ^ number) | (a.w ^ number) | (b.y ^ number) | (b.w ^ number)) != 0) late = p;
            y[p] = make_float4(__uint_as_float(a.x), __uint_as_float(a.z), __uint_as_float(b.x), __uint_as_float(b.z));
        }
        if (late < 0) return;
    }
}

// Store four elements of this rank in the memory of every rank, its own as well.
__device__ __forceinline__ void send_to_all(const Peers& peers, u32 number, int rank, u32 units, u32 unit, float4 own) {
#pragma unroll
    for (int p = 0; p < RANKS; p++) {
        const u64 to = place(peers.at[p], number, rank, units, unit);
        send16(to, make_uint4(__float_as_uint(own.x), number, __float_as_uint(own.y), number));
        send16(to + 16, make_uint4(__float_as_uint(own.z), number, __float_as_uint(own.w), number));
    }
}

// h += the sum of x over all ranks, or h = that sum, for n elements (a multiple of 4); x becomes 0.
extern "C" __global__ void __launch_bounds__(THREADS)
peer_sum(float* x, float* h, int assign, int n, u32* numbers, u32* missing, u64 most, int rank, u32 units, u64 memory, u64 p0, u64 p1,
         u64 p2, u64 p3, u64 p4, u64 p5, u64 p6, u64 p7) {
    const Peers peers{{p0, p1, p2, p3, p4, p5, p6, p7}};
    // The next product starts when the one before has ended on all multiprocessors: earlier, these blocks take registers that it needs on some of
    // them, and others would get two of its blocks.
    wait_for_inputs();
    start_dependents();
    const int i = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const u32 number = *(volatile u32*)(numbers + blockIdx.x) + 1, unit = i / 2;
    if (i < n) {
        const float4 own = __ldcg((const float4*)(x + i));
        send_to_all(peers, number, rank, units, unit, own);
        *(float4*)(x + i) = make_float4(0.f, 0.f, 0.f, 0.f);
        float4 old = make_float4(0.f, 0.f, 0.f, 0.f), y[RANKS];
        if (!assign) old = __ldcg((const float4*)(h + i));
        receive(memory, number, units, unit, most, missing, y);
        float4 sum = y[0];
#pragma unroll
        for (int p = 1; p < RANKS; p++) sum.x += y[p].x, sum.y += y[p].y, sum.z += y[p].z, sum.w += y[p].w;
        if (!assign) sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
        *(float4*)(h + i) = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

// out[rows, width] = the columns of all ranks side by side: rank r has ends[r] - ends[r - 1] of them, this one `own` from `first` on, in
// x[rows, own]. most_cols, a multiple of 4, is at least the largest of these counts.
extern "C" __global__ void __launch_bounds__(THREADS)
peer_gather(const float* x, float* out, int rows, int width, int most_cols, u32* numbers, u32* missing, u64 most, int rank, u32 units,
            u64 memory, int first, int own, int e0, int e1, int e2, int e3, int e4, int e5, int e6, int e7, u64 p0, u64 p1, u64 p2, u64 p3,
            u64 p4, u64 p5, u64 p6, u64 p7) {
    const Peers peers{{p0, p1, p2, p3, p4, p5, p6, p7}};
    const int ends[8] = {e0, e1, e2, e3, e4, e5, e6, e7};
    // The next product starts when the one before has ended on all multiprocessors: earlier, these blocks take registers that it needs on some of
    // them, and others would get two of its blocks.
    wait_for_inputs();
    start_dependents();
    const int i = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const u32 number = *(volatile u32*)(numbers + blockIdx.x) + 1, unit = i / 2;
    if (i < rows * most_cols) {
        const int row = i / most_cols, col = i % most_cols;
        float mine[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) mine[k] = col + k < own ? __ldcg(x + (long long)row * own + col + k) : 0.f;
        send_to_all(peers, number, rank, units, unit, make_float4(mine[0], mine[1], mine[2], mine[3]));
        float4 y[RANKS];
        receive(memory, number, units, unit, most, missing, y);
#pragma unroll
        for (int p = 0; p < RANKS; p++) {
            const int begin = p ? ends[p ? p - 1 : 0] : 0, count = ends[p] - begin;
            const float of_rank[EACH] = {y[p].x, y[p].y, y[p].z, y[p].w};
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (col + k < count) out[(long long)row * width + begin + col + k] = of_rank[k];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}
