"""What a row of a key/value cache can be stored as: one head of one position, in blocks of 32 with
a scale.

The layouts are those of weights (formats/codecs/legacy.py and q8.py), so that
`formats.codecs.codec.decode` reads the same numbers. Encoders are simple on purpose, as a kernel
has to make the same bytes while it runs: the scale comes from the largest magnitude of a block and
is rounded to half precision first, then codes are the nearest ones (ties to even).

    Q8_0                  d = |extreme| / 127                      q = rint(x / d)
    Q6_0, Q5_0, Q4_0      d = extreme / lowest code                q = rint(x / d) - lowest code
    Q5_1, Q4_1            d = (max - min) / highest code, m = min  q = rint((x - m) / d)
    IQ4_NL                d = extreme / -127                       q = nearest of the table to x / d
    Q8_KV (whole row)     d = |extreme| / 127, float32             q = rint(x / d)

`extreme` is the maximum of the block if it is above -minimum, else the minimum. x / d is x * (1 /
d) with both roundings to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...formats.tables import IQ4NL_VALUES
from ...formats.types import ggml_type

BLOCK = 32
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class CacheType:
    """`encode` float32[..., n] to uint8[..., row_bytes(n)] and `decode` back; both None for the
    floating types, stored as `dtype`. fields: bytes of what a block consists of: scales, high bits,
    codes; of a whole row, its header.
    """

    name: str
    dtype: torch.dtype
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    fields: tuple[int, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether rows are blocks with scales, not plain floats."""
        return self.encode is not None

    def row_bytes(self, n: int) -> int:
        """Bytes of one head of `n` elements."""
        return ggml_type(self.name).row_bytes(n)

    def by_fields(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows uint8[..., row_bytes] of a quantized type with fields of one kind together:
        codes of all blocks, high bits of all, scales of all. Kernels of latent attention read them
        so, as most fields begin at multiples of 4 bytes.
        """
        fields = self._fields(rows.shape[-1])
        parts = rows.unflatten(-1, (-1, sum(fields))).split(fields, dim=-1)
        return torch.cat([part.flatten(-2) for part in reversed(parts)], dim=-1)

    def in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `by_fields` was given."""
        blocks = rows.shape[-1] // sum(self._fields(rows.shape[-1]))
        parts = rows.split(self.field_bytes(rows.shape[-1]), dim=-1)
        return _joined(*(part.unflatten(-1, (blocks, -1)) for part in reversed(parts)))

    def field_bytes(self, row_bytes: int) -> list[int]:
        """Return the bytes of each kind of field of a row, in the order of `by_fields`."""
        fields = self._fields(row_bytes)
        return [row_bytes // sum(fields) * size for size in reversed(fields)]

    def _fields(self, row_bytes: int) -> tuple[int, ...]:
        """Return bytes of the fields of a block; Q8_KV has one for the whole row."""
        return (*self.fields, row_bytes - 8) if self.name == "Q8_KV" else self.fields


def _extreme(x: torch.Tensor) -> torch.Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return torch.where(high > -low, high, low)


def _over(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return x divided by a number. For a plain number, torch on a GPU multiplies with the
    reciprocal instead, which now and then gives another scale than on a CPU.
    """
    return x / torch.full_like(x, divisor)


def _half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale as stored, float16[..., 1], and the factor that replaces a division by it (0
    for a scale of 0).
    """
    stored = x.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    exact = stored.float()
    return stored, torch.where(exact == 0, 0.0, 1.0 / exact)


def _codes(x: torch.Tensor, inverse: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (x * inverse).round_().clamp_(low, high).to(torch.int16)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():  # its strides can be 0
        return x.new_empty(*x.shape[:-1], x.shape[-1] * x.element_size(), dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, BLOCK))


def _joined(*fields: torch.Tensor) -> torch.Tensor:
    """Join the fields of each block, uint8[..., blocks, bytes], one after the other."""
    return torch.cat(fields, dim=-1).flatten(-2)


def _nibbles(q: torch.Tensor) -> torch.Tensor:
    """Low nibbles of codes [..., 32]: byte j holds elements j and j + 16."""
    q = q & 15
    return (q[..., :16] | q[..., 16:] << 4).to(torch.uint8)


def _from_nibbles(b: torch.Tensor) -> torch.Tensor:
    return torch.cat([b & 15, b >> 4], dim=-1)


def _fifth_bits(q: torch.Tensor) -> torch.Tensor:
    """Bit 4 of codes [..., 32]: bit i of 32 belongs to element i."""
    shifts = torch.arange(8, device=q.device)
    return ((q >> 4 & 1).unflatten(-1, (4, 8)) << shifts).sum(-1).to(torch.uint8)


def _from_fifth_bits(b: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, device=b.device, dtype=torch.uint8)
    return (b[..., None] >> shifts & 1).flatten(-2) << 4


def _high_pairs(q: torch.Tensor) -> torch.Tensor:
    """Bits 4 and 5 of codes [..., 32] of Q6_0: element i in byte i % 8 at bit 4 * (i % 16 // 8) + 2
    * (i // 16).
    """
    pairs = (q >> 4 & 3).unflatten(-1, (2, 2, 8))
    return (
        pairs[..., 0, 0, :]
        | pairs[..., 1, 0, :] << 2
        | pairs[..., 0, 1, :] << 4
        | pairs[..., 1, 1, :] << 6
    ).to(torch.uint8)


def _from_high_pairs(b: torch.Tensor) -> torch.Tensor:
    return torch.cat([b & 3, b >> 4 & 3, b >> 2 & 3, b >> 6 & 3], dim=-1) << 4


def _symmetric(bits: int, pack: Callable | None, unpack: Callable | None):
    """Codes 0 .. 2^bits - 1 around 2^(bits-1): d f16, then `pack`'s bytes of the high bits, then
    nibbles.
    """
    middle = 1 << bits - 1

    def encode(x: torch.Tensor) -> torch.Tensor:
        x = _blocks(x)
        d, inverse = _half(_over(_extreme(x), -middle))
        q = _codes(x, inverse, -middle, middle - 1) + middle
        return _joined(_bytes(d), *([pack(q)] if pack else []), _nibbles(q))

    def decode(data: torch.Tensor) -> torch.Tensor:
        block = data.unflatten(-1, (-1, 2 + 4 * bits))
        q = _from_nibbles(block[..., -16:])
        if unpack:
            q = q | unpack(block[..., 2:-16])
        return (
            _bytes(block[..., :2]).view(torch.float16).float() * (q.to(torch.int16) - middle)
        ).flatten(-2)

    return encode, decode


def _with_minimum(bits: int, pack: Callable | None, unpack: Callable | None):
    """Codes 0 .. 2^bits - 1 above a minimum: d f16, m f16, high bits, nibbles."""
    top = (1 << bits) - 1

    def encode(x: torch.Tensor) -> torch.Tensor:
        x = _blocks(x)
        low = x.amin(-1, keepdim=True)
        m, _ = _half(low)
        d, inverse = _half(_over(x.amax(-1, keepdim=True) - low, top))
        q = _codes(x - m.float(), inverse, 0, top)
        return _joined(_bytes(d), _bytes(m), *([pack(q)] if pack else []), _nibbles(q))

    def decode(data: torch.Tensor) -> torch.Tensor:
        block = data.unflatten(-1, (-1, 4 + 4 * bits))
        q = _from_nibbles(block[..., -16:])
        if unpack:
            q = q | unpack(block[..., 4:-16])
        scales = _bytes(block[..., :4]).view(torch.float16).float()
        return (scales[..., :1] * q + scales[..., 1:]).flatten(-2)

    return encode, decode


def _encode_q8_0(x: torch.Tensor) -> torch.Tensor:
    x = _blocks(x)
    d, inverse = _half(_over(x.abs().amax(-1, keepdim=True), 127))
    return _joined(_bytes(d), _bytes(_codes(x, inverse, -127, 127).to(torch.int8)))


def _decode_q8_0(data: torch.Tensor) -> torch.Tensor:
    block = data.unflatten(-1, (-1, 34))
    return (
        _bytes(block[..., :2]).view(torch.float16).float() * _bytes(block[..., 2:]).view(torch.int8)
    ).flatten(-2)


def _encode_iq4_nl(x: torch.Tensor) -> torch.Tensor:
    x = _blocks(x)
    d, inverse = _half(_over(_extreme(x), -127))
    table = torch.from_numpy(IQ4NL_VALUES).to(x.device)
    # A value half way takes the lower one.
    q = torch.bucketize(x * inverse, (table[1:] + table[:-1]) / 2).to(torch.int16)
    return _joined(_bytes(d), _nibbles(q))


def _decode_iq4_nl(data: torch.Tensor) -> torch.Tensor:
    block = data.unflatten(-1, (-1, 18))
    values = torch.from_numpy(IQ4NL_VALUES).to(data.device)[_from_nibbles(block[..., 2:]).long()]
    return (_bytes(block[..., :2]).view(torch.float16).float() * values).flatten(-2)


def _encode_q8_kv(x: torch.Tensor) -> torch.Tensor:
    most = x.abs().amax(-1, keepdim=True)
    d = _over(most, 127)
    q = _codes(x, torch.where(d == 0, 0.0, 1.0 / d), -127, 127)
    return torch.cat(
        [_bytes(d), _bytes(q.sum(-1, keepdim=True).to(torch.int32)), _bytes(q.to(torch.int8))],
        dim=-1,
    )


def _decode_q8_kv(data: torch.Tensor) -> torch.Tensor:
    return _bytes(data[..., :4]).view(torch.float32) * _bytes(data[..., 8:]).view(torch.int8)


_FIVE, _SIX, _FOUR = (_fifth_bits, _from_fifth_bits), (_high_pairs, _from_high_pairs), (None, None)

CACHE_TYPES = {
    type.name.lower(): type
    for type in [
        CacheType("F32", torch.float32),
        CacheType("F16", torch.float16),
        CacheType("BF16", torch.bfloat16),
        CacheType("Q8_0", torch.uint8, _encode_q8_0, _decode_q8_0, (2, 32)),
        CacheType("Q6_0", torch.uint8, *_symmetric(6, *_SIX), (2, 8, 16)),
        CacheType("Q5_1", torch.uint8, *_with_minimum(5, *_FIVE), (4, 4, 16)),
        CacheType("Q5_0", torch.uint8, *_symmetric(5, *_FIVE), (2, 4, 16)),
        CacheType("Q4_1", torch.uint8, *_with_minimum(4, *_FOUR), (4, 16)),
        CacheType("Q4_0", torch.uint8, *_symmetric(4, *_FOUR), (2, 16)),
        CacheType("IQ4_NL", torch.uint8, _encode_iq4_nl, _decode_iq4_nl, (2, 16)),
        CacheType("Q8_KV", torch.uint8, _encode_q8_kv, _decode_q8_kv, (8,)),
    ]
}
