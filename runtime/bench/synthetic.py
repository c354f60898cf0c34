"""Models of a real shape with random weights, without any file: for measuring speed and for tests.

`SHAPE:TYPE[,layers=N][,NAME=TYPE...]`, as in `llama-8b:IQ4_K` or `qwen3-30b-a3b:IQ2_K,attn_v=Q6_K`:
matrices are of TYPE, except for the token embedding and the output, which are Q6_K (Q8_0 if TYPE is
Q8_0, a float type if TYPE is one), norms, biases, routers (with values of bfloat16, as checkpoints
have them) and convolutions, which are F32, tensors with NAME in their names, and rows that blocks
of TYPE do not divide, which are IQ4_NL (Q8_0 up to 128 elements, F32 if not a multiple of 32).
With MXFP4 only experts are of it, other matrices Q8_0. With `layers=N` the model has only its first
N layers, so that one that is larger than a device can be measured in part, as in
`deepseek-v3:IQ4_K,layers=12`.

One pool of random rows per type and row length serves all tensors, each of which begins at another
row: a 40 GB model takes seconds and some megabytes. On a CPU the pool may stay in the caches, so
that speeds limited by memory are too good there.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from ...errors import NotFoundError, ShapeError, UsageError
from ...formats.codecs import codec
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import EXPERTS_OF_TOKENS, OUTPUT, TOKEN_EMBEDDING, TensorName
from ...formats.types import GGMLType, ggml_type
from .random_blocks import random_rows, supported
from .repeated_rows import RepeatedRows, rows_per_page_run
from .shape import Shape
from .shapes import SHAPES

_POOL_BYTES = 4 << 20
_OWN_TYPES = ("Q8_0", "F32", "F16", "BF16")  # embedding and output are of these, too


class SyntheticSource(Source):
    """A `Source` of random weights. `spec` as above; the same spec and seed give the same bytes."""

    def __init__(self, spec: str, seed: int = 0):
        self.path, self.files, self.seed = f"synthetic:{spec}", (), seed
        self.shape, self.type, self.overrides = _parse(spec)
        self.tensors = tuple(
            TensorInfo(name, shape, self._type_of(name, shape))
            for name, shape in self.shape.tensors()
        )
        if unused := [
            part
            for part in self.overrides
            if not any(part in tensor.name for tensor in self.tensors)
        ]:
            raise UsageError(f"synthetic model {spec}: no tensor has '{unused[0]}' in its name")
        for tensor in self.tensors:
            _check(tensor)
        self.metadata = self.shape.metadata(self.type)
        self._pools: dict[tuple, tuple[int, RepeatedRows]] = {}

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start, row_bytes]: a read-only view. Raise ShapeError for rows that the
        tensor does not have.
        """
        if (
            not 0 <= start <= stop <= tensor.n_rows
            or start % tensor.type.group_rows
            or stop % tensor.type.group_rows
        ):
            raise ShapeError(
                f"rows {start} to {stop} of {tensor.n_rows} {tensor.type} rows in groups of"
                f" {tensor.type.group_rows}",
                file=self.path,
                tensor=tensor.name,
            )
        if tensor.type.is_integer:
            return self._expert_numbers(tensor)[start:stop]
        if tensor.name == "rope_freqs.weight":
            return llama3_factors(self.shape.head, self.shape.rope_base).view(np.uint8)[None][
                start:stop
            ]
        distinct, pool = self._pool(tensor)
        groups = distinct // tensor.type.group_rows
        first = zlib.crc32(tensor.name.encode()) % groups * tensor.type.group_rows
        return pool.view[first + start : first + stop]

    def _expert_numbers(self, tensor: TensorInfo) -> np.ndarray:
        """Return the experts of every token, different ones: neighbours from a random one on."""
        rng = np.random.default_rng((self.seed, zlib.crc32(tensor.name.encode())))
        first = rng.integers(self.shape.n_experts, size=(tensor.n_rows, 1))
        numbers = (first + np.arange(tensor.n_cols)) % self.shape.n_experts
        return numbers.astype("<i4").view(np.uint8)

    def period(self, tensor: TensorInfo) -> int:
        """Row r of the tensor is row r + period. Who loads it need not read the rest."""
        if tensor.type.is_integer or tensor.name == "rope_freqs.weight":
            return tensor.n_rows
        return self._pool(tensor)[0]

    @property
    def pool_bytes(self) -> int:
        """Bytes of memory that the pools take once every tensor has been read."""
        drawn = (tensor for tensor in self.tensors if not tensor.type.is_integer)
        shapes = {self._pool_key(tensor): tensor for tensor in drawn}
        return sum(_distinct_rows(t) * t.row_bytes for t in shapes.values())

    def close(self) -> None:
        """Pools go when the last view of them does."""
        self._pools.clear()

    def _pool(self, tensor: TensorInfo) -> tuple[int, RepeatedRows]:
        key, mean = self._pool_key(tensor), self._mean(tensor)
        if key not in self._pools:
            distinct = _distinct_rows(tensor)
            # Routers have the numbers of other matrices, but for their rounding.
            drawn = key[:3] if key[-1] == "router" else key
            seed = (self.seed, zlib.crc32(repr(drawn).encode()))
            rows = _pool_rows(tensor, distinct, mean, seed)
            most = max(other.n_rows for other in self.tensors if self._pool_key(other) == key)
            self._pools[key] = distinct, RepeatedRows(rows, distinct + most)
        return self._pools[key]

    def _pool_key(self, tensor: TensorInfo) -> tuple:
        mean = self._mean(tensor)
        key = (tensor.type.name, tensor.n_cols, mean != 0)
        if TensorName.parse(tensor.name).is_router:
            return *key, "router"
        return key if mean in (0, 1) else (*key, "negative" if mean < 0 else "small")

    def _mean(self, tensor: TensorInfo) -> float:
        """Return the mean of a tensor's elements. Those of matrices are 0 on average, with a root
        mean square of 1/sqrt(row length), so that products with rows of size 1 are of size 1. Norm
        weights are near 1, but for those of heads whose scores are not scaled: they do it. The
        decay of recurrent layers is exp(ssm_a * a positive number).
        """
        name = TensorName.parse(tensor.name)
        local = name.local
        if len(tensor.shape) > 1 and not name.is_norm and local not in ("ssm_a", "ssm_d"):
            return 0.0
        if self.shape.scaled_by_norms and local in ("attn_q_norm.weight", "attn_k_norm.weight"):
            return tensor.n_cols**-0.25
        return -1.0 if local == "ssm_a" else 1.0

    def _type_of(self, name: str, shape: tuple[int, ...]) -> GGMLType:
        parsed = TensorName.parse(name)
        if parsed.role == EXPERTS_OF_TOKENS:
            return ggml_type("I32")
        for part, type in self.overrides.items():
            if part in name:
                return type
        is_small = parsed.is_norm or parsed.is_sensitive
        if len(shape) == 1 or is_small or parsed.suffix != "weight":
            return ggml_type("F32")
        if name in (TOKEN_EMBEDDING, OUTPUT) and self.type.name not in _OWN_TYPES:
            return _fitting(ggml_type("Q6_K"), shape[-1])
        if self.type.name == "MXFP4" and parsed.expert_layer is None:  # as gpt-oss is released
            return ggml_type("Q8_0")
        return _fitting(self.type, shape[-1])


