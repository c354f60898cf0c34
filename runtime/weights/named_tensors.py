"""The tensors of a file by name: their shapes are checked, and unused ones are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import (
    ArchitectureError,
    MalformedFileError,
    UnsupportedTypeError,
    printable,
)
from ...formats.codecs import codec
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import EXTRA_OUTPUT, TensorName
from .shard import ShardSource

if TYPE_CHECKING:
    from ..parallel.share import Share

_NEEDLESS = (EXTRA_OUTPUT,)


class NamedTensors:
    """The tensors of `source` that a layer can ask for by name and size. With a `share`, `source`
    has the parts of one tensor-parallel rank.
    """

    def __init__(self, source: Source, share: Share | None):
        self.source, self.share = source, share
        self._whole = {tensor.name: tensor for tensor in source.tensors}
        if share is not None:
            self.source = ShardSource(source, share.plan, share.rank)
            self._whole = self.source.whole
        self._tensors = {tensor.name: tensor for tensor in self.source.tensors}
        self._asked: set[str] = set()
        self._skipped: set[str] = set()
        self._decodable = set(codec.decodable_types())

    def has(self, name: str) -> bool:
        """Return whether the model has the tensor, on whatever rank."""
        return name in self._whole

    def skip_layers(self, first: int) -> None:
        """Do not use the blocks from `first` on, such as those that predict further tokens."""
        for name in self._tensors:
            if (layer := TensorName.parse(name).layer) is not None and layer >= first:
                self._skipped.add(name)

    def skip(self, prefix: str) -> None:
        """Do not use the tensors whose names begin with `prefix`."""
        self._skipped.update(name for name in self._tensors if name.startswith(prefix))

    def uses(self, name: str) -> bool:
        """Return whether a layer uses the tensor `name`."""
        return name in self._asked

    def n_rows_of(self, name: str) -> int:
        """Return the number of rows of the tensor `name`. MalformedFileError if there is none."""
        return self._named(name).n_rows

    def check_all_used(self) -> None:
        """ArchitectureError if the file has tensors that no layer uses: without them it would be
        another model. Nothing for a rank, which does not use what others compute.
        """
        if self.share is not None:
            return
        unused = [
            name
            for name in self._tensors
            if name not in self._asked
            and name not in self._skipped
            and name not in _NEEDLESS
            and TensorName.parse(name).suffix != "input_scale"  # to quantize activations
        ]
        if unused:
            shown = ", ".join(printable(name, 80) for name in unused[:4])
            what = "1 tensor is" if len(unused) == 1 else f"{len(unused)} tensors are"
            raise ArchitectureError(
                f"{what} not part of the architecture as this version knows it: {shown}"
                + (", ..." if len(unused) > 4 else ""),
                file=self.source.path,
            )

    def _tensor(self, name: str, shape: tuple[int, ...], type: str = "") -> TensorInfo:
        """Return the tensor, of which `shape` is the whole shape, as this rank has it. type: of
        numbers that are not decoded.
        """
        whole = self._named(name)
        # Some writers drop trailing dimensions of 1.
        if _without_ones(whole.shape) != _without_ones(shape):
            raise MalformedFileError(
                f"shape is {list(whole.shape)}, but the metadata asks for {list(shape)}",
                file=self.source.path,
                tensor=name,
            )
        if type and whole.type.name != type:
            raise MalformedFileError(
                f"type is {whole.type}, expected {type}", file=self.source.path, tensor=name
            )
        if not type and whole.type.name not in self._decodable:
            raise UnsupportedTypeError(
                f"type {whole.type} cannot be decoded yet", file=self.source.path, tensor=name
            )
        if (tensor := self._tensors.get(name)) is None:
            raise RuntimeError(f"this rank has no part of tensor '{name}'")
        self._asked.add(name)
        if len(tensor.shape) == len(shape):
            return tensor
        kept = _without_ones(tensor.shape)
        return TensorInfo(tensor.name, (1,) * (len(shape) - len(kept)) + kept, tensor.type)

    def _named(self, name: str) -> TensorInfo:
        """Return the whole tensor."""
        if name not in self._whole:
            raise MalformedFileError("tensor is missing", file=self.source.path, tensor=name)
        return self._whole[name]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
