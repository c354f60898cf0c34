"""What one rank holds of a model: the sizes of its layers, and how its results meet those of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..layers.compressed.specs import CompressedSpec
from ..layers.specs import (
    AttentionSpec,
    DeltaNetSpec,
    KimiDeltaSpec,
    MLASpec,
    OwnHeads,
    ShortConvSpec,
    StateSpaceSpec,
)
from ..weights.split_plan import NOTHING, LayerShare, Range, SplitPlan, length


class Meeting(Protocol):
    """What a rank does together with the others; `group.Group` between processes."""

    rank: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x float32[rows, width] over all ranks, the same bits on each."""
        ...

    def gather(self, x: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """Return [rows, ends[-1]], the columns of all ranks side by side; x [rows, n] are those of
        this rank, and those of rank r end before column ends[r].
        """
        ...

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rank 0, as many as all ranks pass."""
        ...

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        ...

    def await_first(self) -> None:
        """Return when rank 0 has come here, however long that takes."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        ...


class NoMeeting:
    """The meeting of a rank that only describes itself."""

    rank = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no ranks are running")

    def gather(self, x: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        raise RuntimeError("no ranks are running")

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no ranks are running")

    def from_first(self, value: Any) -> Any:
        raise RuntimeError("no ranks are running")

    def await_first(self) -> None:
        raise RuntimeError("no ranks are running")

    def exchange(self, value: Any) -> list[Any]:
        raise RuntimeError("no ranks are running")


class Peers(Protocol):
    """Ranks that each have the whole model and evaluate other windows of a text; `group.Group`
    between processes. This one is `rank` of `size`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        ...

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        ...


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `plan`, which meets the others in `meeting`.

    Methods take the description of a whole layer and return that of the rank's part; None if the
    rank has no part of it.
    """

    plan: SplitPlan
    rank: int
    meeting: Meeting

    def layer(self, layer: int) -> LayerShare:
        """Return what this rank computes of a layer."""
        return self.plan.layers[layer][self.rank]

    def attention(self, layer: int, spec: AttentionSpec) -> AttentionSpec | None:
        part = self.layer(layer)
        if not part.n_heads:
            return None
        own = None
        if spec.joined_norms:
            queries = tuple(range(*part.heads))
            own = OwnHeads(spec.heads, spec.kv_heads, queries, part.kv_heads)
        return replace(spec, heads=part.n_heads, kv_heads=part.n_kv_heads, own=own)

    def latent(self, layer: int, spec: MLASpec) -> MLASpec | None:
        n = self.layer(layer).n_heads
        return replace(spec, heads=n) if n else None

    def compressed(self, layer: int, spec: CompressedSpec) -> CompressedSpec | None:
        """A rank has whole groups of heads."""
        n = self.layer(layer).n_heads
        groups = n // (spec.heads // spec.groups)
        return replace(spec, heads=n, groups=groups) if n else None

    def delta_net(self, layer: int, spec: DeltaNetSpec) -> DeltaNetSpec | None:
        """The value heads of a key head are on its rank: side by side in files that are not
        `tiled`, else in as many ranges as a key head has value heads.
        """
        n = length(self.layer(layer).key_heads)
        value_heads = spec.value_heads // spec.key_heads * n
        return replace(spec, key_heads=n, value_heads=value_heads) if n else None

    def kimi_delta(self, layer: int, spec: KimiDeltaSpec) -> KimiDeltaSpec | None:
        n = length(self.layer(layer).key_heads)
        return replace(spec, heads=n) if n else None

    def state_space(self, layer: int, spec: StateSpaceSpec) -> StateSpaceSpec | None:
        n = length(self.layer(layer).key_heads)
        return replace(spec, groups=n, heads=spec.heads // spec.groups * n) if n else None

    def has_recurrence(self, layer: int) -> bool:
        """Return whether this rank has the recurrence of a layer that is not divided."""
        return self.layer(layer).key_heads != NOTHING

    def short_conv(self, layer: int, spec: ShortConvSpec) -> ShortConvSpec | None:
        n = length(self.layer(layer).channels)
        return replace(spec, channels=n) if n else None

    def has_ffn(self, layer: int, shared: bool = False) -> bool:
        """Return whether this rank has hidden columns of the dense feed-forward layer, or of the
        shared expert.
        """
        part = self.layer(layer)
        return (part.shared_ffn if shared else part.ffn) != NOTHING

    def owned(self, layer: int) -> Range | None:
        """Return the experts that are on this rank as a whole; None if it has a part of each."""
        part = self.layer(layer)
        return part.experts if part.expert_mode == "whole" else None

    def gather_each(self, n: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what joins n numbers of each rank: float32[rows, n] to [rows, n * ranks]."""
        ends = range(n, n * (self.plan.n_ranks + 1), n)
        return lambda x: self.meeting.gather(x, ends)

    def join(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks for float32[rows, n] of this rank."""
        return self.meeting.gather(logits, self.ends) if self.ends else logits

    @property
    def ends(self) -> tuple[int, ...]:
        """The end of each rank's rows of the output matrix, for `Meeting.gather`."""
        return tuple(stop for _, stop in self.plan.vocabulary)
