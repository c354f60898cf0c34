"""LoRA adapters merged into a model while it is read: W + scale * B A for every weight that has a
pair.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import (
    ArchitectureError,
    MalformedFileError,
    NonFiniteError,
    ShapeError,
    UnsupportedTypeError,
    UsageError,
    printable,
)
from ..codecs import codec
from ..gguf.reader import open_gguf
from ..source import Source, TensorInfo, WrappedSource
from ..tensor_names import TOKEN_EMBEDDING, TensorName
from ..types import TYPES, GGMLType
from ..values import get

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter in GGUF, and by what its changes are multiplied."""

    path: str
    scale: float = 1.0


@dataclass
class _Adapter:
    """An open adapter. pairs: tensor of the model to (lora_a, lora_b). norms: whole vectors that
    take the place of the model's. strength: alpha / rank is not in it yet.
    """

    source: Source
    strength: float
    alpha: float
    pairs: dict[str, tuple[TensorInfo, TensorInfo]] = field(default_factory=dict)
    norms: dict[str, TensorInfo] = field(default_factory=dict)


def parse_adapter(text: str) -> list[AdapterFile]:
    """Return the adapters of FILE, FILE:SCALE, or several with commas between. Raise UsageError for
    a scale that is no number.
    """
    if os.path.exists(text):
        return [AdapterFile(text)]
    found = []
    for part in text.split(","):
        path, colon, scale = part.rpartition(":")
        try:
            found.append(AdapterFile(path, float(scale)) if colon and path else AdapterFile(part))
        except ValueError:
            found.append(AdapterFile(part))
        if not np.isfinite(found[-1].scale):
            raise UsageError(f"the scale of adapter '{printable(part, 200)}' is not a number")
    return found


