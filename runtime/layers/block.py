"""Blocks: lists of branches of the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..state.cache import CacheSettings
from ..state.layer_state import LayerState, Storage
from ..state.table import Table
from ..weights.ranges import opened
from . import many_rows
from .absent import AbsentMixer
from .batch import Batch
from .norm import Norm
from .streams import Connection


class Mixer(Protocol):
    """What mixes the tokens of a sequence: attention or another kind of layer.

    window: the most positions that a token sees, itself included; 0 for all.
    """

    @property
    def window(self) -> int:
        """The most positions that a token sees, itself included; 0 for all."""
        ...

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width], rows as `batch` says. What the mixer
        keeps of the sequences from call to call is in `batch.states`.
        """
        ...

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> Storage | None:
        """Return memory for `n_rows` positions of any sequences; None if the mixer keeps nothing
        that belongs to positions.
        """
        ...

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> LayerState | None:
        """Return what the mixer keeps of one sequence, whose positions have the rows of `storage`
        that `table` says; None if it keeps nothing.
        """
        ...

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes."""
        ...

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes that scores, keys and values take while `rows` tokens see `keys`
        positions. precision: that of the `Model`. An upper estimate.
        """
        ...

    def flop(self, n_past: int, n: int) -> float:
        """Return the floating-point operations for n tokens after n_past others that no
        implementation can avoid, without those of products with weight matrices.
        """
        ...

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of state that n tokens read one by one, after n_past others."""
        ...


class FeedForward(Protocol):
    """What works on every row alone.

    experts_used: how many experts each row goes through; 1 without experts. expert_share: the part
    of the expert tensors that a row uses.
    """

    @property
    def experts_used(self) -> int:
        """Experts that each row goes through; 1 without experts."""
        ...

    @property
    def expert_share(self) -> float:
        """The part of the expert tensors that a row uses, 0 to 1."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]."""
        ...


class RowLayer(Protocol):
    """What works on every row alone, and needs to know which token it is. Properties as those of
    `FeedForward`.
    """

    @property
    def experts_used(self) -> int:
        """See `FeedForward`."""
        ...

    @property
    def expert_share(self) -> float:
        """See `FeedForward`."""
        ...

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class AttentionAndFFN:
    """attention(x) + ffn(x): both read the same rows (Wang and Komatsuzaki, 2021). A
    tensor-parallel rank may have no part of one of them.
    """

    def __init__(self, attention: Mixer, ffn: FeedForward):
        self.attention, self.ffn = attention, ffn

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width], rows as `batch` says."""
        with opened("", type(self.attention).__name__):
            y = self.attention(x, batch)
        with opened("", type(self.ffn).__name__):
            y += self.ffn(x)
        return y


class AttentionAndStateSpace:
    """attention(x) + states(x): both read the same rows (Falcon-H1, TII, 2025). A tensor-parallel
    rank may have no part of one of them.

    What a sequence keeps for `states` has a place of its own, the number `place` (`Batch.place`).
    """

    def __init__(self, attention: Mixer, states: Mixer, place: int):
        self.attention, self.states, self.place = attention, states, place

    @property
    def window(self) -> int:
        """That of attention: what `states` keeps belongs to no positions."""
        return self.attention.window

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> Storage | None:
        """Return that of attention."""
        return self.attention.new_storage(n_rows, settings, device)

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> LayerState | None:
        """Return that of attention."""
        return self.attention.new_state(storage, table, device)

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes for both."""
        return sum(x.state_bytes(capacity, settings) for x in (self.attention, self.states))

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of the one that takes more: they run one after the other."""
        return max(x.score_bytes(rows, keys, precision) for x in (self.attention, self.states))

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations of both."""
        return self.attention.flop(n_past, n) + self.states.flop(n_past, n)

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of both that n tokens read one by one."""
        return sum(x.read_bytes(n_past, n, settings) for x in (self.attention, self.states))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width], rows as `batch` says."""
        with opened("", type(self.attention).__name__):
            y = self.attention(x, batch)
        with opened("", type(self.states).__name__):
            return y + self.states(x, replace(batch, place=self.place))


