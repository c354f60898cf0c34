"""What the pickle in a PyTorch checkpoint describes: storages, and tensors as views into them.

Dtypes are spelled as in safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass

# torch storage class -> dtype
STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
# torch dtypes whose tensors are in untyped storages
DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
UNTYPED = "U8"  # what an untyped storage counts


@dataclass(frozen=True)
class TorchStorage:
    """Bytes in the archive: entry `data/<key>` with `numel` elements of `dtype`."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class TorchView:
    """A tensor: a strided view into a storage; offset and strides count elements of `dtype`."""

    storage: TorchStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
