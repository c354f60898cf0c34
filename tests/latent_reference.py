"""Latent attention in float64 on the same bytes, to compare kernels of the decode step with, and
few rows of a prompt in the absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.attention.mla_shape import SHORTEST, LatentShape
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.mixers.latent_absorbed import AbsorbedRows
from iqforge.runtime.layers.attend import temperature
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.rope import Rope
from iqforge.runtime.layers.specs import MLASpec, Temperature
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.state.hadamard import hadamard

F16, BF16 = torch.float16, torch.bfloat16
# Rows, heads, nope, rope, rank, value, type of the cache, of the matrices, neox, temperature.
SHAPES = [
    LatentShape(1, 3, 24, 16, 64, 40, "F16", F16),
    LatentShape(2, 20, 64, 32, 80, 32, "BF16", F16, True),
    LatentShape(3, 8, 192, 64, 256, 128, "F16", BF16, False, (0.2, 64)),
]
# To chosen positions; heads fill tiles of 16, or not.
CHOSEN_SHAPES = [
    LatentShape(1, 3, 24, 16, 64, 40, "F16", F16, chosen=96),
    LatentShape(2, 20, 64, 32, 80, 32, "BF16", F16, True, chosen=130),
]
ENCODED_SHAPES = [
    LatentShape(1, 3, 24, 64, 64, 40, "Q8_0", F16),
    LatentShape(2, 5, 24, 64, 64, 32, "Q4_0", F16, True),
    LatentShape(1, 3, 24, 64, 64, 32, "Q5_1", F16, chosen=96),
    LatentShape(2, 3, 24, 64, 64, 40, "Q8_KV", F16),
    LatentShape(2, 3, 24, 64, 64, 40, "Q4_0", F16, hadamard=32),
    LatentShape(1, 3, 24, 64, 96, 40, "Q5_1", F16, chosen=96, hadamard=32),
    LatentShape(2, 3, 24, 64, 64, 40, "F32", F16),
    LatentShape(1, 2, 24, 64, 512, 32, "F32", F16),  # half as many positions in shared memory
    LatentShape(1, 3, 24, 64, 64, 32, "F32", BF16, chosen=96),
]
WIDE_SHAPES = [
    LatentShape(1, 16, 128, 64, 512, 128, "Q8_0", F16),
    LatentShape(3, 16, 128, 64, 512, 128, "IQ4_NL", F16),
    LatentShape(1, 16, 128, 64, 512, 128, "Q8_KV", F16),
    LatentShape(1, 4, 192, 64, 256, 128, "Q6_0", BF16),
    LatentShape(2, 16, 128, 64, 512, 128, "F32", BF16),
    LatentShape(1, 16, 128, 64, 512, 128, "Q6_0", F16, hadamard=64),
    LatentShape(8, 128, 128, 64, 512, 128, "Q4_0", F16, hadamard=64),
    LatentShape(1, 64, 192, 64, 512, 256, "Q8_0", F16, chosen=2048),
    LatentShape(1, 64, 192, 64, 512, 256, "F32", F16, chosen=2048),
    LatentShape(1, 16, 128, 64, 512, 128, "F16", F16),
    LatentShape(8, 16, 128, 64, 512, 128, "BF16", BF16),
    LatentShape(2, 128, 128, 64, 512, 128, "F16", F16),
    LatentShape(4, 5, 192, 64, 512, 256, "BF16", F16),
    LatentShape(1, 64, 192, 64, 512, 256, "F16", F16, chosen=2048),
    LatentShape(8, 64, 192, 64, 512, 256, "F16", F16, chosen=2048),
]


def latent_error(
    shape: LatentShape, n_past: int, capacity: int, device: torch.device, run: Callable
) -> tuple[float, float]:
    """Return (relative error of the output, share of the new elements in the cache that equal the
    reference's). run(q, kv, norm, eps, angles, keys, values, cache, positions, scale, out) launches
    the kernels; it is called twice. For shapes with chosen positions `run` gets these as well.
    """
    g = torch.Generator(device).manual_seed(n_past)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    s = shape
    type = CACHE_TYPES[s.type.lower()]

    def encode(x: torch.Tensor) -> torch.Tensor:
        if s.hadamard and len(x):  # an empty tensor has no blocks
            x = hadamard(x, s.hadamard)
        return x.to(type.dtype) if type.encode is None else type.by_fields(type.encode(x))

    def decode(x: torch.Tensor) -> torch.Tensor:
        """What the kernels read: rows that are not in half precision are rounded to it."""
        if type.decode is None:
            return x.half() if s.type == "F32" else x
        return type.decode(type.in_blocks(x)).half()

    empty = torch.full((capacity, 1, s.width), float("nan"), device=device)
    cache = encode(empty.nan_to_num(1e4) if type.is_quantized else empty)
    cache[:n_past] = encode(random(n_past, 1, s.width))
    q, kv = random(s.rows, s.heads, s.nope + s.rope), random(s.rows, s.width)
    norm = RMSNorm(1 + 0.1 * random(s.rank), 1e-6)
    keys = (random(s.heads, s.rank, s.nope) * s.nope**-0.5).to(s.half)
    values = (random(s.heads, s.value, s.rank) * s.rank**-0.5).to(s.half)
    rope = Rope("neox" if s.neox else "norm", s.rope, 10000.0, device=device)
    positions = torch.arange(n_past, n_past + s.rows, device=device)
    cos, sin = rope.angles(positions)
    scale = (s.nope + s.rope) ** -0.5
    chosen, seen = random_choice(s, positions, g)
    results = []
    for _ in range(2):
        out = torch.full((s.rows, s.heads * s.value), float("nan"), device=device)
        angles = torch.stack([cos, sin], -1).contiguous()
        arguments = (q.flatten(1), kv, norm.weight, norm.eps, angles, keys, values, cache)
        run(*arguments, positions.int(), scale, out, *([chosen] if s.chosen else []))
        results.append(out)
    assert torch.equal(results[0], results[1])

    turn = cos.double(), sin.double()
    c = kv[:, : s.rank].double()
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    new = torch.cat([rope(kv[:, None, s.rank :].double(), turn)[:, 0], c], -1)
    rows = decode(cache[: n_past + s.rows, 0])
    same = (decode(encode(new.float())) == rows[n_past:]).double().mean().item()
    rows = hadamard(rows.double(), s.hadamard) if s.hadamard else rows.double()
    absorbed = torch.einsum("nhd,hrd->nhr", q[..., : s.nope].double(), keys.double())
    query = torch.cat([rope(q[..., s.nope :].double(), turn), absorbed], -1) * scale
    if s.temperature is not None:
        query = query * temperature(Temperature(*s.temperature), positions)[:, None, None]
    hidden = ~seen
    scores = torch.einsum("nhw,mw->nhm", query, rows).masked_fill(hidden[:, None], float("-inf"))
    mixed = scores.softmax(-1) @ rows[:, s.rope :]
    expected = torch.einsum("nhr,hvr->nhv", mixed, values.double()).flatten(1)
    return ((results[0].double() - expected).norm() / expected.norm()).item(), same


def absorbed_error(
    s: MLASpec, dtype: torch.dtype, past: int, n: int, device: torch.device
) -> float:
    """Return the relative error of `AbsorbedRows.to_all` for n rows after `past` positions, which
    runs twice: norms of the differences from `naive` and of that.
    """
    g = torch.Generator(device).manual_seed(past + n)
    random = lambda *size: torch.randn(*size, device=device, generator=g).to(dtype)  # noqa: E731
    module = SimpleNamespace(spec=s, top_k=0, up=None)
    absorbed = AbsorbedRows(module, Context(device, torch.bfloat16))  # type: ignore[arg-type]
    q, rows = random(n, s.heads, s.key_length), random(past + n, s.cache_width)
    w_k = random(s.heads, s.kv_rank, s.nope_length) * s.nope_length**-0.5
    w_v = random(s.heads, s.value_length, s.kv_rank) * s.kv_rank**-0.5
    positions = torch.arange(past, past + n, device=device)
    assert absorbed.has_kernels(dtype, n)
    results = []
    for _ in range(2):
        out = torch.full((n, s.heads * s.value_length), float("nan"), dtype=dtype, device=device)
        absorbed.to_all(q, rows, positions, (w_k, w_v), out)
        results.append(out)
    assert torch.equal(*results)
    expected = naive(q, rows, positions, w_k, w_v, s.scale)
    return ((results[0].double() - expected).norm() / expected.norm()).item()


# W_k^T q is rounded, and so is the result; queries, probabilities and mixes are not.
ABSORBED_ERRORS = {F16: 2.0**-10, BF16: 2.0**-7}


def naive(
    q: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return float64[n, heads * value], the results of queries q [n, heads, nope + rope] that see
    rows [m, rope + rank] up to their own of `positions` [n], from keys and values of all heads.
    w_k: [heads, rank, nope]; w_v: [heads, value, rank].
    """
    q, rows, w_k, w_v = (x.double() for x in (q, rows, w_k, w_v))
    nope = w_k.shape[-1]
    turned, latents = rows.split([q.shape[-1] - nope, w_k.shape[1]], -1)
    keys = torch.einsum("mr,hrd->mhd", latents, w_k)
    values = torch.einsum("mr,hvr->mhv", latents, w_v)
    scores = torch.einsum("nhd,mhd->nhm", q[..., :nope], keys)
    scores = (scores + torch.einsum("nhd,md->nhm", q[..., nope:], turned)) * scale
    hidden = torch.arange(len(rows), device=rows.device) > positions[:, None]
    shares = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("nhm,mhv->nhv", shares, values).flatten(1)


def random_choice(
    shape: LatentShape, positions: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions int32[rows, chosen] of each row, ascending, -1 after the last, and
    bool[rows, positions so far], which of them a row sees.
    """
    device, total = positions.device, int(positions[-1]) + 1
    seen = torch.arange(total, device=device)[None] <= positions[:, None]
    chosen = torch.full((len(positions), shape.chosen), -1, dtype=torch.int32, device=device)
    for row, p in enumerate(positions.tolist() if shape.chosen else []):
        order = torch.randperm(p + 1, generator=generator, device=device)
        best = order[: shape.chosen].sort().values
        chosen[row, : len(best)] = best.int()
        seen[row] = False
        seen[row, best] = True
    return chosen, seen


def allowed(shape: LatentShape, n_past: int, splits: int) -> float:
    """Return the allowed relative error for so many positions in `splits` ranges.

    - Tensor cores add to float32 and cut off what does not fit: half a unit in the last place is
      lost on average in every addition, always towards 0, so that losses add up. A score takes an
      addition for every 16 elements of a row, a mixture one for every 16 positions of a range;
      both twice, as queries and probabilities consist of two parts.
    - Two parts have 22 bits in float16 (less of small numbers, whose second part is subnormal) and
      16 in bfloat16. These errors are independent and add up as their squares do. What is left of
      them is a few units of the last bit, as the scores here are a few times 1.
    - Products with W_k and W_v, norm, exponentials and the join are float32: some units.
    """
    seen = n_past + shape.rows
    seen = min(seen, shape.chosen) if shape.chosen else seen
    span = max(SHORTEST, -(-seen // splits))
    additions = 2 * -(-shape.width // 16) + 2 * -(-min(span, seen) // 16)
    parts = 6 * 2.0**-17 if shape.type == "BF16" else 16 * 2.0**-23
    return additions * 2.0**-24 + parts + 16 * 2.0**-24
