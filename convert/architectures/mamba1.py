"""Layers of the first Mamba: their sizes, the rows of a family's table, and the keys."""

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
_RANKS = 16  # elements of the width for each of the low-rank steps, where config.json does not say


@dataclass(frozen=True)
class Mamba1:
    """Sizes of selective state spaces, and the stored name of one, such as `model.layers.{}.mixer`.

    rank: of the steps. convolution: inputs that it sees.
    """

    stem: str
    inner: int
    state: int
    rank: int
    convolution: int

    @classmethod
    def read(cls, stem: str, config: Config, name: str, inner: int, prefix: str = "") -> Mamba1:
        """Read the sizes of layers with `inner` channels. prefix: of the keys, which are others
        without one. Raise ConfigError for another number of channels than GGUF's `name` implies.
        """
        state, taps, rank = (
            ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank")
            if prefix
            else ("state_size", "conv_kernel", "time_step_rank")
        )
        d = config.integer("hidden_size")
        if inner != 2 * d:
            raise ConfigError(
                f"layers have {inner} channels; GGUF's {name} implies twice hidden_size {d}",
                file=config.file,
            )
        automatic = config.values.get(rank, "auto") == "auto"
        n = -(-d // _RANKS) if automatic else config.integer(rank)
        return cls(stem, inner, config.integer(state), n, config.integer(taps))

    def weights(self, d: int, in_layers: OfLayer) -> list[Weight]:
        """Return the rows of the table, for a width of d. in_layers: makes a shape that of the
        layers that have one.
        """
        at, n, state = self.stem, self.inner, self.state
        return [
            Weight(f"{at}.in_proj", "blk.{}.ssm_in", in_layers((2 * n, d))),
            Weight(
                f"{at}.conv1d",
                "blk.{}.ssm_conv1d",
                in_layers((n, 1, self.convolution)),
                bias=True,
            ),
            Weight(f"{at}.x_proj", "blk.{}.ssm_x", in_layers((self.rank + 2 * state, n))),
            Weight(f"{at}.dt_proj", "blk.{}.ssm_dt", in_layers((n, self.rank)), bias=True),
            Weight(f"{at}.A_log", "blk.{}.ssm_a", in_layers((n, state)), exact=True),
            Weight(f"{at}.D", "blk.{}.ssm_d", in_layers((n,)), exact=True),
            Weight(f"{at}.out_proj", "blk.{}.ssm_out", in_layers((d, n))),
        ]

    def shaped(
        self,
        checkpoint: Checkpoint,
        tensor: StoredTensor,
        weight: Weight,
        suffix: str,
        made: ConvertedTensor,
    ) -> ConvertedTensor:
        """Return the output tensor `made` of a row of this table as GGUF has it: the convolution
        without a dimension of 1, and -exp of what is stored for A.
        """
        info = made.info
        if weight.stored == f"{self.stem}.conv1d" and suffix == "weight":
            shape = (self.inner, self.convolution)
            return ConvertedTensor(TensorInfo(info.name, shape, info.type), made.rows)
        if weight.stored != f"{self.stem}.A_log":
            return made
        rows = StoredRows(checkpoint, tensor)
        # In double precision, so that the last bit is that of the exact value.
        computed = ComputedRows(rows, info.type, self.state, lambda x: -np.exp(x.astype(float)))
        return ConvertedTensor(info.with_type(TYPES["F32"]), computed)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the keys of the sizes, without the architecture's name."""
        return {
            "ssm.conv_kernel": u32(self.convolution),
            "ssm.inner_size": u32(self.inner),
            "ssm.state_size": u32(self.state),
            "ssm.time_step_rank": u32(self.rank),
        }
