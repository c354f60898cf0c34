"""Kernels of decode steps, compiled by g++ and called on the CPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from iqforge.cuda_kernels.compile.spec import KernelSpec, expand

from .host_library import host_library

HEADER = Path(__file__).parent / "kernels_on_host.hpp"


LIMIT = 224 * 1024


MMA = """
inline void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    product<TYPE_K == BF16>(c, a, b);
}
template <bool TURNED>
inline void warpgroup_product(float (&d)[16], u64 a, u64 b, bool add) {
    product_of_warpgroup<32, TURNED, TYPE_K == BF16>(d, a, b, add);
}
"""


# Returns the words of parts that are there afterwards.
RUN_ATTENTION = """
extern "C" int run(int splits, const float* q, const float* k, const float* v,
                    const float* q_norm, const float* k_norm, float eps, const float* angles,
                    u8* cache_k, u8* cache_v, const int* position, float scale,
                    const float* q_bias, const float* k_bias, const float* v_bias,
                    const float* sinks, float* out
#if GATE >= 2
                    , const float* gates
#endif
                    ) {
    std::vector<float> partial((size_t)HEADS_KV * splits * PART);
    memset(partial.data(), 0xff, 4 * partial.size());  // NOT_THERE
    std::vector<u32> tickets(HEADS_KV);
    launch_on_host(splits, HEADS_KV, THREADS, [&] {
        attention(q, k, v, q_norm, k_norm, eps, angles, cache_k, cache_v, position, scale,
                  q_bias, k_bias, v_bias, sinks, partial.data(), tickets.data(), out
#if GATE >= 2
                  , gates
#endif
                  );
    });
    int there = 0;
    for (float x : partial) there += WAITS && __float_as_uint(x) != NOT_THERE;
    return there;
}
"""


RUN_ROUTER = """
extern "C" void run(const float* h, const float* norm, float eps, const float* matrix,
                    const float* logit_bias, const float* choice_bias, const float* shared_gate,
                    int* ids, float* weights) {
    std::vector<u32> parts(2 * ROWS * LOGITS, NOT_THERE);
    launch_on_host(LOGITS, 1, THREADS, [&] {
        router(h, norm, eps, matrix, logit_bias, choice_bias, shared_gate, (float*)parts.data(),
               ids, weights);
    });
    for (u32 part : parts)  // a later launch would take what this one has left
        if (part != NOT_THERE) abort();
}
"""


RUN_SAMPLE = """
extern "C" void greedy(const float* logits, int n, int blocks, long long* tokens, int* positions,
                       int* history) {
    std::vector<u64> partial(blocks);
    u32 ticket = 0;
    launch_on_host(blocks, 1, THREADS, [&] {
        sample_greedy(logits, n, partial.data(), &ticket, tokens, positions, history);
    });
}
extern "C" void draw(const float* values, const long long* ids, int n, int count,
                     double temperature, double top_p, double min_p, const u64* seed,
                     long long* tokens, int* positions, int* history) {
    launch_on_host(1, 1, DRAW, [&] {
        sample_draw(values, ids, n, count, temperature, top_p, min_p, seed, tokens, positions,
                    history);
    });
}
extern "C" void best(const float* logits, int n, int count, double temperature, double top_p,
                     double min_p, const u64* seed, long long* tokens, int* positions,
                     int* history) {
    const int blocks = (n + 2 * BEST - 1) / (2 * BEST);
    std::vector<u64> partial(LIST * blocks);
    u32 ticket = 0;
    launch_on_host(blocks, 1, BEST, [&] {
        sample_best(logits, n, partial.data(), &ticket, count, temperature, top_p, min_p, seed,
                    tokens, positions, history);
    });
}
"""


def library(folder: Path, spec: KernelSpec, run: str, before: str = "") -> ctypes.CDLL:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: the kernels are not tried on the CPU")
    defines = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    # mma needs the cache's types, which the sources name first
    source = expand(spec.sources).replace("struct Mixer {", MMA + "struct Mixer {")
    return host_library(folder / "kernel", f'#include "{HEADER}"\n{defines}{before}{source}{run}')


def pointer(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


RUN_DELTA = """
extern "C" void run(const float* h, const float* norm, float eps, const float* rates,
                    const float* dt, const float* a, const float* products, const float* z,
                    const float* taps, const float* out_norm, float out_eps, float* inputs,
                    float* memory, float* other_inputs, float* other_memory, const int* position,
                    const int* begun, float* out) {
    std::vector<u32> tickets(KEY_HEADS);
    launch_on_host(VALUE_HEADS, 1, THREADS, [&] {
        delta(h, norm, eps, rates, dt, a, products, z, taps, out_norm, out_eps, inputs, memory,
              other_inputs, other_memory, position, begun, tickets.data(), out);
    });
}
"""


RUN_STATE_SPACE = """
extern "C" void run(const float* products, const float* taps, const float* bias, const float* dt,
                    const float* a, const float* d, float* inputs, float* memory,
                    float* other_inputs, float* other_memory, const int* position,
                    const int* begun, const float* norm, float eps, float* out) {
    std::vector<u32> tickets(GROUPS);
    launch_on_host(HEADS, 1, THREADS, [&] {
        scan(products, taps, bias, dt, a, d, inputs, memory, other_inputs, other_memory, position,
             begun, tickets.data(), out);
    });
    if (norm == nullptr) return;
    launch_on_host(GROUPS, ROWS, 32 * NORM_WARPS, [&] { norm_groups(out, norm, eps); });
}
"""


RUN_KIMI_DELTA = """
extern "C" void run(const float* q, const float* k, const float* v, const float* decays,
                    const float* gates, const float* betas, const float* taps, const float* dt,
                    const float* a, const float* norm, float eps, float* inputs, float* memory,
                    float* other_inputs, float* other_memory, const int* position,
                    const int* begun, float* out) {
    launch_on_host(HEADS, 1, THREADS, [&] {
        kimi_delta(q, k, v, decays, gates, betas, taps, dt, a, norm, eps, inputs, memory,
                   other_inputs, other_memory, position, begun, out);
    });
}
"""


_RUN_CHUNKS = """
extern "C" void run_heads(const u16* products, int pitch, int tokens, int padded,
                          const float* past, const float* taps, u16* q, u16* k, float* v,
                          int sequences) {
    launch_on_host(padded / (HEAD_WARPS * HEAD_TOKENS),
                   sequences * (2 * KEY_HEADS + VALUE_HEADS), 32 * HEAD_WARPS, [&] {
        heads(products, pitch, tokens, padded, past, taps, q, k, v);
    });
}
extern "C" void run_chunks(float* values, const u16* keys, const u16* k, const float* since,
                           const float* until, int n_chunks, const float* before, float* after,
                           float* states, int n_heads) {
    launch_on_host((VALUE + SLICE - 1) / SLICE, n_heads, THREADS, [&] {
        chunks(values, keys, k, since, until, n_chunks, before, after, states);
    });
}
extern "C" void run_results(const u16* q, const float* states, const u16* qk,
                            const float* errors, const float* since, const u16* z, int pitch,
                            const float* weight, float eps, int tokens, u16* out, int n_chunks,
                            int n_heads) {
    launch_on_host(n_chunks, n_heads, THREADS, [&] {
        results(q, states, qk, errors, since, z, pitch, weight, eps, tokens, out);
    });
}
extern "C" void shared_floats(int* of) {
    of[0] = SOLVE_FLOATS, of[1] = CHUNK_FLOATS, of[2] = PART_FLOATS;
}
"""

RUN_PROMPT_DELTA = (
    _RUN_CHUNKS
    + """
