"""Random rows of any ggml type that are valid and whose decoded values have a given root mean
square.

Codes, indices and small scales are random bytes. The floating-point scales of a block (or of its
row) are at the places in `_SCALES`; they are chosen for the wanted values, as decoding is linear in
them.
"""

from __future__ import annotations

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs import codec
from ...formats.codecs.interleaved import pack_rows
from ...formats.types import GGMLType, ggml_type

# type: fields "place:format*factor" with the format h (f16) or f (f32); "h" before the place: in
# the row header. The factor of a minimum is the mean of the codes that it is taken from (or added
# to), so that values are around zero.
_SCALES = {
    "Q4_0": "0:h",
    "Q4_1": "0:h 2:h*-7.5",
    "Q5_0": "0:h",
    "Q5_1": "0:h 2:h*-15.5",
    "Q6_0": "0:h",
    "Q8_0": "0:h",
    "IQ4_NL": "0:h",
    "Q1_0_G128": "0:h",
    "Q2_0": "0:h",
    "Q2_K": "80:h 82:h*1.5",
    "Q3_K": "108:h",
    "Q4_K": "0:h 2:h*7.5",
    "Q5_K": "0:h 2:h*15.5",
    "Q6_K": "208:h",
    "IQ2_XXS": "0:h",
    "IQ2_XS": "0:h",
    "IQ2_S": "0:h",
    "IQ3_XXS": "0:h",
    "IQ3_S": "0:h",
    "IQ1_S": "0:h",
    "IQ4_XS": "0:h",
    "TQ1_0": "52:h",
    "TQ2_0": "64:h",
    "IQ1_BN": "head 0:h",
    "IQ2_BN": "head 0:f",
    "IQ2_K": "0:h",
    "IQ3_K": "0:h",
    "IQ4_K": "0:h",
    "IQ5_K": "0:h",
    "IQ6_K": "0:h",
    "IQ2_KS": "head 0:h",
    "IQ3_KS": "head 0:h",
    "IQ4_KS": "head 0:f",
    "IQ4_KSS": "head 0:f",
    "IQ5_KS": "head 0:f",
    "IQ2_KL": "head 0:h",
    "IQ1_KT": "head 0:f",
    "IQ2_KT": "head 0:f",
    "IQ3_KT": "head 0:f",
    "IQ4_KT": "head 0:f",
    "Q8_KV": "head 0:f",
    "Q8_K_R8": "0:h",
    "Q8_K_R16": "0:h",
    "IQ1_S_R4": "head 0:h",
    "IQ1_M_R4": "head 0:h",
}
_BYTES_OF = {"h": ("<f2", 2), "f": ("<f4", 4)}
# Bytes of a block in which a pair of bits holds 0, 1 or 2, never 3.
_TERNARY_PAIRS = {"Q2_0": slice(2, 18), "TQ2_0": slice(0, 64), "IQ2_BN": slice(0, 16)}
# Signed codes for which quantizers never write -128.
_SIGNED_BYTES = {"Q8_0": slice(2, 34), "Q8_KV": slice(0, 32), "Q8_K_R8": slice(2, 258)}
_FROM_EXPONENTS = ("MXFP4", "NVFP4", "IQ1_M")
_MEASURED_VALUES = 1 << 18


def supported(type: str | GGMLType) -> bool:
    """Return whether `random_rows` knows the type."""
    plain = ggml_type(ggml_type(type).base or type)
    return (
        plain.name in ("F32", "F16", "BF16")
        or plain.name in _SCALES
        or plain.name in _FROM_EXPONENTS
    )


