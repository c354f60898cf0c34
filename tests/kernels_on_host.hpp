// CUDA blocks on the CPU, one after the other. For kernels of the decode step, which leave out their
// own hardware instructions if ON_HOST is defined. Shared memory is filled with NaN at first.
#pragma once
#include <math.h>
#include <string.h>

#include <vector>

#include "fibers_on_host.hpp"

#define ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#undef INFINITY
#define INFINITY __builtin_inff()

struct Index { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static Index threadIdx, blockIdx, gridDim;
alignas(1024) static char shared[232 * 1024];

inline void __syncthreads() { wait_for_block(); }
inline void __syncwarp() { wait_for_warp(true); }
inline void __threadfence() {}

template <class T> T __shfl_xor_sync(unsigned, T x, int d) { return exchange(x, [=](const T (&w)[32], int lane) { return w[lane ^ d]; }); }
template <class T> T __shfl_sync(unsigned, T x, int from) { return exchange(x, [=](const T (&w)[32], int) { return w[from & 31]; }); }
template <class T> T __shfl_down_sync(unsigned, T x, int d) {
    return exchange(x, [=](const T (&w)[32], int lane) { return w[lane + d < 32 ? lane + d : lane]; });
}
template <class T> T __shfl_up_sync(unsigned, T x, int d) {
    return exchange(x, [=](const T (&w)[32], int lane) { return w[lane >= d ? lane - d : lane]; });
}
inline unsigned __ballot_sync(unsigned, int x) {
    return exchange(x, [](const int (&w)[32], int) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++) bits |= (unsigned)(w[i] != 0) << i;
        return bits;
    });
}

inline bool __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __uint_as_float(unsigned b) { float f; memcpy(&f, &b, 4); return f; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline int __float_as_int(float f) { int b; memcpy(&b, &f, 4); return b; }
inline float __int_as_float(int b) { return __uint_as_float((unsigned)b); }
inline unsigned __float_as_uint(float f) { unsigned b; memcpy(&b, &f, 4); return b; }
inline float half_to_float(unsigned short b) { _Float16 h; memcpy(&h, &b, 2); return (float)h; }
inline unsigned short float_to_half(float x) { _Float16 h = (_Float16)x; unsigned short b; memcpy(&b, &h, 2); return b; }
inline float bf16_to_float(unsigned short b) { return __uint_as_float((unsigned)b << 16); }
inline unsigned short float_to_bf16(float x) {
    const unsigned b = __float_as_uint(x);
    return (unsigned short)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
template <bool F16> unsigned pack2(float low, float high) {
    return F16 ? float_to_half(low) | (unsigned)float_to_half(high) << 16 : float_to_bf16(low) | (unsigned)float_to_bf16(high) << 16;
}
template <bool F16> float2 unpack2(unsigned packed) {
    const unsigned short low = packed, high = packed >> 16;
    return F16 ? make_float2(half_to_float(low), half_to_float(high)) : make_float2(bf16_to_float(low), bf16_to_float(high));
}
inline float warp_sum(float x) { for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d); return x; }
inline float warp_max(float x) { for (int d = 16; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d)); return x; }
inline void wait_for_inputs() {}
inline void start_dependents() {}

template <class T> T __ldcg(const T* p) { return *p; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }

template <bool> inline void copy16(char* to, const void* from) { memcpy(to, from, 16); }
template <int BYTES> inline void copy_few(char* to, const void* from) { memcpy(to, from, BYTES); }
inline char* lane_address(char* to) { return to; }
template <int BYTES> inline void copy_or_clear(char* to, const void* from, bool there) {
    if (there) memcpy(to, from, BYTES);
    else memset(to, 0, BYTES);
}
inline void end_of_copies() {}
template <int N> void wait_for_copies() {}

