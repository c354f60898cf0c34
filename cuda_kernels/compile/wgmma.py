"""Write the header `prompt/wgmma.cuh`: Hopper's products of a warpgroup (PTX wgmma.mma_async), one
form per number of columns.
"""

from __future__ import annotations

# Numbers of columns of the instructions that compute tiles.
TOKENS = (
    32,
    64,
    96,
    112,
    128,
    136,
    144,
    152,
    160,
)


def wgmma_header() -> str:
    """Return the header: wgmma with weights in registers and tokens in shared memory, for every
    number of tokens in use.
    """
    parts = [
        (
            "// Written by cuda_kernels/compile/wgmma.py: wgmma.mma_async of 64 rows in registers,"
            " N columns in shared memory, 16 deep."
        ),
        "constexpr bool HALF_IS_F16 = HALF;",
        (
            "__device__ __forceinline__ void wgmma_fence() { asm"
            ' volatile("wgmma.fence.sync.aligned;" ::: "memory"); }'
        ),
        (
            "__device__ __forceinline__ void wgmma_commit() { asm"
            ' volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }'
        ),
        (
            "template <int PENDING> __device__ __forceinline__ void wgmma_wait() "
            '{ asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }'
        ),
        "template <int N> struct Wgmma;",
    ]
    for n in TOKENS:
        count = n // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))

        def instruction(kind: str, count=count, sums=sums, outputs=outputs, n=n) -> str:
            return (
                f'asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5},'
                f" 0;\\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}},"
                f" {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, add, 1, 1,"
                f' 0;\\n}}" : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens),'
                ' "r"(int(add)));'
            )

        parts.append(
            f"template <> struct Wgmma<{n}> {{\n  static __device__ __forceinline__ void run(Sums&"
            " d, const uint32_t (&a)[4], uint64_t tokens, bool add) {\n    if constexpr"
            f" (HALF_IS_F16) {instruction('f16')}\n    else {instruction('bf16')}\n  }}\n}};"
        )
    return "\n".join(parts) + "\n"
