// The threads of a CUDA block on the CPU, for g++: each is a fiber that runs to its next barrier.
//
// A barrier waits for all threads of the warp or block; one that some of them have left out is an
// error. Every other block runs its warps and lanes from the last to the first, so that a missing
// barrier gives wrong results in either direction.
//
// With -fsanitize=thread every fiber is a thread to the sanitizer, and barriers alone order accesses
// to memory. As fibers take turns in a fixed order, a report does not depend on luck.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#define UNSEEN __attribute__((no_sanitize("thread")))
#else
#define UNSEEN
#endif

constexpr int MOST_FIBERS = 1024;
constexpr size_t FIBER_STACK = 256 << 10;
enum Waits { RUNS, FOR_WARP, FOR_BLOCK, HAS_ENDED, FOR_OTHERS };

struct Fiber {
  void* stack;
  int waits;
  unsigned exchanges, warp_barriers, block_barriers;   // so far
#ifdef __x86_64__
  void* at;   // its stack pointer while it does not run
#else
  ucontext_t at;
#endif
#ifdef __SANITIZE_THREAD__
  void* known_as;
#endif
};
static Fiber fibers[MOST_FIBERS];
static int current;   // the thread that runs
static void (*fiber_body)(const void*);
static const void* fiber_argument;

#ifdef __x86_64__
// Save the registers that a call keeps and the stack pointer to *from, and go on at `to`.
extern "C" __attribute__((visibility("hidden"))) void switch_stacks(void** from, void* to);
asm(R"(
.text
.p2align 4
.hidden switch_stacks
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size switch_stacks, . - switch_stacks
)");
static void* scheduler_at;
#else
static ucontext_t scheduler_at;
#endif

#ifdef __SANITIZE_THREAD__
static void* scheduler_known_as;
static char block_start, block_end, warp_order[MOST_FIBERS / 32][2], block_order[2];
UNSEEN static void enter(void* known_as) { __tsan_switch_to_fiber(known_as, __tsan_switch_to_fiber_no_sync); }
#endif

UNSEEN static void to_scheduler() {
  Fiber& f = fibers[current];
#ifdef __SANITIZE_THREAD__
  enter(scheduler_known_as);
#endif
#ifdef __x86_64__
  switch_stacks(&f.at, scheduler_at);
#else
  swapcontext(&f.at, &scheduler_at);
#endif
}

UNSEEN static void to_fiber(Fiber& f) {
#ifdef __SANITIZE_THREAD__
  enter(f.known_as);
#endif
#ifdef __x86_64__
  switch_stacks(&scheduler_at, f.at);
#else
  swapcontext(&scheduler_at, &f.at);
#endif
}

UNSEEN static void run_fiber() {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&block_start);
#endif
  fiber_body(fiber_argument);
#ifdef __SANITIZE_THREAD__
  __tsan_release(&block_end);
#endif
  fibers[current].waits = HAS_ENDED;
  to_scheduler();
  abort();   // nothing goes on after the end
}

UNSEEN static void prepare(Fiber& f) {
  if (!f.stack) {
    f.stack = mmap(nullptr, FIBER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f.stack == MAP_FAILED) abort();
  }
  f.waits = RUNS;
  f.exchanges = f.warp_barriers = f.block_barriers = 0;
#ifdef __SANITIZE_THREAD__
  if (!f.known_as) f.known_as = __tsan_create_fiber(0);   // for all blocks of a launch: to make one takes long
#endif
#ifdef __x86_64__
  void** top = (void**)((char*)f.stack + FIBER_STACK) - 1;   // a call leaves it 8 bytes off a multiple of 16
  *--top = (void*)run_fiber;
  for (int i = 0; i < 6; i++) *--top = nullptr;   // registers
  f.at = top;
#else
  getcontext(&f.at);
  f.at.uc_stack.ss_sp = f.stack;
  f.at.uc_stack.ss_size = FIBER_STACK;
  makecontext(&f.at, run_fiber, 0);
#endif
}

// Wait until all threads of the warp do so. orders: whether later accesses to
// memory come after what other lanes did before; those of registers do not order them.
UNSEEN static void wait_for_warp(bool orders) {
  Fiber& f = fibers[current];
#ifdef __SANITIZE_THREAD__
  // Two places in turn: a lane that is at the next barrier already is not waited for.
  char* order = &warp_order[current / 32][f.warp_barriers++ % 2];
  if (orders) __tsan_release(order);
#endif
  f.waits = FOR_WARP;
  to_scheduler();
#ifdef __SANITIZE_THREAD__
  if (orders) __tsan_acquire(order);
#endif
}

