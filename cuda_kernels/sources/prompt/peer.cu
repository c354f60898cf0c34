// Sums of rows over the GPUs of one host, and the norm after them, in one launch: h += the sum of what all ranks add, x = norm(h).
//
// Every rank has memory that the others write to: two places in turn for rows, full of the word NOTHING. A rank stores its part of a row there, as
// MOVED says, and the receiver reads every 16 bytes until none of their words is NOTHING, and sets them back: there are no flags, and no fences to
// wait for. A word of data that is NOTHING (two halves of -0, or a float below 1e-40) is sent as 0. With two ranks everyone sends the whole part to the
// other. With more, row t belongs to rank t % ranks, which adds the parts and sends the sum back: each rank sends 2 (n - 1) / n rows per row instead
// of n - 1. Parts are added in the order of ranks, so that all ranks get the same bits.
//
// Two places are enough: a rank begins exchange e + 2 after it has ended e + 1, for which all others have sent, which they do after they have
// ended e and set its words back. Blocks take rows in the order in which they start, so that the rows that wait for others never keep the first row
// that others wait for from being sent, however many blocks run at once.
#include "prompt/norm.cuh"
#include "step/peer_memory.cuh"

constexpr int BF16 = 0, F16 = 1, F32 = 2;  // what moves
constexpr u32 NOTHING = 0x80008000u;

struct Exchange {
    u32* state;        // {exchanges that have ended, rows taken, rows done}
    u32* missing;      // the rank that did not come, plus 1
    const u64* peers;  // the memory of each rank
    u64 most;          // nanoseconds
    u64 place;         // bytes of a place
    int rank, ranks, moved;
};

// Wait for 16 bytes of a rank, and set them back.
__device__ __forceinline__ uint4 receive16(u64 at, int rank, const Exchange& e) {
    Patience patience(e.most, e.missing);
    for (;; patience.wait(rank)) {
        const uint4 x = load16(at);
        if (x.x != NOTHING && x.y != NOTHING && x.z != NOTHING && x.w != NOTHING) {
            send16(at, make_uint4(NOTHING, NOTHING, NOTHING, NOTHING));
            return x;
        }
    }
}

__device__ __forceinline__ u32 something(u32 word) { return word == NOTHING ? 0 : word; }

// A unit of 8 elements as it moves: 16 bytes, or 32 of F32.
struct Moved {
    uint4 low, high;
};

__device__ __forceinline__ Moved packed_unit(const float (&y)[8], int moved) {
    Moved m;
    if (moved == F32) {
        m.low = make_uint4(__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]), __float_as_uint(y[3]));
        m.high = make_uint4(__float_as_uint(y[4]), __float_as_uint(y[5]), __float_as_uint(y[6]), __float_as_uint(y[7]));
        m.high.x = something(m.high.x), m.high.y = something(m.high.y), m.high.z = something(m.high.z), m.high.w = something(m.high.w);
    } else {
        m.low = moved == F16 ? pack8<true>(y) : pack8<false>(y);
    }
    m.low.x = something(m.low.x), m.low.y = something(m.low.y), m.low.z = something(m.low.z), m.low.w = something(m.low.w);
    return m;
}

__device__ __forceinline__ void unpacked_unit(const Moved& m, float (&y)[8], int moved) {
    if (moved == F32) {
        y[0] = __uint_as_float(m.low.x), y[1] = __uint_as_float(m.low.y), y[2] = __uint_as_float(m.low.z), y[3] = __uint_as_float(m.low.w);
        y[4] = __uint_as_float(m.high.x), y[5] = __uint_as_float(m.high.y), y[6] = __uint_as_float(m.high.z), y[7] = __uint_as_float(m.high.w);
    } else if (moved == F16) {
        unpack8<true>(m.low, y);
    } else {
        unpack8<false>(m.low, y);
    }
}

// What moves of y, which becomes what the others see.
__device__ __forceinline__ Moved rounded_unit(float (&y)[8], int moved) {
    const Moved m = packed_unit(y, moved);
    unpacked_unit(m, y, moved);
    return m;
}

// The halves of 32 bytes are a warp's 512 bytes apart, so that a warp sends whole lines.
__device__ __forceinline__ u64 unit_at(u64 row, int unit, int moved) {
    return row + (moved == F32 ? unit / 32 * 1024 + unit % 32 * 16 : unit * 16);
}