def _fitting(type: GGMLType, n_cols: int) -> GGMLType:
    """Return the type, or one with shorter blocks for rows that its blocks do not divide."""
    if n_cols % type.block_size == 0:
        return type
    if n_cols % 32:
        return ggml_type("F32")
    return ggml_type("IQ4_NL" if n_cols > 128 else "Q8_0")


def _parse(spec: str) -> tuple[Shape, GGMLType, dict[str, GGMLType]]:
    name, _, rest = spec.partition(":")
    if name not in SHAPES:
        raise NotFoundError(
            f"synthetic model {spec}: there is no shape '{name}'; known are {', '.join(SHAPES)}"
        )
    base, *words = rest.split(",")
    if not base:
        raise UsageError(f"synthetic model {spec}: a type is needed, as in {name}:IQ4_K")
    shape, overrides = SHAPES[name], {}
    for word in words:
        part, equals, value = word.partition("=")
        if not equals or not part:
            raise UsageError(f"synthetic model {spec}: '{word}' is not NAME=TYPE or layers=N")
        if part == "layers":
            shape = _with_layers(shape, value, spec)
        else:
            overrides[part] = ggml_type(value)
    return shape, ggml_type(base), overrides


def _with_layers(shape: Shape, value: str, spec: str) -> Shape:
    """Return the shape with its first layers only. UsageError if it cannot have so many."""
    least = shape.least_layers
    if not (value.isascii() and value.isdigit() and least <= int(value) <= shape.n_layers):
        raise UsageError(
            f"synthetic model {spec}: '{value}' layers, expected {least} to {shape.n_layers}"
        )
    return shape.with_layers(int(value))


def _check(tensor: TensorInfo) -> None:
    if TensorName.parse(tensor.name).role == EXPERTS_OF_TOKENS:
        return
    try:
        tensor.type.tensor_bytes(tensor.shape)
    except ShapeError as error:
        raise ShapeError(str(error), tensor=tensor.name) from None
    if not supported(tensor.type):
        raise UsageError(
            f"tensor '{tensor.name}': there are no random weights of type {tensor.type}"
        )


def _pool_rows(tensor: TensorInfo, n_rows: int, mean: float, seed: tuple[int, int]) -> np.ndarray:
    """Draw the rows of a pool, the same ones for the same arguments. Routers in F32 have values of
    bfloat16, as in files made of most checkpoints.
    """
    type, n_cols = tensor.type, tensor.n_cols
    rms, rng = 0.1 * abs(mean) if mean else 1 / math.sqrt(n_cols), np.random.default_rng(seed)
    if type.name != "F32" or not TensorName.parse(tensor.name).is_router:
        return random_rows(type, n_rows, n_cols, rms, rng, mean=mean)
    halves = random_rows("BF16", n_rows, n_cols, rms, rng, mean=mean)
    return codec.encode_float(type, codec.decode(ggml_type("BF16"), halves, n_cols))


def _distinct_rows(tensor: TensorInfo) -> int:
    """Rows of the pool that serves the tensor."""
    unit = rows_per_page_run(tensor.row_bytes, tensor.type.group_rows)
    return unit * max(1, _POOL_BYTES // (unit * tensor.row_bytes))


def llama3_factors(head: int, base: float) -> np.ndarray:
    """Frequency factors float32[head/2] of Llama 3.1: its context scaling by 8 from 8192, low and
    high frequency factors 1 and 4.
    """
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    wavelength = 2 * math.pi * base ** (np.arange(head // 2) * 2 / head)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
