"""`quant_method: gptq`: integers of 2, 4 or 8 bits packed along the input and stored with inputs as
rows; scales and zeros per group.

weight[o, i] = (q[i, o] - (zero[g(i), o] + 1)) * scale[g(i), o] with `qweight` int32[inputs * bits /
32, outputs], `qzeros` int32[groups, outputs * bits / 32], lowest bits first in both, `scales`
[groups, outputs]; g(i) is `g_idx` or i / group_size. In the format `gptq_v2` the stored zeros do
not have 1 subtracted.
"""

from __future__ import annotations

import numpy as np

from ...errors import CheckpointError, ConfigError
from ...formats.types import TYPES
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.decoded import decoded
from ..tensors.stored import StoredTensor
from .scaled import float_values, integers

_BESIDE = ("qzeros", "scales", "g_idx")


def unpack(checkpoint: Checkpoint, section: Config) -> dict[str, StoredTensor]:
    """Return the tensors that the packed ones of a checkpoint decode to, by name; others stay as
    they are. section: `quantization_config`. Raise ConfigError for bits other than 2, 4 and 8,
    CheckpointError for tensors that do not fit.
    """
    tensors, found = checkpoint.tensors, {}
    bits = section.integer("bits")
    if bits not in (2, 4, 8):
        raise ConfigError(
            f"key 'bits' is {bits}; weights of 2, 4 and 8 bits are read", file=section.file
        )
    offset = 0 if section.string("checkpoint_format", default="gptq") == "gptq_v2" else 1
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in _BESIDE and f"{stem}.qweight" in tensors:
            continue
        if last != "qweight":
            found[name] = tensor
            continue
        zeros, scales, order = (tensors.get(f"{stem}.{part}") for part in _BESIDE)
        if zeros is None or scales is None:
            absent = "qzeros" if zeros is None else "scales"
            raise CheckpointError(f"is packed without {absent}", file=tensor.file, tensor=name)
        rows = GPTQRows(checkpoint, tensor, zeros, scales, order, bits, offset)
        found[f"{stem}.weight"] = decoded(
            tensor, f"{stem}.weight", (rows.n_rows, rows.n_cols), TYPES["F32"], rows
        )
    return found


class GPTQRows:
    """Rows of float32[outputs, inputs]. Only the stored columns of the requested rows are
    unpacked.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight: StoredTensor,
        zeros: StoredTensor,
        scales: StoredTensor,
        order: StoredTensor | None,
        bits: int,
        offset: int,
    ):
        self._checkpoint, self._weight, self._zeros, self._scales, self._order = (
            checkpoint,
            weight,
            zeros,
            scales,
            order,
        )
        self._bits, self._offset, self._per_word = bits, offset, 32 // bits
        if weight.dtype != "I32" or len(weight.shape) != 2 or weight.n_elements == 0:
            raise CheckpointError(
                f"is {weight.dtype} of shape {list(weight.shape)}, expected a matrix of I32",
                file=weight.file,
                tensor=weight.name,
            )
        self.n_rows, self.n_cols = weight.shape[1], weight.shape[0] * self._per_word
        self.row_bytes = 4 * self.n_cols
        self._n_groups = scales.shape[0] if len(scales.shape) == 2 else 0
        zeros_shape = (self._n_groups, -(-self.n_rows // self._per_word))
        if (
            self._n_groups < 1
            or scales.shape[1] != self.n_rows
            or (order is None and self.n_cols % self._n_groups)
        ):
            raise self._unfit(scales, f"[groups, {self.n_rows}], groups dividing {self.n_cols}")
        if zeros.dtype != "I32" or zeros.shape != zeros_shape:
            raise self._unfit(zeros, f"I32 of shape {list(zeros_shape)}")
        if order is not None and order.shape != (self.n_cols,):
            raise self._unfit(order, f"[{self.n_cols}]")
        self._kept: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def _unfit(self, tensor: StoredTensor, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"is {tensor.dtype} of shape {list(tensor.shape)}, expected {wanted}",
            file=tensor.file,
            tensor=tensor.name,
        )

    def read(self, start: int, stop: int) -> np.ndarray:
        words = self._words(start, stop)
        values, mask = (
            np.empty((self.n_cols, stop - start), np.float32),
            np.uint32((1 << self._bits) - 1),
        )
        for place in range(self._per_word):
            values[place :: self._per_word] = words >> np.uint32(place * self._bits) & mask
        kept = self._kept  # another thread may release it meanwhile
        if kept is None:
            kept = self._kept = self._beside()
        zeros, scales, groups = kept
        values -= zeros[:, start:stop][groups]
        values *= scales[:, start:stop][groups]
        return np.ascontiguousarray(values.T).view(np.uint8)

    def _words(self, start: int, stop: int) -> np.ndarray:
        """Return columns `start` to `stop` of the stored matrix, uint32[lines, stop - start]."""
        n_lines, n_columns = self._weight.shape
        if (start, stop) == (0, n_columns):
            return self._checkpoint.data(self._weight).view("<u4").reshape(n_lines, n_columns)
        words = np.empty((n_lines, stop - start), np.uint32)
        for line in range(n_lines):
            first = 4 * line * n_columns
            read = self._checkpoint.read(self._weight, first + 4 * start, first + 4 * stop)
            words[line] = read.view("<u4")
        return words

    def _beside(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return zeros and scales [groups, outputs] and the group of each input. They are kept
        until `release`.
        """
        words = self._checkpoint.data(self._zeros).view("<u4").reshape(self._zeros.shape)
        output = np.arange(self.n_rows)
        shifts = (output % self._per_word * self._bits).astype(np.uint32)
        zeros = (
            words[:, output // self._per_word] >> shifts & np.uint32((1 << self._bits) - 1)
        ).astype(np.float32) + self._offset
        if self._order is None:
            groups = np.arange(self.n_cols) // (self.n_cols // self._n_groups)
        else:
            groups = integers(self._checkpoint, self._order)
            if groups.min() < 0 or groups.max() >= self._n_groups:
                raise CheckpointError(
                    f"names a group that is not one of {self._n_groups}",
                    file=self._order.file,
                    tensor=self._order.name,
                )
        return zeros, float_values(self._checkpoint, self._scales), groups

    def release(self) -> None:
        self._kept = None
        self._checkpoint.release(self._weight)
