"""State-space layers of Mamba-2: their sizes, the rows of a family's table, and the keys.

The matrix of inputs gives z, x, B, C and the steps of heads, in this order in both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import ComputedRows
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .weight import ConvertedTensor, Shape, Weight

OfLayer = Callable[[Shape], Callable[[int], Shape | None]]


@dataclass(frozen=True)
class Mamba2:
    """Sizes of state-space layers, and the stored name of one, such as `model.layers.{}.mixer`.

    convolution: inputs that it sees. bias: whether it has one. normed: whether results are normed.
    """

    stem: str
    heads: int
    head_size: int
    state: int
    groups: int
    convolution: int
    bias: bool
    normed: bool = True

    @property
    def inner(self) -> int:
        """Elements of the values of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def check(self, config: Config) -> None:
        """Raise ConfigError if heads are no multiple of groups, or if steps have limits, which
        GGUF cannot express.
        """
        if self.heads % self.groups:
            raise ConfigError(
                f"{self.heads} heads of Mamba layers are not a multiple of {self.groups} groups",
                file=config.file,
            )
        for key in ("time_step_limit", "mamba_dt_limit"):
            limits = [_number(value) for value in config.values.get(key) or ()]
            if limits and limits != [0.0, float("inf")]:
                raise ConfigError(
                    f"key '{key}' is {limits}; GGUF's form of Mamba layers has no limits of steps",
                    file=config.file,
                )

    def weights(self, d: int, in_layers: OfLayer) -> list[Weight]:
        """Return the rows of the table, for a width of d. in_layers: makes a shape that of the
        layers that have one.
        """
        at, heads = self.stem, in_layers((self.heads,))
        return [
            Weight(
                f"{at}.in_proj",
                "blk.{}.ssm_in",
                in_layers((self.inner + self.channels + self.heads, d)),
            ),
            Weight(
                f"{at}.conv1d",
                "blk.{}.ssm_conv1d",
                in_layers((self.channels, 1, self.convolution)),
                bias=self.bias,
            ),
            Weight(f"{at}.dt_bias", "blk.{}.ssm_dt.bias", heads, exact=True),
            Weight(f"{at}.A_log", "blk.{}.ssm_a", heads, exact=True),
            Weight(f"{at}.D", "blk.{}.ssm_d", heads, exact=True),
            Weight(f"{at}.out_proj", "blk.{}.ssm_out", in_layers((d, self.inner))),
            *(
                [Weight(f"{at}.norm", "blk.{}.ssm_norm", in_layers((self.inner,)))]
                if self.normed
                else []
            ),
        ]

    def shaped(
        self, checkpoint: Checkpoint, tensor: StoredTensor, weight: Weight, made: ConvertedTensor
    ) -> ConvertedTensor:
        """Return the output tensor `made` of a row of this table in the shape that GGUF has: a
        convolution without a dimension of 1, a norm by groups, and a column of heads.
        """
        part, info = weight.stored.removeprefix(f"{self.stem}."), made.info
        if part == "conv1d" and len(info.shape) == 3:
            shape = (self.channels, self.convolution)
            return ConvertedTensor(TensorInfo(info.name, shape, info.type), made.rows)
        if part not in ("norm", "A_log", "D"):
            return made
        n_rows, n = (self.groups, self.inner) if part == "norm" else (self.heads, self.heads)
        rows = StoredRows(checkpoint, tensor, n_rows)
        info = TensorInfo(info.name, (n_rows, n // n_rows), info.type)
        if part == "A_log":  # in double precision, so that the last bit is that of the exact value
            computed = ComputedRows(rows, info.type, 1, lambda x: -np.exp(x.astype(np.float64)))
            return ConvertedTensor(info.with_type(TYPES["F32"]), computed)
        return ConvertedTensor(info, rows)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the keys of the sizes, without the architecture's name."""
        return {
            "ssm.conv_kernel": u32(self.convolution),
            "ssm.state_size": u32(self.state),
            "ssm.group_count": u32(self.groups),
            "ssm.inner_size": u32(self.inner),
            "ssm.time_step_rank": u32(self.heads),
        }


def _number(value: object) -> float:
    """Return a limit, which JSON files that know no infinity write as a string or an object."""
    if isinstance(value, dict):
        value = value.get("__float__")
    try:
        return float(value)  # pyright: ignore[reportArgumentType]  what is no number is caught
    except (TypeError, ValueError):
        return float("nan")
