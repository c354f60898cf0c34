// Encoding rows of the cache, a warp for each: the bytes of runtime/state/cache_types.py, which has the formulas. Rows in shared memory begin at
// multiples of 16 bytes.
#pragma once
#include "attention/cache.cuh"

// A scale as stored, and its reciprocal (0 for a scale of 0).
struct Scale { u16 bits; float value, inverse; };

__device__ __forceinline__ Scale as_stored(float d) {
    Scale s;
    s.bits = float_to_half(fminf(fmaxf(d, -65504.f), 65504.f));
    s.value = half_to_float(s.bits);
    s.inverse = s.value == 0.f ? 0.f : __fdiv_rn(1.f, s.value);
    return s;
}

__device__ __forceinline__ int code(float x, float inverse, int low, int high) {
    return (int)fminf(fmaxf(rintf(__fmul_rn(x, inverse)), (float)low), (float)high);
}

// The largest of 8 lanes.
__device__ __forceinline__ float largest_of_8(float x) {
#pragma unroll
    for (int d = 1; d < 8; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, d));
    return x;
}

// Four codes as bytes of a word, the first one low.
__device__ __forceinline__ u32 four_bytes(const int (&q)[4]) {
    return (u32)(q[0] & 255) | (u32)(q[1] & 255) << 8 | (u32)(q[2] & 255) << 16 | (u32)(q[3] & 255) << 24;
}

// Write four neighbouring elements of each lane to a row of N: those of 8 lanes are a block of 32, `b`. x becomes what will be read back.
// `there`: the block is one of the row's. All lanes take part, so that blocks do not wait for each other.
template <int TYPE, int N>
__device__ __forceinline__ void encode4(float (&x)[4], int lane, const Fields<u8>& row, int b, bool there) {
    using At = Places<TYPE, N>;
    const int part = lane % 8;
    u8 *codes = row.low + At::low(b), *scale = row.scale + At::scale(b);
    auto put = [&](u8* to, u32 word) {
        if constexpr (row_bytes(TYPE, N) % 4 == 0) *(u32*)to = word;
        else *(u16*)to = (u16)word, *(u16*)(to + 2) = (u16)(word >> 16);
    };
    int q[4];
    if constexpr (TYPE == Q8_0) {
        const Scale d = as_stored(__fdiv_rn(largest_of_8(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])))), 127.f));
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = code(x[i], d.inverse, -127, 127), x[i] = d.value * (float)q[i];
        if (there && part == 0) *(u16*)scale = d.bits;
        if (there) put(codes + 4 * part, four_bytes(q));
    } else {
        constexpr bool MIN = At::MIN;
        constexpr int LEVELS = TYPE == Q6_0 ? 64 : At::FIFTHS ? 32 : 16;
        const float high = largest_of_8(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
        const float low = -largest_of_8(fmaxf(fmaxf(-x[0], -x[1]), fmaxf(-x[2], -x[3])));
        const float extreme = high > -low ? high : low;
        const Scale m = MIN ? as_stored(low) : Scale{};
        const Scale d = as_stored(MIN ? __fdiv_rn(high - low, (float)(LEVELS - 1)) : __fdiv_rn(extreme, TYPE == IQ4_NL ? -127.f : -(float)(LEVELS / 2)));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (MIN) {
                q[i] = code(x[i] - m.value, d.inverse, 0, LEVELS - 1);
                x[i] = __fadd_rn(__fmul_rn(d.value, (float)q[i]), m.value);
            } else if constexpr (TYPE == IQ4_NL) {
                const float y = __fmul_rn(x[i], d.inverse);
                q[i] = 0;  // a value half way takes the lower one
#pragma unroll
                for (int j = 1; j < 16; j++) q[i] += y > 0.5f * (float)(IQ4NL[j - 1] + IQ4NL[j]);
                x[i] = d.value * (float)IQ4NL[q[i]];
            } else {
                const int signed_code = code(x[i], d.inverse, -LEVELS / 2, LEVELS / 2 - 1);
                q[i] = signed_code + LEVELS / 2, x[i] = d.value * (float)signed_code;
            }
        }
        if (there && part == 0) *(u16*)scale = d.bits;
        if (MIN && there && part == 0) *(u16*)(scale + 2) = m.bits;
        const u32 word = four_bytes(q), lower = word & 0x0f0f0f0fu, upper = __shfl_down_sync(0xffffffff, lower, 4);
        if (there && part < 4) put(codes + 4 * part, lower | upper << 4);
        if constexpr (LEVELS == 32) {  // a bit of each element
            u32 fifths = ((word >> 4 & 1) | (word >> 11 & 2) | (word >> 18 & 4) | (word >> 25 & 8)) << 4 * part;
#pragma unroll
            for (int d = 1; d < 8; d *= 2) fifths |= __shfl_xor_sync(0xffffffff, fifths, d);
            if (there && part == 0) put(row.high + At::high(b), fifths);
        }
        if constexpr (LEVELS == 64) {  // two bits of elements that are 8 apart
            u32 pairs = (word >> 4 & 0x03030303u) << (part / 2 % 2 * 4 + part / 4 * 2);
#pragma unroll
            for (int d = 2; d < 8; d *= 2) pairs |= __shfl_xor_sync(0xffffffff, pairs, d);
            if (there && part < 2) put(row.high + At::high(b) + 4 * part, pairs);
        }
    }
}

// Write D elements of `row` to `to`. kept(i, x) is told element i as it will be read back, by one lane each. All lanes take part.
template <int TYPE, int D, class Kept>
__device__ __forceinline__ void encode_row(const float* row, const Fields<u8>& to, int lane, Kept&& kept) {
    if constexpr (is_float(TYPE)) {
#pragma unroll
        for (int i = lane; i < D; i += 32) {
            if constexpr (TYPE == F32) {
                ((float*)to.low)[i] = row[i];
                kept(i, row[i]);
            } else {
                const u16 h = TYPE == BF16 ? float_to_bf16(row[i]) : float_to_half(row[i]);
                ((u16*)to.low)[i] = h;
                kept(i, TYPE == BF16 ? bf16_to_float(h) : half_to_float(h));
            }
        }
    } else if constexpr (TYPE == Q8_KV) {
        float most = 0.f, sum = 0.f;
#pragma unroll
        for (int i = lane; i < D; i += 32) most = fmaxf(most, fabsf(row[i]));
        const float d = __fdiv_rn(warp_max(most), 127.f), inverse = d == 0.f ? 0.f : __fdiv_rn(1.f, d);
#pragma unroll
        for (int i = lane; i < D; i += 32) {
            const int q = code(row[i], inverse, -127, 127);
            to.low[i] = (u8)q;
            sum += (float)q;  // exact
            kept(i, d * (float)q);
        }
        sum = warp_sum(sum);
        if (lane == 0) *(float*)to.scale = d, *(int*)(to.scale + 4) = (int)sum;
    } else {
#pragma unroll
        for (int first = 0; first < D; first += 128) {
            const int at = first + 4 * lane;
            const bool there = D % 128 == 0 || at < D;
            const float4 of_row = *(const float4*)(row + (there ? at : 0));
            float x[4] = {of_row.x, of_row.y, of_row.z, of_row.w};
            encode4<TYPE, D>(x, lane, to, at / 32, there);
            if (there) kept(at, x[0]), kept(at + 1, x[1]), kept(at + 2, x[2]), kept(at + 3, x[3]);
        }
    }
}
