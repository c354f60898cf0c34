// Reads and writes of 16 bytes of memory that the GPUs of a host share, and the end of waiting for them.
#pragma once

typedef unsigned long long u64;

#ifndef ON_HOST  // tests that run ranks on the CPU have their own of these

constexpr u32 TRIES = 65536;  // between looks at the clock

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void send16(u64 at, uint4 x) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint4 load16(u64 at) {
    uint4 x;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void let_others_run() {}  // ranks are on different processors

__device__ __forceinline__ void stop_with_error() { asm volatile("fence.sc.sys; trap;" ::: "memory"); }

#endif

// Ends a kernel that has waited too long for another rank.
struct Patience {
    u64 most;      // nanoseconds
    u32* missing;  // the rank that did not come, plus 1
    u64 begun = 0;
    u32 tries = 0;

    __device__ __forceinline__ Patience(u64 most, u32* missing) : most(most), missing(missing) {}

    // Rank `late` has not come yet. After `most`, say so and stop the kernel with an error.
    __device__ __forceinline__ void wait(int late) {
        let_others_run();
        if (++tries % TRIES) return;
        const u64 now = nanoseconds();
        if (!begun) begun = now;
        if (now - begun > most) {
            *(volatile u32*)missing = late + 1;
            stop_with_error();
        }
    }
};
