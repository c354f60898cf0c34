// Sums of rows over the GPUs of one host, and the norm after them, in one launch: h += the sum of what all ranks add, x = norm(h).
//
// Every rank has memory that the others write to: flags u32[ranks][capacity], a flag per sender and row, then two places in turn for rows. A
// rank stores its part of a row there, as MOVED says, and then the number of the exchange in the row's flag. With two ranks everyone sends the
// whole part to the other. With more, row t belongs to rank t % ranks, which adds the parts and sends the sum back: each rank sends 2 (n - 1) / n
// rows per row instead of n - 1. Parts are added in the order of ranks, so that all ranks get the same bits.
//
// Two places are enough: a rank begins exchange e + 2 after it has ended e + 1, for which all others have sent, which they do after they have
// ended e. Blocks take rows in the order in which they start, so that the rows that wait for others never keep the first row that others wait for
// from being sent, however many blocks run at once.
#include "prompt/norm.cuh"

typedef unsigned long long u64;

constexpr int BF16 = 0, F16 = 1, F32 = 2;  // what moves

struct Exchange {
    u32* state;        // {exchanges that have ended, rows taken, rows done}
    u32* missing;      // the rank that did not come, plus 1
    const u64* peers;  // the memory of each rank
    u64 most;          // nanoseconds
    u64 first, place;  // bytes of the flags, and of a place
    int rank, ranks, capacity, moved;
};

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void set_flag(u64 at, u32 number) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
}

// Wait for a flag. After `most` nanoseconds, leave the number of the missing rank, plus 1, in `missing` and stop the kernel with an error.
__device__ __forceinline__ void wait_flag(u64 at, u32 number, int rank, const Exchange& e) {
    u64 begun = 0;
    for (u32 tries = 1;; tries++) {
        u32 found;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
        if (found == number) return;
        if (tries % 65536 == 0) {
            const u64 now = nanoseconds();
            if (!begun) begun = now;
            if (now - begun > e.most) {
                *(volatile u32*)e.missing = rank + 1;
                asm volatile("fence.sc.sys; trap;" ::: "memory");
            }
        }
    }
}

__device__ __forceinline__ void send_unit(u64 row, int unit, const float (&y)[8], int moved) {
    if (moved == F32) store8(reinterpret_cast<float*>(row) + unit * 8, y);
    else reinterpret_cast<uint4*>(row)[unit] = moved == F16 ? pack8<true>(y) : pack8<false>(y);
}

__device__ __forceinline__ void received_unit(u64 row, int unit, float (&y)[8], int moved) {
    const uint4* at = reinterpret_cast<const uint4*>(row);
    if (moved == F32) {
        const uint4 low = __ldcg(at + 2 * unit), high = __ldcg(at + 2 * unit + 1);
        y[0] = __uint_as_float(low.x), y[1] = __uint_as_float(low.y), y[2] = __uint_as_float(low.z), y[3] = __uint_as_float(low.w);
        y[4] = __uint_as_float(high.x), y[5] = __uint_as_float(high.y), y[6] = __uint_as_float(high.z), y[7] = __uint_as_float(high.w);
    } else if (moved == F16) {
        unpack8<true>(__ldcg(at + unit), y);
    } else {
        unpack8<false>(__ldcg(at + unit), y);
    }
}

// What the others see of y.
__device__ __forceinline__ void round_unit(float (&y)[8], int moved) {
    if (moved == F16) unpack8<true>(pack8<true>(y), y);
    else if (moved == BF16) unpack8<false>(pack8<false>(y), y);
}

// y, this rank's part of row t, becomes the sum over all ranks.
template <int UNITS>
__device__ __forceinline__ void meet(float (&y)[UNITS][8], long long t, u32 number, int tokens, int width, const Exchange& e) {
    const int units = width / 8, n = e.ranks, owner = t % n;
    const u64 bytes = width * (e.moved == F32 ? 4ull : 2ull), place = e.first + (number & 1) * e.place;
    const u64 each = n == 2 ? 0 : (tokens + n - 1) / n;  // rows of a rank
    auto flag = [&](int at, int sender) { return e.peers[at] + 4 * (sender * (u64)e.capacity + t); };
    // Where rank `at` has the part of `sender` of a row that it owns, and the sum of a row.
    auto part = [&](int at, int sender) { return e.peers[at] + place + (n == 2 ? (u64)t : sender * each + t / n) * bytes; };
    auto total = [&](int at) { return e.peers[at] + place + (n * each + t) * bytes; };
    auto send = [&](u64 row) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = threadIdx.x + i * NORM_THREADS;
            if (unit < units) send_unit(row, unit, y[i], e.moved);
        }
    };
#pragma unroll
    for (int i = 0; i < UNITS; i++) round_unit(y[i], e.moved);
    if (n == 2) {
        const int other = 1 - e.rank;
        send(part(other, e.rank));
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            set_flag(flag(other, e.rank), number);
            wait_flag(flag(e.rank, other), number, other, e);
        }
        __syncthreads();
        const u64 row = part(e.rank, other);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = threadIdx.x + i * NORM_THREADS;
            if (unit >= units) continue;
            float z[8];
            received_unit(row, unit, z, e.moved);