__device__ __forceinline__ void send_unit(u64 row, int unit, const Moved& m, int moved) {
    const u64 at = unit_at(row, unit, moved);
    send16(at, m.low);
    if (moved == F32) send16(at + 512, m.high);
}

__device__ __forceinline__ void received_unit(u64 row, int unit, float (&y)[8], int sender, const Exchange& e) {
    const u64 at = unit_at(row, unit, e.moved);
    Moved m;
    m.low = receive16(at, sender, e);
    if (e.moved == F32) m.high = receive16(at + 512, sender, e);
    unpacked_unit(m, y, e.moved);
}

// y, this rank's part of row t, becomes the sum over all ranks.
template <int UNITS>
__device__ __forceinline__ void meet(float (&y)[UNITS][8], long long t, u32 number, int tokens, int width, const Exchange& e) {
    const int units = width / 8, n = e.ranks, owner = t % n;
    const u64 bytes = e.moved == F32 ? (units + 31) / 32 * 1024ull : units * 16ull, place = (number & 1) * e.place;
    const u64 each = n == 2 ? 0 : (tokens + n - 1) / n;  // rows of a rank
    // Where rank `at` has the part of `sender` of a row that it owns, and the sum of a row.
    auto part = [&](int at, int sender) { return e.peers[at] + place + (n == 2 ? (u64)t : sender * each + t / n) * bytes; };
    auto total = [&](int at) { return e.peers[at] + place + (n * each + t) * bytes; };
    const int to = n == 2 ? 1 - e.rank : owner;
    if (to != e.rank) {
        const u64 row = part(to, e.rank);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = threadIdx.x + i * NORM_THREADS;
            if (unit < units) send_unit(row, unit, rounded_unit(y[i], e.moved), e.moved);
        }
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = threadIdx.x + i * NORM_THREADS;
        if (unit >= units) continue;
        if (n > 2 && to != e.rank) {
            received_unit(total(e.rank), unit, y[i], to, e);
            continue;
        }
        if (n > 2) rounded_unit(y[i], e.moved);
        float sum[8], z[8];
        for (int p = 0; p < n; p++) {
            if (p != e.rank) received_unit(part(e.rank, p), unit, z, p, e);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float added = p == e.rank ? y[i][j] : z[j];
                sum[j] = p ? sum[j] + added : added;
            }
        }
        if (n > 2) {
            const Moved m = rounded_unit(sum, e.moved);
            for (int p = 0; p < n; p++)
                if (p != e.rank) send_unit(total(p), unit, m, e.moved);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) y[i][j] = sum[j];
    }
}

// As `add_norm` of prompt.cu, with what all ranks add. This rank adds `delta` and `extra`, as there, either of which can be null.
template <int UNITS, bool POST>
__device__ __forceinline__ void peer_norm(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const uint4* extra,
                                          const float* shares, const float* weight, float eps, uint4* x, int permuted, uint4* plain,
                                          float* exact, int width,
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
        if (extra != nullptr) extra_unit(extra, shares, t, unit, units, y[i]);
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
    write_normed<UNITS, false>(v, sum, sums, t, weight, nullptr, eps, x, permuted, plain, exact, width);
    if (threadIdx.x == 0 && atomicAdd(e.state + 2, 1) + 1 == gridDim.x) e.state[0] = number, e.state[1] = 0, e.state[2] = 0;
}

#define PEER_NORM(NAME, UNITS, POST) \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
    NAME##_##UNITS(float* h, const uint4* delta, const float* weights, const int* rows, int n_slots, const uint4* extra, const float* shares, \
                   const float* weight, float eps, uint4* x, int permuted, uint4* plain, float* exact, int width, const float* post_weight, \
                   float post_eps, float by, u32* state, u32* missing, const u64* peers, u64 most, u64 place, int rank, int ranks, int moved) { \
        const Exchange e{state, missing, peers, most, place, rank, ranks, moved}; \
        peer_norm<UNITS, POST>(h, delta, weights, rows, n_slots, extra, shares, weight, eps, x, permuted, plain, exact, width, post_weight, \
                               post_eps, by, e); \
    }
PEER_NORM(peer_norm, 1, false)
PEER_NORM(peer_norm, 2, false)
PEER_NORM(peer_norm, 4, false)
PEER_NORM(peer_norm, 8, false)
PEER_NORM(peer_post_norm, 1, true)
PEER_NORM(peer_post_norm, 2, true)
PEER_NORM(peer_post_norm, 4, true)
PEER_NORM(peer_post_norm, 8, true)
