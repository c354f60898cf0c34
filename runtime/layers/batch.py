"""Rows of a hidden state: the sequence and the position of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ..state.cache import CacheSettings
from ..state.recurrent import RecurrentState, States

if TYPE_CHECKING:
    from ..state.sequence import State
    from .rope import Rope


@dataclass(frozen=True)
class Batch:
    """Rows of tokens of one or more sequences, one sequence after the other: `lengths[s]` rows at
    positions `starts[s]`, `starts[s]` + 1, ... of sequence s. `positions` int64[rows] has them all.

    With `states`, one for each sequence, a sequence has `starts[s]` tokens already; mixers read
    what they kept of these and add the new ones. Without, sequences begin here, and a mixer uses
    keys and values as a cache with `settings` would return them (None: as they are). `layer` is the
    layer that runs, `place` the number of what it keeps of a sequence where that is another one,
    `inputs` what an architecture computes from the tokens for all layers.
    `scratch` is shared by the layers of one pass: rotations, and what one layer leaves for others.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    positions: torch.Tensor
    states: tuple[State, ...] | None = None
    settings: CacheSettings | None = None
    layer: int = 0
    place: int | None = None
    inputs: torch.Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        n_sequences: int,
        n_tokens: int,
        start: int,
        device: torch.device,
        settings: CacheSettings | None = None,
    ) -> Batch:
        """`n_sequences` of `n_tokens` each, from position `start`, without states."""
        positions = torch.arange(start, start + n_tokens, device=device)
        return cls(
            (n_tokens,) * n_sequences,
            (start,) * n_sequences,
            positions.repeat(n_sequences) if n_sequences > 1 else positions,
            settings=settings,
        )

    @classmethod
    def after(cls, states: Sequence[State], lengths: Sequence[int], device: torch.device) -> Batch:
        """The next `lengths[s]` tokens of every sequence."""
        pieces = [
            torch.arange(state.n_past, state.n_past + n, device=device)
            for state, n in zip(states, lengths, strict=True)
        ]
        return cls(
            tuple(lengths),
            tuple(state.n_past for state in states),
            pieces[0] if len(pieces) == 1 else torch.cat(pieces),
            tuple(states),
        )

    def at(self, layer: int, device: torch.device) -> Batch:
        """The same rows as `layer` on `device` sees them."""
        positions = self.positions if self.positions.device == device else self.positions.to(device)
        return replace(self, positions=positions, layer=layer, place=None)

    def on_place(self, place: int) -> Batch:
        """The same rows for what keeps its part of a sequence at the number `place`."""
        return replace(self, place=place)

    @property
    def n_sequences(self) -> int:
        """Sequences that the rows belong to."""
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence. ValueError if their lengths differ."""
        if len(set(self.lengths)) != 1:
            raise ValueError("sequences of this batch have different lengths")
        return self.lengths[0]

    @property
    def start(self) -> int:
        """The first position of each sequence. ValueError if these differ."""
        if len(set(self.starts)) != 1:
            raise ValueError("sequences of this batch start at different positions")
        return self.starts[0]

    @property
    def begins(self) -> bool:
        """Whether all sequences begin here, at position 0."""
        return not any(self.starts)

    @property
    def sequence_positions(self) -> torch.Tensor:
        """int64[n_tokens], the positions of each sequence, where all have the same."""
        return self.positions[: self.n_tokens]

    @property
    def state(self) -> Any:
        """What this layer keeps of the only sequence; None without states."""
        if self.states is None:
            return None
        [state] = self.states
        return self.kept(state)

    def kept(self, state: State) -> Any:
        """What this layer keeps of a sequence."""
        return state.layers[self.layer if self.place is None else self.place]

    @property
    def contexts(self) -> list[int]:
        """The most tokens that each sequence can have."""
        if self.states is not None:
            return [state.context for state in self.states]
        return [n + start for n, start in zip(self.lengths, self.starts, strict=True)]

    def spans(self) -> list[tuple[slice, int]]:
        """Rows and first position of every sequence."""
        found, row = [], 0
        for n, start in zip(self.lengths, self.starts, strict=True):
            found.append((slice(row, row + n), start))
            row += n
        return found

    def even_spans(self) -> list[tuple[slice, int, int]]:
        """Rows, number of sequences and first position of every run of sequences that have the same
        length and start.
        """
        found, row = [], 0
        for (n, start), run in groupby(zip(self.lengths, self.starts, strict=True)):
            n_sequences = len(list(run))
            found.append((slice(row, row + n * n_sequences), n_sequences, start))
            row += n * n_sequences
        return found

    def recurrent_spans(self) -> list[tuple[slice, States]]:
        """Rows of neighbouring sequences of the same length, and what this layer keeps of each.
        TypeError if it keeps no recurrent state; UsageError for one that is at another token.
        """
        spans: list[tuple[slice, RecurrentState | None]] = []
        for i, (rows, start) in enumerate(self.spans()):
            state = None
            if self.states is not None:
                state = self.kept(self.states[i])
                if not isinstance(state, RecurrentState):
                    raise TypeError(f"layer {self.layer} keeps no recurrent state")
                state.check(start, self.layer)
            spans.append((rows, state))
        found = []
        for _, run in groupby(spans, key=lambda span: span[0].stop - span[0].start):
            rows, states = zip(*run, strict=True)
            found.append((slice(rows[0].start, rows[-1].stop), list(states)))
        return found

    def angles(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `rope.angles` of all rows, computed once for all layers of a pass on a device."""
        key = ("angles", id(rope), self.positions.device)
        if key not in self.scratch:
            self.scratch[key] = self._angles(rope)
        return self.scratch[key]

    def _angles(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        contexts = self.contexts
        if rope.long is None or len(set(contexts)) == 1:
            return rope.of_context(contexts[0]).angles(self.positions)
        found = [
            rope.of_context(context).angles(self.positions[rows])
            for context, (rows, _) in zip(contexts, self.spans(), strict=True)
        ]
        cos, sin = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cos, sin