@dataclass(frozen=True)
class Branch:
    """One step of the residual stream: h += post_norm(module(norm(h))); a norm that is None does
    nothing.

    mixer: the module mixes tokens. takes_batch: it is called with (x, batch), others with x alone.
    sum: adds what the module gives on all tensor-parallel ranks, before the norm; None if it gives
    all of it. streams: h are several streams, of which the branch reads a mixture; None for one.
    apart: the module keeps something of a sequence at a number of its own, as a `Mixer` does.
    """

    norm: Norm | None
    module: Mixer | FeedForward | RowLayer | AttentionAndFFN | AttentionAndStateSpace
    post_norm: Norm | None = None
    mixer: bool = False
    takes_batch: bool = False
    sum: Callable[[torch.Tensor], torch.Tensor] | None = None
    streams: Connection | None = None
    apart: bool = False

    def __post_init__(self):
        object.__setattr__(self, "takes_batch", self.takes_batch or self.mixer)

    @property
    def modules(self) -> tuple[Mixer | FeedForward | RowLayer, ...]:
        """The module, or both of two side by side, of which the mixer is the first."""
        if isinstance(self.module, AttentionAndFFN):
            return self.module.attention, self.module.ffn
        if isinstance(self.module, AttentionAndStateSpace):
            return self.module.attention, self.module.states
        return (self.module,)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The modules that mix tokens: none, one, or two side by side."""
        if not self.mixer:
            return ()
        both = isinstance(self.module, AttentionAndStateSpace)
        return self.modules if both else self.modules[:1]  # pyright: ignore[reportReturnType]  `mixer` says so

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what the branch adds to h float32[rows, width], a mixture of streams where there
        are several.
        """
        x = h if self.norm is None else self.norm(h)
        with opened(f"blk.{batch.layer}", type(self.module).__name__):
            y = self.module(x, batch) if self.takes_batch else self.module(x)  # pyright: ignore[reportCallIssue]  one of the two
        if self.sum is not None:
            y = self.sum(y)
        return y if self.post_norm is None else self.post_norm(y)


class Block:
    """Branches one after the other; `output_scale` multiplies the stream after them. A block
    computes on the device of its norms, which the placement chooses. It may have a mixer alone, or
    none.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        device: torch.device,
        output_scale: torch.Tensor | None = None,
    ):
        self.branches, self.device, self.output_scale = tuple(branches), device, output_scale
        mixers = [
            x.module if isinstance(x.module, AttentionAndStateSpace) else x.modules[0]
            for x in self.branches
            if x.mixer
        ]
        [mixer] = mixers or [AbsentMixer()]
        self._apart = [x.module for x in self.branches if x.apart]
        self._mixer: Mixer = mixer  # pyright: ignore[reportAttributeAccessIssue]  `mixer` says so

    @property
    def mixer(self) -> Mixer:
        """The module that mixes tokens; one that does nothing in a block that has none."""
        return self._mixer

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The module that mixes tokens, or both of two side by side, and those of branches that
        are `apart`.
        """
        m = self._mixer
        own = (m.attention, m.states) if isinstance(m, AttentionAndStateSpace) else (m,)
        return (*own, *self._apart)  # pyright: ignore[reportReturnType]  `apart` says so

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes for all mixers."""
        return sum(mixer.state_bytes(capacity, settings) for mixer in self.mixers)

    @property
    def row_layers(self) -> list[FeedForward | RowLayer]:
        """The modules that work on every row alone."""
        modules = (branch.modules[len(branch.mixers) :] for branch in self.branches)
        return [x for some in modules for x in some]  # pyright: ignore[reportReturnType]  see `mixer`

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        for branch in self.branches:
            if branch.streams is not None:
                x, *weights = branch.streams.before(h)
                h = branch.streams.after(h, branch(x, batch), *weights)
                continue
            y = branch(h, batch)
            h = many_rows.total(h, y) if branch.sum is None else h + y  # ranks may keep their sum
        return h if self.output_scale is None else h * self.output_scale