// Fragments of mma.m16n8k16 as the PTX manual lays them out: registers of two halves, lanes in fours.
struct A { unsigned r[4]; };
struct B { unsigned r[2]; };
inline void load_a(unsigned (&a)[4], const char* at, int stride, int lane) {
    exchange(at + lane % 16 * stride + lane / 16 * 16, [&](const char* const (&rows)[32], int lane) {
        for (int m = 0; m < 4; m++) memcpy(&a[m], rows[8 * m + lane / 4] + lane % 4 * 4, 4);
        return 0;
    });
}
inline void load_b_turned(unsigned (&b)[2], const char* at, int stride, int lane) {
    exchange(at + lane % 16 * stride, [&](const char* const (&rows)[32], int lane) {
        for (int m = 0; m < 2; m++)
            for (int half = 0; half < 2; half++) memcpy((char*)&b[m] + 2 * half, rows[8 * m + 2 * (lane % 4) + half] + 2 * (lane / 4), 2);
        return 0;
    });
}
inline void load_a_turned(unsigned (&a)[4], const char* at, int stride, int lane) {
    exchange(at + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 16, [&](const char* const (&rows)[32], int lane) {
        for (int m = 0; m < 4; m++)
            for (int half = 0; half < 2; half++) memcpy((char*)&a[m] + 2 * half, rows[8 * m + 2 * (lane % 4) + half] + 2 * (lane / 4), 2);
        return 0;
    });
}
// To TF32: to nearest, ties away from zero.
inline float rounded(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu); }
// Products of mma.m16n8k8: floats that are rounded to TF32.
inline void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    struct Both { float a[4], b[2]; };
    exchange(Both{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, [&](const Both (&w)[32], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 8; k++) d[i] += w[4 * row + k % 4].a[i / 2 + k / 4 * 2] * w[4 * column + k % 4].b[k / 4];
        }
        return 0;
    });
}
// Products of mma.m16n8k32: registers of four bytes.
inline void mma_bytes(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const int (&c)[4]) {
    struct Both { A a; B b; };
    exchange(Both{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, [&](const Both (&w)[32], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            d[i] = c[i];
            for (int k = 0; k < 32; k++)
                d[i] += (signed char)(w[row % 8 * 4 + k % 16 / 4].a.r[(row >= 8) + 2 * (k >= 16)] >> 8 * (k % 4)) *
                        (signed char)(w[column * 4 + k % 16 / 4].b.r[k >= 16] >> 8 * (k % 4));
        }
        return 0;
    });
}
inline unsigned turned(unsigned x) {
    return exchange(x, [](const unsigned (&w)[32], int lane) {
        const int row = lane / 4, first = 2 * (lane % 4);  // of the result; column `row` of rows first, first + 1
        return (w[4 * first + row / 2] >> 16 * (row % 2) & 0xffff) | (w[4 * first + 4 + row / 2] >> 16 * (row % 2)) << 16;
    });
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = x | (unsigned long long)y << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
template <class F> unsigned each_half(F f) { return float_to_half(f(0)) | (unsigned)float_to_half(f(16)) << 16; }
inline unsigned minus_halves(unsigned a, unsigned b) { return each_half([=](int at) { return half_to_float(a >> at) - half_to_float(b >> at); }); }
inline unsigned times_halves(unsigned a, unsigned b) { return each_half([=](int at) { return half_to_float(a >> at) * half_to_float(b >> at); }); }
inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
    return each_half([=](int at) { return half_to_float(a >> at) * half_to_float(b >> at) + half_to_float(c >> at); });
}
template <bool BFLOAT>
float half_of(unsigned word, int which) {
    const unsigned short bits = word >> 16 * which;
    return BFLOAT ? bf16_to_float(bits) : half_to_float(bits);
}
template <bool BFLOAT>
void product(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct Both { A a; B b; };
    exchange(Both{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, [&](const Both (&w)[32], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            double sum = c[i];
            for (int k = 0; k < 16; k++)
                sum += (double)half_of<BFLOAT>(w[row % 8 * 4 + k % 8 / 2].a.r[(row >= 8) + 2 * (k >= 8)], k % 2) *
                       half_of<BFLOAT>(w[column * 4 + k % 8 / 2].b.r[k >= 8], k % 2);
            c[i] = (float)sum;
        }
        return 0;
    });
}
// In float16.
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { product<false>(d, a, b); }

// Products of a warpgroup: operands in shared memory, where a descriptor says, rows of 128 bytes whose sixteens are permuted.
inline unsigned place_in_shared(const void* p) { return (unsigned)((const char*)p - shared); }
struct HostBarrier { unsigned short expected, left; unsigned phase; };
UNSEEN inline void barrier_init(unsigned long long* b, unsigned count) { const HostBarrier all = {(unsigned short)count, (unsigned short)count, 0}; memcpy(b, &all, 8); }
UNSEEN inline void barrier_arrive(unsigned long long* b) {
    announce();
    HostBarrier* at = (HostBarrier*)b;
    if (!--at->left) at->left = at->expected, at->phase++;
}
UNSEEN inline void barrier_wait(unsigned long long* b, unsigned phase) {
    wait_until([=]() UNSEEN { return (((HostBarrier*)b)->phase & 1) != phase; });
}
template <int COUNT> UNSEEN void barrier_of(int number) {
    static unsigned arrived[16];
    announce();
    const unsigned mine = arrived[number]++ / COUNT;
    wait_until([=]() UNSEEN { return arrived[number] / COUNT > mine; });
}
inline void computing_barrier() { barrier_of<128>(1); }
inline void show_to_products() {}
inline void begin_products() {}
inline void end_products() {}
inline void store_turned(char* at, const unsigned (&r)[4]) {
    struct Given { char* at; unsigned r[4]; };
    exchange(Given{at, {r[0], r[1], r[2], r[3]}}, [&](const Given (&w)[32], int lane) {
        // This lane's row of its matrix is a column of what lanes gave.
        for (int i = 0; i < 8; i++) {
            const int column = lane % 8;
            const unsigned short half = w[4 * i + column / 2].r[lane / 8] >> 16 * (column % 2);
            memcpy(at + 2 * i, &half, 2);
        }
        return 0;
    });
}
template <int N, bool TURNED, bool BFLOAT>
void product_of_warpgroup(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool add) {
    const auto half_at = [](unsigned long long operand, int row, int column) {
        unsigned at = (operand & 0x3fff) << 4;
        at += row / 8 * ((operand >> 32 & 0x3fff) << 4) + row % 8 * 128 + column * 2;
        at ^= (at >> 7 & 7) << 4;
        unsigned short bits;
        memcpy(&bits, shared + at, 2);
        return (double)(BFLOAT ? bf16_to_float(bits) : half_to_float(bits));
    };
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; i++) {
        const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
        double sum = add ? d[i] : 0.;
        for (int k = 0; k < 16; k++)
            sum += half_at(a, TURNED ? k : row, TURNED ? row : k) * half_at(b, column, k);
        d[i] = (float)sum;
    }
}

UNSEEN static void set_index(int thread) { threadIdx = {(unsigned)thread, 0, 0}; }

// kernel() as every thread of every block (., ., z).
template <class F>
void launch_on_host(unsigned x, unsigned y, int threads, F kernel, unsigned z = 0) {
    memset(shared, 0xff, sizeof shared);
    gridDim = {x, y, 1};
    const Launch launch;
    for (unsigned block = 0; block < x * y; block++) {
        blockIdx = {block % x, block / x, z};
        const bool backwards = (blockIdx.x + blockIdx.y) % 2;
        if (!run_threads(threads, backwards, kernel, set_index)) {
            fprintf(stderr, "block %u: threads wait at different barriers\n", block);
            abort();
        }
    }
}