extern "C" void run_solve(const float* rates, const float* dt, const float* a, int tokens,
                          const u16* q, const u16* k, const float* v, float* values,
                          u16* keys, u16* qk, float* since, float* until, int n_chunks,
                          int n_heads) {
    launch_on_host(n_chunks, n_heads, THREADS, [&] {
        solve(rates, dt, a, tokens, q, k, v, values, keys, qk, since, until);
    });
}
"""
)
RUN_PROMPT_KIMI_DELTA = (
    _RUN_CHUNKS
    + """
extern "C" void run_solve(const u16* decay, int pitch, const float* rates, const float* dt,
                          const float* a, int tokens, u16* q, u16* k, const float* v,
                          float* values, u16* keys, u16* qk, float* whole, int n_chunks,
                          int n_heads) {
    launch_on_host(n_chunks, n_heads, THREADS, [&] {
        solve(decay, pitch, rates, dt, a, tokens, q, k, v, values, keys, qk, whole);
    });
}
"""
)


RUN_PROMPT_STATE_SPACE = """
extern "C" void run_convolved(const u16* products, int tokens, int padded, const float* past,
                              const float* taps, const float* bias, u16* x, u16* b, u16* c,
                              int sequences) {
    const int blocks = (CHANNELS / 4 + CONV_THREADS - 1) / CONV_THREADS;
    launch_on_host(sequences * padded / CONV_TOKENS, blocks, CONV_THREADS, [&] {
        convolved(products, tokens, padded, past, taps, bias, x, b, c);
    });
}
extern "C" void run_decays(const u16* products, const float* dt, const float* a, int tokens,
                          float* steps, float* until, double* totals, int n_chunks, int n_heads) {
    launch_on_host(n_chunks, n_heads, 32, [&] {
        decays(products, dt, a, tokens, steps, until, totals);
    });
}
extern "C" void run_chunks(const u16* x, const u16* b, const float* until, const double* totals,
                           int n_chunks, const float* before, float* after, float* states,
                           int n_heads) {
    launch_on_host((LENGTH + SLICE - 1) / SLICE, n_heads, THREADS, [&] {
        chunks(x, b, until, totals, n_chunks, before, after, states);
    });
}
extern "C" void run_results(const u16* products, const u16* x, const u16* b, const u16* c,
                            const float* states, const float* steps, const double* totals,
                            const float* d, int tokens, float* out, int n_chunks, int n_heads) {
    launch_on_host(n_chunks, n_heads, THREADS, [&] {
        results(products, x, b, c, states, steps, totals, d, tokens, out);
    });
}
extern "C" void run_norm(const float* y, const float* weight, float eps, u16* out, int rows) {
    launch_on_host(rows, GROUPS, NORM_THREADS, [&] { norm_groups(y, weight, eps, out); });
}
extern "C" void shared_floats(int* of) { of[0] = CHUNK_FLOATS, of[1] = RESULT_FLOATS; }
"""


RUN_LATENT = """
extern "C" void run(int splits, const float* q, const float* kv, const float* norm, float eps,
                    const float* angles, const uint4* keys, const uint4* values, u8* cache,
                    const int* position, float scale, float* out, const int* chosen) {
    const int tiles = CHOSEN ? ROWS * ROW_TILES : (PAIRS + R - 1) / R;
    std::vector<u16> queries((size_t)tiles * R * 2 * DK, 0xffff);
    std::vector<float> partial((size_t)tiles * splits * PART, NAN);
    launch_on_host(HEADS + 1, (RANK + KEY_ROWS - 1) / KEY_ROWS, THREADS, [&] {
        latent_queries(q, kv, norm, eps, angles, keys, cache, position, scale, queries.data());
    });
    launch_on_host(splits, tiles, TEAMS * THREADS, [&] {
        latent_attention(queries.data(), cache, position, partial.data(), chosen, ROWS);
    });
    launch_on_host(HEADS, (VALUE + VALUE_ROWS - 1) / VALUE_ROWS, THREADS, [&] {
        latent_values(partial.data(), position, splits, values, out);
    });
}
"""


RUN_LATENT_PROMPT = """
extern "C" void norm(const uint4* x, int tokens, int n, int stride, const float* weight, float eps,
                     uint4* out) {
    launch_on_host((tokens + WARPS - 1) / WARPS, 1, THREADS,
                   [&] { norm_rows(x, tokens, n, stride, weight, eps, out); });
}
extern "C" void rows(const uint4* x, int tokens, int rank, int rope, int stride,
                     const float* weight, float eps, const float* cos, const float* sin,
                     int per_sequence, int neox, void* rows, long long first) {
    launch_on_host((tokens + WARPS - 1) / WARPS, 1, THREADS, [&] {
        latent_rows(x, tokens, rank, rope, stride, weight, eps, cos, sin, per_sequence, neox, rows,
                    first);
    });
}
extern "C" void heads(const uint4* q, int tokens, int heads, int nope, int rope, int stride,
                      const float* cos, const float* sin, int per_sequence, int neox,
                      const float* factors, void* out) {
    const int units = tokens * heads * (nope + rope) / 8;
    launch_on_host((units + THREADS - 1) / THREADS, 1, THREADS, [&] {
        latent_heads(q, tokens, heads, nope, rope, stride, cos, sin, per_sequence, neox, factors,
                     out);
    });
}
extern "C" void keys(const uint4* rows, long long positions, int width, int heads, int nope,
                     int rope, uint4* keys) {
    const int units = positions * heads * rope / 8;
    launch_on_host((units + THREADS - 1) / THREADS, 1, THREADS,
                   [&] { latent_keys(rows, positions, width, heads, nope, rope, keys); });
}
"""


RUN_EXPERTS = """
extern "C" void route(const float* logits, int parts, const float* bias, int tokens, int experts,
                      int used, int always, float threshold, int sigmoid, int norm, float scale,
                      int groups, int groups_used, int group_best, const float* choice_bias,
                      int* ids, float* weights) {
    launch_on_host((tokens + ROUTE_WARPS - 1) / ROUTE_WARPS, 1, 32 * ROUTE_WARPS,
                   [&] {
        route_2(logits, parts, bias, tokens, experts, used, always, threshold, sigmoid, norm, scale,
                groups, groups_used, group_best, choice_bias, ids, weights);
    });
}
extern "C" void group(const int* ids, int n, int experts, int* ends, int* sources, int* rows) {
    launch_on_host((experts + GROUPED - 1) / GROUPED, 1, GROUP_THREADS,
                   [&] { group_rows(ids, n, experts, ends, sources, rows); });
}
"""


# Operands of 16 x 8 x 8, cut off to TF32 as tensor cores do. Written before the source.
TF32 = """
inline void copy_chunk(char* to, const char* from) { memcpy(to, from, 16); }
struct Operands { unsigned a[4], b[2]; };
inline double cut(unsigned x) { return __uint_as_float(x & 0xffffe000u); }
inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const Operands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    exchange(mine, [&](const Operands (&w)[32], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            double sum = c[i];
            for (int k = 0; k < 8; k++) {
                const unsigned left = w[row % 8 * 4 + k % 4].a[(row >= 8) + 2 * (k >= 4)];
                sum += cut(left) * cut(w[column * 4 + k % 4].b[k >= 4]);
            }
            c[i] = (float)sum;
        }
        return 0;
    });
}
"""

# Operands of 16 x 8 x 16 in bfloat16. Written before the source.
BF16 = """
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const Operands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    auto number = [](unsigned pair, int which) {
        return (double)__uint_as_float(which ? pair & 0xffff0000u : pair << 16);
    };
    exchange(mine, [&](const Operands (&w)[32], int lane) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            double sum = c[i];
            for (int k = 0; k < 16; k++) {
                const unsigned left = w[row % 8 * 4 + k % 8 / 2].a[(row >= 8) + 2 * (k >= 8)];
                const unsigned right = w[column * 4 + k % 8 / 2].b[k >= 8];
                sum += number(left, k % 2) * number(right, k % 2);
            }
            c[i] = (float)sum;
        }
        return 0;
    });
}
"""


RUN_SCORES = """
template <bool BF16>
void run(const float* x, const char* w, int tokens, int n, int width, int depth, int parts,
         float* out) {
    const int row_tiles = (tokens + TOKENS - 1) / TOKENS;
    for (int part = 0; part < parts; part++)
        launch_on_host(row_tiles, (n + COLUMNS - 1) / COLUMNS, THREADS, [&] {
            scores<BF16>(shared, x, w, tokens, n, width, depth, out);
        }, part);
}
extern "C" void run_f32(const float* x, const char* w, int tokens, int n, int width, int depth,
                        int parts, float* out) {
    run<false>(x, w, tokens, n, width, depth, parts, out);
}
extern "C" void run_bf16(const float* x, const char* w, int tokens, int n, int width, int depth,
                         int parts, float* out) {
    run<true>(x, w, tokens, n, width, depth, parts, out);
}
"""
