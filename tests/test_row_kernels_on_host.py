"""Kernels of rows without a GPU: compiled by g++, called as on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import astuple

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.compile.spec import KernelSpec
from iqforge.cuda_kernels.peer import rows as peer_rows
from iqforge.cuda_kernels.prompt import attention as prompt_attention
from iqforge.cuda_kernels.prompt import rows as prompt_rows
from iqforge.cuda_kernels.step import between as step_between
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.common.stream import Stream
from iqforge.runtime.layers.ffn import activate
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.specs import FFNSpec, Xielu
from torch.nn import functional as F

from . import prompt_on_cpu, step_rows_on_cpu
from .kernels_on_host import library
from .permuted_columns import permutation

# kernel: its parameters
KERNELS = {
    "heads_neox_64": (
        "const uint4* qkv, int tokens, int heads, int kv, int pitch, int query_step, int key_at,"
        " int value_at, int size, int value_size, int n_rot, const float* cos, const float* sin,"
        " int per, const float* q_norm, const float* k_norm, float eps, float value_eps, const"
        " float* factors, const int* own, void* q, void* k, void* v, long long first"
    ),
    "softmax_scores": (
        "float* scores, unsigned short* out, int keys, int queries, int first, int window, float"
        " scale, float cap, const float* sinks"
    ),
    "add_post_norm_1": (
        "float* h, const uint4* delta, const float* weights, const int* rows, int slots, const"
        " float* weight, float eps, uint4* x, int permuted, float* exact, int width, const float*"
        " post_weight, float post_eps, float by"
    ),
    "add_more_norm_1": (
        "float* h, const uint4* delta, const float* weights, const int* rows, int slots, const"
        " float* weight, float eps, uint4* x, int permuted, float* exact, int width, const uint4*"
        " extra, const float* shares, uint4* plain"
    ),
    "peer_norm_1": (
        "float* h, const uint4* delta, const float* weights, const int* rows, int slots, const"
        " uint4* extra, const float* shares, const float* weight, float eps, uint4* x, int"
        " permuted, uint4* plain, float* exact, int width, const float* post_weight, float"
        " post_eps, float by, u32* state, u32* missing, const u64* peers, u64 most, u64 place, int"
        " rank, int ranks, int moved"
    ),
    "sum_normed": (
        "const float* first, const float* first_weight, float first_eps, float* second, const"
        " float* second_weight, float second_eps, float* out, int width"
    ),
    "norm_heads": (
        "const float* q, const float* k, const float* q_weight, const float* k_weight, float eps,"
        " const int* own, float* q_out, float* k_out, int q_width, int k_width, int q_heads, int"
        " k_heads, int size"
    ),
    "row_factors": (
        "const uint4* products, int pitch, int q_units, int key_at, int k_units, float eps, float*"
        " factors"
    ),
    "xielu_rows": (
        "uint4* x, long long units, float alpha_p, float alpha_n, float beta, float eps"
    ),
    "layer_inputs": (
        "const float* projected, float scale, const float* weight, float eps, const float* table,"
        " float table_scale, float* out, int length"
    ),
}
TYPES = {
    np.int32: ctypes.c_int,
    np.int64: ctypes.c_longlong,
    np.uint64: ctypes.c_ulonglong,
    np.float32: ctypes.c_float,
}
# What kernels of ranks call to meet. Here there is one rank, which meets nobody.
ALONE = """
#include <stdlib.h>
inline unsigned long long nanoseconds() { return 0; }
inline void send16(unsigned long long, uint4) { abort(); }
inline uint4 load16(unsigned long long) { abort(); }
constexpr unsigned TRIES = 64;
inline void let_others_run() {}
inline void stop_with_error() { abort(); }
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Replace launches by calls of the kernels on the CPU, with the same arguments."""

    def function(spec, name, device):
        folder = tmp_path / f"{spec.name}_{name}"
        folder.mkdir(exist_ok=True)
        names = ", ".join(part.split()[-1].lstrip("*") for part in KERNELS[name].split(", "))
        run = f"""
