// Tensor core instructions of mma.m16n8k16 on halves (bfloat16 where the keys are), and float32 in two such parts.
#pragma once
#include "attention/cache.cuh"

#ifndef ON_HOST
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 x 16 halves, row r of them at `at + r * stride`, as the left operand of mma.
__device__ __forceinline__ void load_a(u32 (&a)[4], const char* at, int stride, int lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(at + lane % 16 * stride + lane / 16 * 16)));
}

// 16 positions x 8 elements of V as the right operand.
__device__ __forceinline__ void load_b_turned(u32 (&b)[2], const char* at, int stride, int lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"(shared_address(at + lane % 16 * stride)));
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (TYPE_K == BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

__device__ __forceinline__ void two_parts(float x, u16* whole, u16* rest) {
    const u16 h = TYPE_K == BF16 ? float_to_bf16(x) : float_to_half(x);
    const float left = x - (TYPE_K == BF16 ? bf16_to_float(h) : half_to_float(h));
    *whole = h;
    *rest = TYPE_K == BF16 ? float_to_bf16(left) : float_to_half(left);
}