class LoraSource(WrappedSource):
    """`inner` with adapters merged in. The weights that they change are stored as `type`, F32, F16
    or BF16, or if it is None as they are in `inner` where that is one of these, else as F16. All
    others are read as they are.

    ArchitectureError for an adapter of another architecture, MalformedFileError and ShapeError for
    one that does not fit the model.
    """

    def __init__(
        self, inner: Source, adapters: Sequence[AdapterFile], type: GGMLType | None = None
    ):
        super().__init__(inner)
        self._stored = {tensor.name: tensor for tensor in inner.tensors}
        self._adapters: list[_Adapter] = []
        try:
            for adapter in adapters:
                self._adapters.append(self._opened(adapter))
        except BaseException:
            self._close_adapters()
            raise
        self.files = (*inner.files, *(file for one in self._adapters for file in one.source.files))
        self.changed = frozenset(
            name for one in self._adapters for name in (*one.pairs, *one.norms)
        )
        self.tensors = tuple(
            tensor.with_type(_type_of(tensor, type)) if tensor.name in self.changed else tensor
            for tensor in inner.tensors
        )

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor of `inner` under this name."""
        found = self._stored[tensor.name]
        return tensor if tensor.name not in self.changed else found

    @property
    def origin(self) -> Source:
        """This source: the data of `inner` is not what is read."""
        return self

    def locate(self, tensor: TensorInfo) -> TensorInfo:
        return tensor

    def period(self, tensor: TensorInfo) -> int:
        return tensor.n_rows if tensor.name in self.changed else super().period(tensor)

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]; of changed tensors computed in float32."""
        if tensor.name not in self.changed:
            return self.inner.read_rows(self.stored(tensor), start, stop)
        rows = self._decoded(self._stored[tensor.name], start, stop)
        for adapter in self._adapters:
            if tensor.name in adapter.pairs:
                self._add(adapter, self._stored[tensor.name], rows, start, stop)
            elif tensor.name in adapter.norms:
                trained = _read(adapter.source, adapter.norms[tensor.name], start, stop)
                rows += np.float32(adapter.strength) * (trained - rows)
        return codec.encode_float(tensor.type, rows)

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        if tensor.name not in self.changed:
            return super().read_bytes(tensor, start, stop)
        return Source.read_bytes(self, tensor, start, stop)

    def close(self) -> None:
        self._close_adapters()
        super().close()

    def _close_adapters(self) -> None:
        for adapter in self._adapters:
            adapter.source.close()

    def _decoded(self, stored: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return float32 rows of `inner`, a copy; interleaved types are read in whole groups."""
        group = stored.type.group_rows
        first, last = start // group * group, -(-stop // group) * group
        data = self.inner.read_rows(stored, first, last)
        rows = codec.decode(stored.type, data, stored.n_cols, as_weights=True)
        return np.array(rows[start - first : stop - first])

    def _add(
        self, adapter: _Adapter, stored: TensorInfo, rows: np.ndarray, start: int, stop: int
    ) -> None:
        """Add rows start..stop of scale * B A to `rows`."""
        a, b = adapter.pairs[stored.name]
        scale = np.float32(adapter.strength * (adapter.alpha / b.n_cols if adapter.alpha else 1.0))
        if stored.name == TOKEN_EMBEDDING:  # lora_a has a row per token, and lora_b one per column
            low = _read(adapter.source, a, start, stop)
            rows += scale * (low @ _read(adapter.source, b, 0, b.n_rows).T)
            _check_finite(adapter, stored, rows)
            return
        per_matrix, rank = stored.shape[-2], a.shape[-2]
        for matrix in range(start // per_matrix, -(-stop // per_matrix)):
            low, high = max(start, matrix * per_matrix), min(stop, (matrix + 1) * per_matrix)
            columns = _read(adapter.source, a, matrix * rank, (matrix + 1) * rank)
            rows[low - start : high - start] += scale * (
                _read(adapter.source, b, low, high) @ columns
            )
        _check_finite(adapter, stored, rows)

    def _opened(self, file: AdapterFile) -> _Adapter:
        source = open_gguf(file.path)
        try:
            return self._checked(source, file.scale)
        except BaseException:
            source.close()
            raise

    def _checked(self, source: Source, strength: float) -> _Adapter:
        name, metadata = str(source.path), source.metadata
        kinds = [get(metadata, key, str, "", file=name) for key in ("general.type", "adapter.type")]
        if kinds != ["adapter", "lora"]:
            raise MalformedFileError("is not a LoRA adapter", file=name)
        wanted = get(self.inner.metadata, "general.architecture", str, file=str(self.path))
        found = get(metadata, "general.architecture", str, file=name)
        if found != wanted:
            raise ArchitectureError(
                f"is an adapter for {printable(found, 40)}, and the model is"
                f" {printable(wanted, 40)}",
                file=name,
            )
        alpha = float(get(metadata, "adapter.lora.alpha", (float, int), 0.0, file=name))
        if not np.isfinite(alpha):
            raise MalformedFileError("has an adapter.lora.alpha that is not finite", file=name)
        adapter = _Adapter(source, strength, alpha)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        for tensor in source.tensors:
            if tensor.type.name not in codec.decodable_types():
                raise UnsupportedTypeError(
                    f"is {tensor.type}, which is not a type of weights",
                    file=name,
                    tensor=tensor.name,
                )
            base = tensor.name.removesuffix(".lora_a").removesuffix(".lora_b")
            if base not in self._stored:
                raise MalformedFileError(
                    f"belongs to no tensor of {printable(self.path, 400)}",
                    file=name,
                    tensor=tensor.name,
                )
            if base == tensor.name:
                self._check_norm(source, tensor)
                adapter.norms[base] = tensor
            elif tensor.name.endswith(".lora_a"):
                other = tensors.get(f"{base}.lora_b")
                if other is None:
                    raise MalformedFileError("has no lora_b", file=source.path, tensor=tensor.name)
                self._check_pair(source, self._stored[base], tensor, other)
                adapter.pairs[base] = tensor, other
            elif f"{base}.lora_a" not in tensors:
                raise MalformedFileError("has no lora_a", file=source.path, tensor=tensor.name)
        if not adapter.pairs and not adapter.norms:
            raise MalformedFileError("has no tensors", file=name)
        return adapter

    def _check_norm(self, source: Source, tensor: TensorInfo) -> None:
        if not TensorName.parse(tensor.name).is_norm:
            raise MalformedFileError(
                "is neither half of a pair nor a norm", file=source.path, tensor=tensor.name
            )
        if tensor.shape != self._stored[tensor.name].shape:
            raise ShapeError(
                f"has shape {list(tensor.shape)}, the model's"
                f" {list(self._stored[tensor.name].shape)}",
                file=source.path,
                tensor=tensor.name,
            )

    def _check_pair(self, source: Source, base: TensorInfo, a: TensorInfo, b: TensorInfo) -> None:
        if base.type.tail_bytes:
            raise UnsupportedTypeError(
                f"is {base.type}, whose rows cannot be changed one by one",
                file=self.path,
                tensor=base.name,
            )
        *stack, n_rows, n_cols = (1, *base.shape) if len(base.shape) < 2 else base.shape
        if base.name == TOKEN_EMBEDDING:
            n_rows, n_cols = n_cols, n_rows
            a_rank = a.shape[-1]
            fits = a.shape == (n_cols, a_rank)
        else:
            a_rank = a.shape[-2] if len(a.shape) > 1 else 0
            fits = a.shape == (*stack, a_rank, n_cols)
        if not fits or b.shape != (*stack, n_rows, a_rank):
            raise ShapeError(
                f"a pair of {list(a.shape)} and {list(b.shape)} does not fit a weight of"
                f" {list(base.shape)}",
                file=source.path,
                tensor=a.name,
            )


def _check_finite(adapter: _Adapter, weight: TensorInfo, rows: np.ndarray) -> None:
    if not np.isfinite(rows).all():
        raise NonFiniteError(
            "the weight with this adapter is infinite or not a number",
            file=adapter.source.path,
            tensor=weight.name,
        )


def _read(source: Source, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    rows = source.read_rows(tensor, start, stop)
    return codec.decode(tensor.type, rows, tensor.n_cols, as_weights=True)


def _type_of(tensor: TensorInfo, type: GGMLType | None) -> GGMLType:
    if len(tensor.shape) < 2:
        return TYPES["F32"]
    if type is not None:
        return type
    return tensor.type if tensor.type.name in FLOATS else TYPES["F16"]