extern "C" void run(int grid_x, int grid_y, int threads, {KERNELS[name]}) {{
    launch_on_host(grid_x, grid_y, threads, [&] {{ {name}({names}); }});
}}
"""
        # The header for the CPU has a warp_sum already; no kernel that runs here reads blockDim.
        own = () if spec is step_between.BETWEEN else (("warp_sum", "prompt_warp_sum"),)
        own += (("blockDim", "gridDim"),)
        whole = KernelSpec(spec.name, spec.sources, (*spec.defines, *own), spec.functions)
        return library(folder, whole, run, before=ALONE).run

    def launch(kernel, grid, block, *arguments, pdl=False):
        grid = grid if isinstance(grid, tuple) else (grid, 1)
        kernel(
            *grid,
            block,
            *(
                ctypes.c_void_p(None if x is None else x.data_ptr())
                if x is None or isinstance(x, torch.Tensor)
                else TYPES[type(x)](x)
                for x in arguments
            ),
        )

    for module in (peer_rows, prompt_attention, prompt_rows, step_between):
        monkeypatch.setattr(module, "function", function)
        monkeypatch.setattr(module, "launch", launch)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "value_size"),
    [(512, 0), (320, 192), (192, 320)],
    ids=["values are keys", "shorter values", "longer values"],
)
@pytest.mark.parametrize("gated, norms_last", [(False, False), (True, False), (False, True)])
def test_long_heads(compiled, size, value_size, gated, norms_last):
    tokens, heads, kv = 3, 3, 1
    of_queries = heads * size * (1 + gated)
    qkv = draw(tokens, of_queries + kv * size + kv * value_size).bfloat16()
    angle, norms, results = draw(tokens, size // 2), [draw(size, seed=2), draw(size, seed=3)], []
    for module in (prompt_attention, prompt_on_cpu):
        q, k, v = (
            torch.full((tokens, n, length), float("nan"), dtype=torch.float32)
            for n, length in ((heads, size), (kv, size), (kv, value_size or size))
        )
        options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6, "value_eps": 1e-5}
        options |= {"gated": gated, "norms_last": norms_last}
        module.rotate_heads(qkv, q, k, v, 0, angle.cos(), angle.sin(), neox=True, **options)
        results.append((q, k, v))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Of 5 heads of queries and 3 of keys; a key head twice, as a rank has it for unequal numbers.
OWN = {"all": None, "some": ((1, 2, 4), (0, 2, 2))}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("of", ["q", "kv", "qkv"])
def test_norms_over_all_heads_in_prompts(compiled, own, of):
    """Also of products that have only queries, or none."""
    tokens, size, all_heads, n_own, results = 3, 296, (5, 3), (5, 3), []
    given = [n * (x in of) for n, x in zip(all_heads, "qk", strict=True)]
    if (chosen := OWN[own]) is not None:
        n_own = tuple(map(len, chosen))
        heads = torch.tensor(sum((h for h, x in zip(chosen, "qk", strict=True) if x in of), ()))
        among = prompt_attention.OwnAmong(*given, heads.int())
    n_q, n_kv = (n * (x in of) for n, x in zip(n_own, "qk", strict=True))
    products = draw(tokens, (sum(given) + n_kv) * size).bfloat16()
    angle, norms = draw(tokens, 72), [draw(n * size, seed=n) for n in all_heads]
    for rows, module in ((prompt_rows, prompt_attention), (prompt_on_cpu, prompt_on_cpu)):
        factors = torch.full((tokens, 2), float("nan"))
        ends = given[0] * size, given[0] * size, given[1] * size
        rows.row_factors(products, *ends, 1e-2, factors)
        q, k, v = (torch.full((tokens, n, size), float("nan")) for n in (n_q, n_kv, n_kv))
        module.rotate_heads(
            products,
            *(q, k, v, 0, angle.cos(), angle.sin()),
            neox=True,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=1e-2,
            factors=factors,
            own=None if chosen is None else among,
        )
        results.append((q, k, v))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", OWN)
def test_norms_over_all_heads_in_steps(compiled, own):
    size, (of_q, of_k), results = 24, (5, 3), []
    chosen = OWN[own] or (range(of_q), range(of_k))
    heads = None if OWN[own] is None else torch.tensor((*chosen[0], *chosen[1])).int()
    q, k, norms = 3 * draw(3, of_q * size), draw(3, of_k * size), draw(of_q * size, seed=2)
    for kernel in (step_between.norm_heads, step_rows_on_cpu.norm_heads):
        outs = [torch.full((3, len(x) * size), float("nan")) for x in chosen]
        kernel(q, k, norms, norms[: of_k * size], 1e-2, size, heads, *outs)
        results.append(outs)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 2.0), (7, 0.0), (40, 2.0)])
def test_softmax_of_scores(compiled, window, softcap, with_sinks):
    """Query i of 2 sees keys up to 300 + i of 303."""
    scores, sinks, results = 3 * draw(2, 4, 303), 5 * draw(4, seed=2), []
    for module in (prompt_attention, prompt_on_cpu):
        out = torch.full(scores.shape, float("nan")).half()
        options = {"scale": 0.5, "window": window, "softcap": softcap}
        options["sinks"] = sinks if with_sinks else None
        module.softmax_scores(scores.clone(), out, 2, 300, **options)
        results.append(out)
    torch.testing.assert_close(*results, rtol=2e-3, atol=1e-6)


def test_norms_of_what_is_added(compiled):
    h, weight, post = draw(2, 520), draw(520, seed=2), draw(520, seed=3)
    delta, results = draw(2, 520, seed=4).bfloat16(), []
    for module in (prompt_rows, prompt_on_cpu):
        stream, out = h.clone(), torch.empty(2, 520, dtype=torch.bfloat16)
        options = {"delta": delta, "post_weight": post, "post_eps": 1e-6, "scale": 0.75}
        module.add_norm(stream, weight, 1e-5, out, **options)
        results.append((stream, out))
    for (found, expected), close in zip(zip(*results, strict=True), (1e-5, 1.6e-2), strict=True):
        torch.testing.assert_close(found, expected, rtol=close, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_added_next_to_experts(compiled, shared):
    """One expert of the second token is not chosen."""
    tokens, width = 3, 512
    h, weight, extra = draw(tokens, width), draw(width, seed=2), draw(tokens, width, seed=3)
    delta, weights = draw(2 * tokens, width, seed=4).bfloat16(), draw(tokens, 2, seed=5)
    options = {
        "delta": delta,
        "rows": torch.tensor([[5, 0], [-1, 3], [1, 4]], dtype=torch.int32),
        "weights": weights,
        "extra": extra.bfloat16(),
        "shares": draw(tokens, seed=6) if shared else None,
    }
    stream, expected, out = h.clone(), h.clone(), torch.empty(tokens, width, dtype=torch.bfloat16)
    prompt_on_cpu.add_norm(expected, weight, 1e-5, out, **options)
    permuted, plain = torch.full_like(out, float("nan")), torch.full_like(out, float("nan"))
    prompt_rows.add_norm(stream, weight, 1e-5, permuted, permuted=True, plain=plain, **options)
    torch.testing.assert_close(stream, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, out, rtol=1.6e-2, atol=1e-5)
    assert torch.equal(permuted, plain[:, permutation(width)])


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_add_next_to_experts_as_one_does(compiled, shared):
    """A group of one rank, which takes two rows at a time: the same bits as without a group."""
    tokens, width = 5, 520
    h, weight, extra = draw(tokens, width), draw(width, seed=2), draw(tokens, width, seed=3)
    options = {
        "delta": draw(2 * tokens, width, seed=4).bfloat16(),
        "rows": torch.tensor([[5, 0], [-1, 3], [1, 4], [9, 8], [7, -1]], dtype=torch.int32),
        "weights": draw(tokens, 2, seed=5),
        "extra": extra.bfloat16(),
        "shares": draw(tokens, seed=6) if shared else None,
    }
    alone = object.__new__(peer_rows.PeerRows)
    alone.rank, alone.n_ranks, alone.rows, alone._place = 0, 1, 2, 1 << 20
    alone._state, alone._missing = (torch.zeros(n, dtype=torch.int32) for n in (3, 1))
    alone._peers, alone._most = torch.zeros(1, dtype=torch.int64), np.uint64(0)
    group_options = {"moved": torch.float32, "half": torch.bfloat16}
    results = []
    for add, more in ((prompt_rows.add_norm, {}), (alone.add_norm, group_options)):
        stream, exact = h.clone(), torch.full_like(h, float("nan"))
        out, plain = (
            torch.full((tokens, n), float("nan"), dtype=torch.bfloat16) for n in (640, width)
        )
        add(stream, weight, 1e-5, out, exact=exact, permuted=True, plain=plain, **options, **more)
        results.append((stream, out, plain, exact))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert alone._state.tolist() == [3, 0, 0]  # launches; rows of the next one


def test_a_norm_of_what_is_added_comes_before_rows_as_they_are(compiled):
    """No kernel does both. The stream's rows are those of two launches."""
    width, half = 520, torch.bfloat16
    norms = [RMSNorm(draw(width, seed=n), 1e-5) for n in (2, 3)]
    h, delta = draw(2, width), draw(2, width, seed=4).to(half)
    stream = Stream(h.clone(), Context(torch.device("cpu"), half))
    stream.add(delta, post_norm=norms[0])
    plain = torch.full((2, width), float("nan"), dtype=half)
    x = stream.normed(norms[1], permuted=True, plain=plain)
    expected, wanted = h.clone(), torch.empty_like(plain)
    options = {"delta": delta, "post_weight": norms[0].weight, "post_eps": 1e-5}
    prompt_rows.add_norm(expected, norms[1].weight, 1e-5, wanted, **options)
    assert torch.equal(stream.settled(), expected) and torch.equal(plain, wanted)
    assert torch.equal(x, F.pad(plain, (0, 120))[:, permutation(640)])


