// Join what blocks found in their ranges of positions. Range s of a row of scores left its maximum
// at maxima[s * PART], and the sum of its exponentials R floats after that.
#pragma once
#include "step/common.cuh"

// How much each of the `active` ranges counts in a row, to share[0 .. active-1]; by one warp, whose lanes read AHEAD ranges at once.
template <int PART, int R, int AHEAD>
__device__ __forceinline__ void shares_of_ranges(const float* maxima, int active, float* share, int lane) {
    float most = -INFINITY, sum = 0.f;
    for (int first = lane; first < active; first += 32 * AHEAD) {
        float m[AHEAD], l[AHEAD];  // what is read does not wait for what is added
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int s = first + 32 * i;
            m[i] = s < active ? __ldcg(maxima + s * PART) : -INFINITY;
            l[i] = s < active ? __ldcg(maxima + s * PART + R) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int s = first + 32 * i;
            if (s >= active) break;
            const float now = fmaxf(most, m[i]), base = now == -INFINITY ? 0.f : now;
            sum = fmaf(sum, exp2f(most - base), l[i] * exp2f(m[i] - base));
            most = now;
            share[s] = m[i];
        }
    }
    const float all = warp_max(most);
    sum = warp_sum(sum * exp2f(most - all));
    for (int s = lane; s < active; s += 32) share[s] = exp2f(share[s] - all) / sum;
}

// A range's part of four elements.
__device__ __forceinline__ void add_range(float4& sum, float factor, float4 x) {
    sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

// Add N ranges from `first` on, of which those from `until` on do not count.
template <int PART, int N, bool ALL>
__device__ __forceinline__ void add_ranges(float4& sum, const float* mixes, int first, int until, const float* share) {
    const float* parts = mixes + (long long)first * PART;
    float4 x[N];  // all are read before the first is added
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __ldcg((const float4*)(parts + (ALL ? i : min(i, until - first - 1)) * PART));
#pragma unroll
    for (int i = 0; i < N; i++)
        if (ALL || first + i < until) add_range(sum, share[first + i], x[i]);
}

// The sum of four elements, at mixes[s * PART] of range s, over ranges from .. until-1 in their order. AHEAD (8 or more) are read at once.
template <int PART, int AHEAD = 8>
__device__ __forceinline__ float4 join_ranges(const float* mixes, int from, int until, const float* share) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    int s = from;
#pragma unroll 1
    for (; until - s >= AHEAD; s += AHEAD) add_ranges<PART, AHEAD, true>(sum, mixes, s, until, share);
#pragma unroll 1
    for (; s < until; s += 8) add_ranges<PART, 8, false>(sum, mixes, s, until, share);
    return sum;
}
