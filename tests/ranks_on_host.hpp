// Ranks as threads of the CPU, for sources of kernels in which GPUs meet: each plays the threads of its GPU's blocks one after the other.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

static thread_local Index playing, playing_block;
#define threadIdx playing
#define blockIdx playing_block
#define warp_sum sum_of_warp  // headers have one, too
#define __syncthreads() ((void)0)

inline unsigned long long nanoseconds() {
    using namespace std::chrono;
    return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}
inline void send16(unsigned long long at, uint4 x) {
    volatile unsigned* to = (volatile unsigned*)at;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
// A GPU reads 16 bytes at once. Here words are read from the last to the first, as they are written from the first to the last: with the last
// word of a sender come those before it.
inline uint4 load16(unsigned long long at) {
    const volatile unsigned* from = (const volatile unsigned*)at;
    const unsigned w = from[3], z = from[2], y = from[1], x = from[0];
    return {x, y, z, w};
}
constexpr unsigned TRIES = 64;
inline void let_others_run() { std::this_thread::yield(); }
struct Stop {};
inline void stop_with_error() { throw Stop(); }

// Call work(rank) for all ranks but one that is `absent`, each on its thread. Returns how many stopped with an error.
template <class Work> int on_ranks(int ranks, int absent, Work work) {
    std::atomic<int> stopped{0};
    std::vector<std::thread> all;
    for (int rank = 0; rank < ranks; rank++)
        if (rank != absent)
            all.emplace_back([&, rank] {
                try {
                    work(rank);
                } catch (Stop) {
                    stopped++;
                }
            });
    for (auto& one : all) one.join();
    return stopped;
}