def test_rows_as_they_are_come_only_next_to_permuted_ones():
    h, half = draw(3, 512), draw(3, 512).bfloat16()
    for out in (half, None):
        with pytest.raises(ValueError, match="only next to permuted ones"):
            prompt_rows.add_norm(
                h, draw(512), 1e-5, out, delta=half, plain=half, permuted=out is None
            )


def test_more_is_added_only_next_to_experts():
    h, half = draw(3, 512), draw(3, 512).bfloat16()
    for options in (
        {"delta": half, "extra": half},
        {"plain": half, "permuted": True, "centered": True},
        {"delta": half, "plain": half, "permuted": True, "post_weight": draw(512)},
    ):
        with pytest.raises(ValueError, match="only next to the outputs of experts"):
            prompt_rows.add_norm(h, draw(512), 1e-5, half, **options)


def test_sums_of_norms(compiled):
    first, second, weights = draw(2, 320), draw(2, 320, seed=2), draw(2, 320, seed=3)
    results = []
    for module in (step_between, step_rows_on_cpu):
        out, other = torch.empty(2, 320), second.clone()
        module.sum_normed(first, weights[0], 1e-6, other, weights[1], 1e-5, out)
        assert not other.any()
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_inputs_of_layers(compiled):
    projected, table, results = draw(2, 3 * 40), draw(2, 3 * 40, seed=2), []
    for module in (step_between, step_rows_on_cpu):
        out = torch.empty(3, 2, 40)
        module.layer_inputs(projected, 0.1, draw(40, seed=3), 1e-6, table, 6.0, out)
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_xielu(compiled, half):
    """Also of what is near 0 on both sides, and of 0."""
    x = torch.cat([3 * draw(69, 24), 1e-3 * draw(2, 24), torch.zeros(1, 24)]).to(half)
    by = Xielu(0.75, 0.6, 0.5, -1e-6)
    expected = activate(FFNSpec("xielu", gated=False, xielu=by), x.double())
    prompt_rows.xielu(x, *astuple(by))
    rounding = 2.0**-8 if half is torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(x.double(), expected, rtol=rounding, atol=2e-7)
