"""Write headers of Hopper's products of a warpgroup (PTX wgmma.mma_async), 64 rows and 16 deep, one
form per number of columns: `prompt/wgmma.cuh` for experts, `prompt/wgmma_attention.cuh` for
attention.
"""

from __future__ import annotations

# Numbers of columns of the instructions that compute tiles.
TOKENS = (
    16,
    32,
    48,
    64,
    96,
    112,
    128,
    136,
    144,
    152,
    160,
)
POSITIONS = (80, 128, 160)  # of a block of keys
VALUES = (32, 64, 80, 96, 112, 128, 192, 256)  # elements of a head

_GROUPS = (
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
)


def wgmma_header() -> str:
    """Return the header: wgmma with weights in registers and tokens in shared memory, for every
    number of tokens in use.
    """
    return _header(
        "64 rows in registers, N columns in shared memory",
        (_product("Wgmma", n, d="Sums", in_registers=True, transposed=False) for n in TOKENS),
        ("Wgmma",),
    )


def attention_header() -> str:
    """Return the header: `Both`, with both factors in shared memory, for numbers of positions;
    `Transposed`, with the first one in registers and the second one as its transpose, for lengths
    of values.
    """
    forms = [
        *(_product("Both", n, in_registers=False, transposed=False) for n in POSITIONS),
        *(_product("Transposed", n, in_registers=True, transposed=True) for n in VALUES),
    ]
    return _header("64 rows, N columns", forms, ("Both", "Transposed"))


def _header(what: str, forms, names: tuple[str, ...]) -> str:
    return "\n".join(
        (
            f"// Written by cuda_kernels/compile/wgmma.py: wgmma.mma_async of {what}, 16 deep.",
            "#ifndef ON_HOST",
            *_GROUPS,
            *(f"template <int N> struct {name};" for name in names),
            *forms,
            "#endif",
            "",
        )
    )


def _product(
    name: str, n: int, *, in_registers: bool, transposed: bool, d: str | None = None
) -> str:
    """Return the form for n columns: d += first * second, or d = first * second without `add`.

    in_registers: the first factor, else it is in shared memory as the second one. d: a type for the
    sums of a thread, float[n / 2].
    """
    count = n // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if in_registers:
        factor, flags = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", ""
        inputs, parameter = ", ".join(f'"r"(a[{i}])' for i in range(4)), "const uint32_t (&a)[4]"
    else:
        factor, flags = f"%{count}", "0, "
        inputs, parameter = '"l"(a)', "uint64_t a"
    second = count + (4 if in_registers else 1)
    kinds = (
        f'asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{second + 1}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {factor},"
        f' %{second}, add, 1, 1, {flags}{int(transposed)};\\n}}" : {outputs} : {inputs}, "l"(b),'
        ' "r"(int(add)));'
        for kind in ("f16", "bf16")
    )
    sums_of = f"{d}& d" if d else f"float (&d)[{count}]"
    return (
        f"template <> struct {name}<{n}> {{\n"
        f"  static __device__ __forceinline__ void run({sums_of}, {parameter}, uint64_t b, bool"
        f" add) {{\n    if constexpr (HALF_IS_F16) {next(kinds)}\n    else {next(kinds)}\n  }}\n}};"
    )