def random_rows(
    type: str | GGMLType,
    n_rows: int,
    n_cols: int,
    rms: float,
    rng: np.random.Generator,
    *,
    mean: float = 0.0,
) -> np.ndarray:
    """uint8[n_rows, row_bytes] of `type` whose values, as matrix products use them, have about the
    root mean square `rms`.

    Interleaved types take whole row groups. `mean` moves the values of float types.
    UnsupportedTypeError for a type without rows of weights, ShapeError for a row length that it
    cannot have.
    """
    type = ggml_type(type)
    if not supported(type):
        raise UnsupportedTypeError(f"there are no random weights of type {type.name}")
    if type.is_interleaved and type.base:
        plain = random_rows(type.base, n_rows, n_cols, rms, rng, mean=mean)
        return codec.interleave(type, plain, n_cols)
    if type.is_float:
        values = rng.standard_normal((n_rows, n_cols), dtype=np.float32)
        return codec.encode_float(type, values * np.float32(rms) + np.float32(mean))
    rows = rng.integers(0, 256, (n_rows, type.row_bytes(n_cols)), dtype=np.uint8)
    blocks = rows[:, type.header_bytes :].reshape(n_rows, -1, type.block_bytes)
    if (pairs := _TERNARY_PAIRS.get(type.name)) is not None:
        codes = blocks[..., pairs]
        codes &= ~((codes & codes >> 1 & 0x55) << 1)  # 3 becomes 1: the values stay around zero
    if (signed := _SIGNED_BYTES.get(type.name)) is not None:
        codes = blocks[..., signed]
        codes[codes == 128] = 129
    if type.name == "Q8_KV":  # the header holds the sum of the row's codes, too
        rows[:, 4:8] = (
            blocks.view(np.int8)
            .sum((1, 2), dtype=np.int32)
            .astype("<i4")
            .view(np.uint8)
            .reshape(n_rows, 4)
        )
    # Scales differ from block to block, as in a model, but not their magnitude.
    spread = rng.uniform(0.75, 1.25, blocks.shape[:2]).astype(np.float32)
    write = _write_exponents if type.name in _FROM_EXPONENTS else _write_scales
    unit = 2.0**-8
    write(type, rows, blocks, spread * np.float32(unit))
    sample = rows[: max(1, _MEASURED_VALUES // n_cols)]
    sample = sample[: len(sample) // type.group_rows * type.group_rows or type.group_rows]
    write(type, rows, blocks, spread * np.float32(unit * rms / _rms(type, sample, n_cols)))
    return pack_rows(type, rows, n_cols) if type.is_interleaved else rows


def _rms(type: GGMLType, rows: np.ndarray, n_cols: int) -> float:
    stored = pack_rows(type, rows, n_cols) if type.is_interleaved else rows
    values = codec.decode(type, stored, n_cols, as_weights=True).astype(np.float64)
    return float(np.sqrt((values * values).mean()))


def _write_scales(type: GGMLType, rows: np.ndarray, blocks: np.ndarray, d: np.ndarray) -> None:
    """The float fields of all blocks, or those of the row headers; d float32[rows, blocks]."""
    words = _SCALES[type.name].removeprefix("head ").split()
    in_head = _SCALES[type.name].startswith("head ")
    for word in words:
        place, _, rest = word.partition(":")
        kind, _, factor = rest.partition("*")
        dtype, size = _BYTES_OF[kind]
        value = (d[:, :1] if in_head else d) * np.float32(factor or 1)
        stored = value.astype(dtype)[..., None].view(np.uint8)
        at = slice(int(place), int(place) + size)
        if in_head:
            rows[:, at] = stored[:, 0]
        else:
            blocks[..., at] = stored


def _write_exponents(type: GGMLType, rows: np.ndarray, blocks: np.ndarray, d: np.ndarray) -> None:
    """Scales other than f16 or f32 in one place. Those of the four-bit floats have few values: the
    nearest is taken.
    """
    if type.name == "MXFP4":  # 2^(e-128)
        blocks[..., 0] = np.clip(np.rint(np.log2(d)) + 128, 2, 254).astype(np.uint8)
    elif type.name == "NVFP4":  # half of a UE4M3
        table = np.array(
            [
                (m if e == 0 else (8 + m) * 2 ** (e - 1)) * 2.0**-10
                for e in range(16)
                for m in range(8)
            ][:127],
            np.float32,
        )
        nearest = np.abs(np.log(table[1:]) - np.log(d)[..., None]).argmin(-1) + 1
        blocks[..., :4] = nearest[..., None].astype(np.uint8)
    else:  # IQ1_M: a nibble of the f16 in each of four words, whose other bits are scales
        bits = d.astype("<f2").view("<u2")
        words = np.ascontiguousarray(blocks[..., 48:56]).view("<u2")
        for part in range(4):
            words[..., part] = words[..., part] & 0x0FFF | (bits >> (4 * part) & 15) << 12
        blocks[..., 48:56] = words.view(np.uint8)