UNSEEN static void wait_for_block() {
  Fiber& f = fibers[current];
#ifdef __SANITIZE_THREAD__
  char* order = &block_order[f.block_barriers++ % 2];
  __tsan_release(order);
#endif
  f.waits = FOR_BLOCK;
  to_scheduler();
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(order);
#endif
}

// Let others run until done() is true. To the sanitizer, all that waited or arrived before comes first.
#ifdef __SANITIZE_THREAD__
static char poll_order;
#endif
UNSEEN inline void announce() {
#ifdef __SANITIZE_THREAD__
  __tsan_release(&poll_order);
#endif
}
template <class F>
UNSEEN void wait_until(F done) {
  while (!done()) {
    fibers[current].waits = FOR_OTHERS;
    to_scheduler();
  }
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&poll_order);
#endif
}

// Run the fibers of a block. False if some wait at a barrier that others will not come to.
UNSEEN static bool run_fibers(int threads, bool backwards, void (*started)(int)) {
  const int warps = threads / 32;
  int idle = 0;   // rounds in which nobody did anything but look at what it waits for
  for (;;) {
    int at_block = 0, ended = 0, polls = 0;
    bool moved = false;
    for (int w = 0; w < warps; w++) {
      const int warp = backwards ? warps - 1 - w : w;
      int counts[5];
      bool again;
      do {   // until its threads wait for the block or for other warps, or have ended
        again = false;
        bool together = true;   // all that have not ended wait for the warp
        for (int i = 0; i < 32; i++) together &= fibers[32 * warp + i].waits == FOR_WARP;
        memset(counts, 0, sizeof counts);
        for (int i = 0; i < 32; i++)
          if (Fiber& f = fibers[32 * warp + i]; f.waits == FOR_WARP && together) f.waits = RUNS;
        for (int i = 0; i < 32; i++) {
          current = 32 * warp + (backwards ? 31 - i : i);
          Fiber& f = fibers[current];
          if (f.waits == RUNS || f.waits == FOR_OTHERS) {
            const bool polled = f.waits == FOR_OTHERS;
            f.waits = RUNS;
            started(current);
            to_fiber(f);
            if (!polled || f.waits != FOR_OTHERS) again = moved = true;
          }
          counts[f.waits]++;
        }
        if (!counts[FOR_OTHERS] && counts[FOR_WARP] != 32 && counts[FOR_BLOCK] != 32 && counts[HAS_ENDED] != 32) return false;
      } while (counts[FOR_WARP] == 32 || (counts[FOR_OTHERS] && again));
      at_block += counts[FOR_BLOCK];
      ended += counts[HAS_ENDED];
      polls += counts[FOR_OTHERS];
    }
    if (ended == threads) return true;
    if (polls) {
      if (!moved && ++idle > 2) return false;
      if (moved) idle = 0;
      continue;
    }
    if (at_block != threads) return false;
    for (int t = 0; t < threads; t++) fibers[t].waits = RUNS;
  }
}

// body() by `threads` threads of a block; started(t) before thread t goes on.
template <class F>
UNSEEN bool run_threads(int threads, bool backwards, const F& body, void (*started)(int)) {
  if (threads > MOST_FIBERS || threads % 32) abort();
  fiber_body = [](const void* body) { (*(const F*)body)(); };
  fiber_argument = &body;
#ifdef __SANITIZE_THREAD__
  scheduler_known_as = __tsan_get_current_fiber();
  __tsan_release(&block_start);
#endif
  for (int t = 0; t < threads; t++) prepare(fibers[t]);
  const bool good = run_fibers(threads, backwards, started);
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&block_end);
#endif
  return good;
}

// Declared before the blocks of a launch: at its end the sanitizer forgets their threads, of which it knows 8,128 at most.
struct Launch {
  UNSEEN ~Launch() {
#ifdef __SANITIZE_THREAD__
    for (Fiber& f : fibers) {
      if (f.known_as) __tsan_destroy_fiber(f.known_as);
      f.known_as = nullptr;
    }
#endif
  }
};

// use(what all lanes of the warp gave, the number of this lane). Lanes give to two places in turn,
// so that a lane that is ahead changes nothing that others still read.
template <class T, class F>
UNSEEN auto exchange(const T& mine, F use) {
  static T given[2][MOST_FIBERS / 32][32];
  auto& warp = given[fibers[current].exchanges++ % 2][current / 32];
#ifdef __SANITIZE_THREAD__
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  warp[current % 32] = mine;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  wait_for_warp(false);
  T seen[32];
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  for (int lane = 0; lane < 32; lane++) seen[lane] = warp[lane];
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  return use(seen, current % 32);
#else
  warp[current % 32] = mine;
  wait_for_warp(false);
  return use(warp, current % 32);
#endif
}
