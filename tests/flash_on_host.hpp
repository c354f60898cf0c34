// Instructions of prompt/flash.cu on the CPU: copies and products are done when they are issued. To be included after kernels_on_host.hpp.
#pragma once
#include <algorithm>

static unsigned named_arrivals[16];   // at barriers by number, of this block

UNSEEN inline uint32_t shared_address(const void* p) { return place_in_shared(p); }
inline char* in_shared(uint32_t at) { return shared + (int32_t)at; }   // or another static variable
UNSEEN inline void barrier_init(uint32_t at, uint32_t count) {
    barrier_init((unsigned long long*)in_shared(at), count);
    memset(named_arrivals, 0, sizeof named_arrivals);
}
inline void barrier_arrive(uint32_t at) { barrier_arrive((unsigned long long*)in_shared(at)); }
inline void barrier_wait(uint32_t at, uint32_t phase) { barrier_wait((unsigned long long*)in_shared(at), phase); }
UNSEEN inline bool barrier_passed(uint32_t at, uint32_t phase) { return (((HostBarrier*)in_shared(at))->phase & 1) != phase; }

template <int THREADS> UNSEEN void named_arrive(int number) {
    announce();
    named_arrivals[number]++;
}
template <int THREADS> UNSEEN void named_sync(int number) {
    announce();
    const unsigned mine = named_arrivals[number]++ / THREADS;
    wait_until([=]() UNSEEN { return named_arrivals[number] / THREADS > mine; });
}

inline void copy_sixteen(uint32_t to, const void* from) { memcpy(in_shared(to), from, 16); }
template <int LATER> void show_copies() {}
inline void show_barriers() {}
template <int COUNT> void fewer_registers() {}
template <int COUNT> void more_registers() {}
template <int COUNT> void settle(float (&)[COUNT]) {}
inline float exp2_of(float x) { return exp2f(x); }
inline float inverse_of(float x) { return 1.0f / x; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING> void wgmma_wait() { __syncwarp(); }   // of all lanes' products

template <int N> struct Both {
    static void run(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) { product_of_warpgroup<N, false, !HALF>(d, a, b, add); }
};

// Sixteen columns of the first factor in registers of four lanes; of the second one, rows of 64 elements in panels whose distance the descriptor has.
template <int N> struct Transposed {
    static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
        exchange(A{{a[0], a[1], a[2], a[3]}}, [&](const A (&w)[32], int lane) {
            for (int i = 0; i < N / 2; i++) {
                const int row = i / 2 % 2, column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
                double sum = add ? d[i] : 0.;
                for (int k = 0; k < 16; k++) {
                    unsigned at = ((b & 0x3fff) << 4) + column / 64 * ((b >> 16 & 0x3fff) << 4) + k / 8 * ((b >> 32 & 0x3fff) << 4) + k % 8 * 128 + column % 64 * 2;
                    at ^= (at >> 7 & 7) << 4;
                    unsigned short bits;
                    memcpy(&bits, shared + at, 2);
                    sum += (double)half_of<!HALF>(w[lane / 4 * 4 + k % 8 / 2].r[row + k / 8 * 2], k % 2) * (!HALF ? bf16_to_float(bits) : half_to_float(bits));
                }
                d[i] = (float)sum;
            }
            return 0;
        });
    }
};