#pragma unroll
            for (int j = 0; j < 8; j++) y[i][j] += z[j];
        }
        return;
    }
    if (owner == e.rank) {
        if (threadIdx.x < n && threadIdx.x != e.rank) wait_flag(flag(e.rank, threadIdx.x), number, threadIdx.x, e);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = threadIdx.x + i * NORM_THREADS;
            if (unit >= units) continue;
            float sum[8], z[8];
            for (int p = 0; p < n; p++) {
                if (p == e.rank) {
#pragma unroll
                    for (int j = 0; j < 8; j++) sum[j] = p ? sum[j] + y[i][j] : y[i][j];
                    continue;
                }
                received_unit(part(e.rank, p), unit, z, e.moved);
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] = p ? sum[j] + z[j] : z[j];
            }
            round_unit(sum, e.moved);
#pragma unroll
            for (int j = 0; j < 8; j++) y[i][j] = sum[j];
        }
        for (int p = 0; p < n; p++)
            if (p != e.rank) send(total(p));
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            for (int p = 0; p < n; p++)
                if (p != e.rank) set_flag(flag(p, e.rank), number);
        }
        return;
    }
    send(part(owner, e.rank));
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        set_flag(flag(owner, e.rank), number);
        wait_flag(flag(e.rank, owner), number, owner, e);
    }
    __syncthreads();
    const u64 row = total(e.rank);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
        if (unit < units) received_unit(row, unit, y[i], e.moved);
    }
}

// As `add_norm` of prompt.cu, with what all ranks add. This rank adds `delta`, as there, and `extra` half[T, width], either of which can be null.
template <int UNITS, bool POST>
__device__ __forceinline__ void peer_norm(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const uint4* extra,
                                          const float* weight, float eps, uint4* x, int permuted, float* exact, int width,
                                          const float* post_weight, float post_eps, float by, const Exchange& e) {
    __shared__ float sums[NORM_THREADS / 32];
    __shared__ u32 taken, ended;
    if (threadIdx.x == 0) {
        ended = *(volatile u32*)e.state;
        taken = atomicAdd(e.state + 1, 1);
    }
    __syncthreads();
    const long long t = taken;
    const u32 number = ended + 1;
    const int units = width / 8;
    h += t * width;
    float y[UNITS][8];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
#pragma unroll
        for (int j = 0; j < 8; j++) y[i][j] = 0;
        if (unit >= units) continue;
        float d[8];
        if (extra != nullptr) unpack8<HALF>(extra[t * units + unit], y[i]);
        if (weights == nullptr) {
            if (delta == nullptr) continue;
            unpack8<HALF>(delta[t * units + unit], d);
#pragma unroll
            for (int j = 0; j < 8; j++) y[i][j] += d[j];
            continue;
        }
        for (int k = 0; k < n_slots; k++) {
            const long long row = rows[t * n_slots + k];
            if (row < 0) continue;
            unpack8<HALF>(delta[row * units + unit], d);
            const float w = weights[t * n_slots + k];
#pragma unroll
            for (int j = 0; j < 8; j++) y[i][j] += w * d[j];
        }
    }
    meet<UNITS>(y, t, number, gridDim.x, width, e);
    float post_scale = 1, sum = 0;
    if constexpr (POST) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (threadIdx.x + i * NORM_THREADS >= units) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) sum += y[i][j] * y[i][j];
        }
        post_scale = 1.0f / sqrtf(norm_sum(sum, sums) / width + post_eps);
        sum = 0;
        __syncthreads();  // the sums are read
    }
    float v[UNITS][8];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
        if (unit >= units) continue;
        load8(h + unit * 8, v[i]);
        float w[8];
        if constexpr (POST) load8(post_weight + unit * 8, w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if constexpr (POST) v[i][j] = (v[i][j] + y[i][j] * post_scale * w[j]) * by;
            else v[i][j] += y[i][j];
            sum += v[i][j] * v[i][j];
        }
        store8(h + unit * 8, v[i]);
    }
    write_normed<UNITS, false>(v, sum, sums, t, weight, nullptr, eps, x, permuted, exact, width);
    if (threadIdx.x == 0 && atomicAdd(e.state + 2, 1) + 1 == gridDim.x) e.state[0] = number, e.state[1] = 0, e.state[2] = 0;
}

#define PEER_NORM(NAME, UNITS, POST) \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    NAME##_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const uint4* extra, const float* weight, \
                   float eps, uint4* x, int permuted, float* exact, int width, const float* post_weight, float post_eps, float by, u32* state, \
                   u32* missing, const u64* peers, u64 most, u64 first, u64 place, int rank, int ranks, int capacity, int moved) { \
        const Exchange e{state, missing, peers, most, first, place, rank, ranks, capacity, moved}; \
        peer_norm<UNITS, POST>(h, delta, weights, rows, n_slots, extra, weight, eps, x, permuted, exact, width, post_weight, post_eps, by, e); \
    }
PEER_NORM(peer_norm, 1, false)
PEER_NORM(peer_norm, 2, false)
PEER_NORM(peer_norm, 4, false)
PEER_NORM(peer_norm, 8, false)
PEER_NORM(peer_post_norm, 1, true)
PEER_NORM(peer_post_norm, 2, true)
PEER_NORM(peer_post_norm, 4, true)
PEER_NORM(peer_post_norm, 8, true)
