"""The contract for what a layer keeps of a sequence: a cache of positions, or a recurrent state."""

from __future__ import annotations

from typing import Any, Protocol


class Storage(Protocol):
    """Memory of one layer for positions of any sequences."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...


class LayerState(Protocol):
    """What one layer keeps of a sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...

    @property
    def by_position(self) -> bool:
        """Whether later positions can be cut off: True for caches, False for recurrent states."""
        ...

    def clear(self) -> None:
        """Forget everything: the next token is the first one."""
        ...

    def save(self, first: int, stop: int) -> Any:
        """Return a copy of what is kept: of positions first..stop, or of a recurrent state."""
        ...

    def load(self, first: int, saved: Any) -> None:
        """Put back what `save` returned for positions from `first`."""
        ...
