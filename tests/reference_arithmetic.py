"""A Llama of Q5_0 and Q8_0 with the roundings of ik_llama.cpp on a CPU with AVX-512, to compare its
figures digit by digit.

Codes of activations that come out on the other side of a half change all that follows: with sums
of float32 in another order, the mean divergence of the golden model differs by 2e-3. So every
rounding is here that its figures depend on.

- Products: activations are rounded to 8 bits for every 32 of a row, with a scale in bfloat16.
  Codes of weights are shifted by 127, as one factor of the processor's instruction has no sign.
  Sums are exact within 32 columns, then in float32 in order of the columns.
- Attention: queries, keys and values are float16. Values are summed up in float16, in order of the
  positions, relative to the largest score so far.
- Rotations: the angle of each pair is that of the pair before times a constant, in float32.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.layers.attention import Attention
from iqforge.runtime.layers.rope import Rope
from iqforge.runtime.weights.linear import Linear

_BLOCK = 32
_SHIFT = 127


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c with one rounding to float32; a product of two float32 is exact in 64."""
    return (a.double() * b.double() + c.double()).float()


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


class _Codes:
    """Codes int64[blocks, 32, rows] and scales float32[blocks, rows] of a Q5_0 or Q8_0 matrix."""

    def __init__(self, encoded: np.ndarray, decoded: torch.Tensor):
        blocks = encoded.reshape(len(decoded), decoded.shape[1] // _BLOCK, -1)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
        self.scales = torch.from_numpy(scales.astype(np.float32)).T
        ratio = decoded.unflatten(1, (-1, _BLOCK)) / self.scales.T[:, :, None]
        self.codes = ratio.nan_to_num().round().permute(1, 2, 0)
        products = self.codes * self.scales[:, None]
        assert torch.equal(products.permute(2, 0, 1).flatten(1), decoded)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32[n, rows] for activations x float32[n, columns]."""
        blocks = x.unflatten(1, (-1, _BLOCK)).transpose(0, 1)
        scales = (blocks.abs().amax(2, keepdim=True) / 127).bfloat16().float()
        codes = (blocks * (1 / scales)).nan_to_num().round()
        shifted = offset = torch.zeros(len(x), self.scales.shape[1])
        for w, of_w, q, of_x in zip(self.codes, self.scales, codes, scales, strict=True):
            shifted = _fused(of_w * of_x, q @ (w + _SHIFT), shifted)
            offset = _fused(of_w, of_x * q.sum(1, keepdim=True), offset)
        return _fused(torch.tensor(-float(_SHIFT)), offset, shifted)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of whole sequences, as `layers.attend.attend`."""
    q, k, v = (_half(x) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("sqhd,skhd->sqhk", q.double(), k.double()).float()
    scores *= torch.tensor(scale)
    largest = torch.full(q.shape[:3], -torch.inf)
    total, mixed = torch.zeros(q.shape[:3]), torch.zeros(*q.shape[:3], v.shape[-1])
    for key in range(k.shape[1]):
        score = scores[:, key:, :, key]
        before = largest[:, key:].clone()
        now = torch.maximum(before, score)
        shrink, share = (torch.exp((x - now).double()).float() for x in (before, score))
        kept = _half(mixed[:, key:] * shrink[..., None])
        mixed[:, key:] = _half(_fused(v[:, key, None], share[..., None], kept))
        total[:, key:] = _fused(total[:, key:], shrink, share)
        largest[:, key:] = now
    return mixed * (1 / total)[..., None]


def _angles(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = (rope.rates[1] / rope.rates[0]).float()
    theta = [positions.float()]
    while len(theta) < len(rope.rates):
        theta.append(theta[-1] * ratio)
    angles = torch.stack(theta, dim=1).double()
    return angles.cos().float(), angles.sin().float()


def use_reference_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models rotate and attend as the reference does."""
    monkeypatch.setattr(Rope, "angles", _angles)
    monkeypatch.setattr(
        Attention, "_attend_from_one", lambda module, *qkv: _attend(*qkv, module.spec.scale)
    )


def use_reference_products(monkeypatch: pytest.MonkeyPatch, path: os.PathLike) -> None:
    """Let models multiply as the reference does. path: their file."""
    with open_gguf(path) as source:
        encoded = {t.name: source.read_rows(t, 0, t.n_rows) for t in source.tensors}
    known: dict[str, _Codes] = {}

    def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if linear.name not in known:
            known[linear.name] = _Codes(encoded[linear.name], linear.decoded())
        return known[linear.name].products(x)

    monkeypatch.setattr(Linear, "__call__", product)
