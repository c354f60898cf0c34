"""Parameters of layers by name.

`Weights` gives parameters by name and records them: what a layer declares (role for quantization,
split among ranks) can be read from the loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...errors import MalformedFileError, NonFiniteError
from ...formats.source import Source, TensorInfo
from .encoded import DecodeCache
from .linear import Embedding, Linear
from .named_tensors import NamedTensors
from .placement import CPU, Placement
from .stacked_linear import ExpertLinear, HeadLinear
from .store import TensorStore
from .switches import Switches
from .taps import Taps

if TYPE_CHECKING:
    from ..parallel.share import Share


class Weights(NamedTensors):
    """The tensors of `source`, as parameters of layers. `taps` look at every matrix product.

    Layers ask for whole tensors by name and size. With a `share` they get the part of one
    tensor-parallel rank, None for optional tensors that other ranks have, and only that is read.
    `placement` chooses the device of every tensor.
    """

    def __init__(
        self,
        source: Source,
        placement: Placement,
        cache: DecodeCache,
        switches: Switches = Switches(),
        share: Share | None = None,
    ):
        super().__init__(source, share)
        self.placement, self.switches = placement, switches
        self.store = TensorStore(self.source, placement, cache)
        self.taps = Taps()
        self.parameters: list[
            Linear | ExpertLinear | HeadLinear | Embedding
        ] = []  # a tied embedding is in it twice: as table and as output

    def optional_vector(self, name: str, n: int, *, masks: bool = False) -> torch.Tensor | None:
        """Return what `vector` returns; None if there is no such tensor on this rank."""
        return self.vector(name, n, masks=masks) if name in self._tensors else None

    def vector(self, name: str, n: int, *, masks: bool = False) -> torch.Tensor:
        """Return float32[n], or this rank's elements of it, on the device of its layer.
        NonFiniteError for infinity or NaN; with `masks`, -infinity leaves an element out and is no
        error.
        """
        return self._values(self._tensor(name, (n,)), masks)

    def values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return float32 of this shape, decoded, on the device of its layer: for small tensors
        that are no matrices of products. NonFiniteError for infinity or NaN.
        """
        return self._values(self._tensor(name, shape))

    def _values(self, tensor: TensorInfo, masks: bool = False) -> torch.Tensor:
        rows = self.store.decode(tensor, self.source.read_rows(tensor, 0, tensor.n_rows))
        usable = rows.isfinite() | (rows == float("-inf")) if masks else rows.isfinite()
        if not usable.all():
            raise NonFiniteError(
                "has values that are infinite or not a number",
                file=self.source.path,
                tensor=tensor.name,
            )
        return rows.reshape(tensor.shape).to(self.placement.home(tensor.name))

    def optional_values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return what `values` returns; None if there is no such tensor on this rank."""
        return self.values(name, shape) if name in self._tensors else None

    def numbers(self, name: str, shape: tuple[int, int], below: int) -> torch.Tensor:
        """Return int64 of this shape, stored as I32, on the device of its layer.
        MalformedFileError for a number that is not from 0 to below `below`.
        """
        tensor = self._tensor(name, shape, "I32")
        rows = np.ascontiguousarray(self.source.read_rows(tensor, 0, tensor.n_rows))
        found = torch.from_numpy(rows.view("<i4").astype(np.int64)).reshape(tensor.shape)
        wrong = found[(found < 0) | (found >= below)]
        if len(wrong):
            raise MalformedFileError(
                f"has the number {int(wrong[0])}, expected 0 to {below - 1}",
                file=self.source.path,
                tensor=name,
            )
        return found.to(self.placement.home(name))

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Show x to observers as the input of a tensor that no layer multiplies."""
        for observe in self.taps.observers:
            observe(name, x, None)

    def linear(
        self,
        name: str,
        n_in: int,
        n_out: int,
        *,
        role: str,
        split: str,
        scaled: bool = True,
        factor: float = 1.0,
    ) -> Linear:
        """`<name>.weight` with shape [n_out, n_in], and `<name>.bias` and `<name>.scale` (one
        number) where the file has them. scaled: a tensor of that name is such a scale. factor:
        multiplies products as the scale does.
        """
        scale = self.optional_vector(f"{name}.scale", 1) if scaled else None
        if factor != 1:
            home = self.placement.home(f"{name}.weight")
            scale = (torch.ones(1, device=home) if scale is None else scale) * factor
        matrix = self.store.matrices([self._tensor(f"{name}.weight", (n_out, n_in))], 1)[0]
        return self._record(
            Linear(
                f"{name}.weight",
                matrix,
                self.optional_vector(f"{name}.bias", n_out),
                self.taps,
                role=role,
                split=split,
                scale=scale,
            )
        )

    def experts(
        self, name: str, n_experts: int, n_in: int, n_out: int, *, role: str, split: str
    ) -> ExpertLinear:
        """`<name>_exps.weight` with shape [n_experts, n_out, n_in], or the `<name>.<expert>.weight`
        of very old files; `<name>_exps.bias` [n_experts, n_out] and `<name>_exps.scale` [n_experts]
        where the file has them.
        """
        stacked = f"{name}_exps.weight"
        if self.has(stacked) or not self.has(f"{name}.0.weight"):
            tensors = [self._tensor(stacked, (n_experts, n_out, n_in))]
            matrices = self.store.matrices(tensors, tensors[0].n_matrices)
        else:
            names = [f"{name}.{expert}.weight" for expert in range(n_experts)]
            tensors = [
                self._tensor(part, (n_out, n_in))
                for part in names
                if part in self._tensors or not self.has(part)
            ]
            if len({(self.placement.of(tensor.name), tensor.type) for tensor in tensors}) == 1:
                matrices = self.store.matrices(tensors, len(tensors))
            else:
                matrices = [self.store.matrices([tensor], 1)[0] for tensor in tensors]
        return self._record(
            ExpertLinear(
                stacked,
                matrices,
                self.taps,
                role=role,
                split=split,
                tensors=tuple(tensor.name for tensor in tensors),
                bias=self.optional_values(f"{name}_exps.bias", (n_experts, n_out)),
                scale=self.optional_vector(f"{name}_exps.scale", n_experts),
            )
        )

    def heads(
        self,
        name: str,
        n_heads: int,
        n_in: int,
        n_out: int,
        *,
        role: str,
        split: str,
        together: bool = False,
    ) -> HeadLinear:
        """`<name>.weight` with shape [n_heads, n_out, n_in], one matrix per head; the shape
        [n_heads * n_out, n_in] is the same. together: see `HeadLinear`.
        """
        stored = self._named(f"{name}.weight")
        folded = stored.shape == (n_heads * n_out, n_in)
        tensor = self._tensor(f"{name}.weight", stored.shape if folded else (n_heads, n_out, n_in))
        if folded:
            local = tensor.shape[0] // n_out
            tensor = TensorInfo(tensor.name, (local, n_out, n_in), tensor.type)
        matrices = self.store.matrices([tensor], tensor.n_matrices)
        return self._record(
            HeadLinear(
                f"{name}.weight", matrices, self.taps, role=role, split=split, together=together
            )
        )

    def can_merge(self, *names: str) -> bool:
        """Return whether the expert tensors `<name>_exps.weight` can be merged: stacked, of one
        type, on one device.
        """
        found = [self._tensors.get(f"{name}_exps.weight") for name in names]
        tensors = [tensor for tensor in found if tensor is not None]
        return (
            len(tensors) == len(names)
            and len({(t.type, t.shape) for t in tensors}) == 1
            and len({self.placement.of(t.name) for t in tensors}) == 1
            and len({self.has(f"{name}_exps.bias") for name in names}) == 1
            and not any(self.has(f"{name}_exps.scale") for name in names)
        )

    def merged_experts(
        self,
        name: str,
        parts: Sequence[str],
        n_experts: int,
        n_in: int,
        n_out: int,
        *,
        role: str,
        split: str,
    ) -> ExpertLinear:
        """The tensors `<part>_exps.weight`, each [n_experts, n_out, n_in], merged: one matrix per
        expert, with the rows of the parts in order.
        """
        tensors = [self._tensor(f"{part}_exps.weight", (n_experts, n_out, n_in)) for part in parts]
        biases = [self.optional_values(f"{part}_exps.bias", (n_experts, n_out)) for part in parts]
        return self._record(
            ExpertLinear(
                f"{name}_exps.weight",
                self.store.matrices(tensors, tensors[0].n_matrices),
                self.taps,
                role=role,
                split=split,
                tensors=(names := tuple(tensor.name for tensor in tensors)),
                observed=names,
                bias=torch.cat([b for b in biases if b is not None], dim=1)
                if biases[0] is not None
                else None,
            )
        )

    def embedding(self, name: str, n_rows: int, n_cols: int) -> Embedding:
        """Return the embedding `name`, a matrix [n_rows, n_cols]. Raise the error of `_tensor` if
        it is missing or has another shape.
        """
        tensor = self._tensor(f"{name}.weight", (n_rows, n_cols))
        return self._record(
            Embedding(f"{name}.weight", self.store.matrices([tensor], 1)[0], self.taps)
        )

    def bytes_by_device(self) -> dict[torch.device, int]:
        """Return the bytes of all matrices: in the file for the CPU, in memory for GPUs."""
        found: dict[torch.device, int] = {}
        for resident in self.store.resident:
            found[resident.device] = found.get(resident.device, 0) + resident.nbytes
        for tensor in self._tensors.values():
            on_cpu = self.placement.of(tensor.name).type == "cpu"
            if on_cpu and tensor.name in self._asked and self.placement.is_here(tensor.name):
                found[CPU] = found.get(CPU, 0) + tensor.n_bytes
        return found

    def _record(self, parameter):
        self.parameters.append(parameter)
        return parameter
