"""What the fast path knows about its device: number formats, buffers that layers share, and what
runs slowly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...layers.attend import temperature
from ...layers.rope import Rope
from ...layers.specs import Temperature
from ...state.cache import CacheSettings
from ...weights.taps import Taps

if TYPE_CHECKING:
    from ....cuda_kernels.peer.rows import PeerRows
    from ...parallel.group import Group
    from ...parallel.share import Share

# What is summed over ranks at a time, at least: smaller sums take longer to start than to run. All
# ranks use the same pieces, also one that computes nothing.
PIECE_BYTES = 64 * 2**20
Angles = dict[Any, Any]  # what layers compute from the positions of a pass, by what it is for


class SupportsClose(Protocol):
    """What a context closes with itself."""

    def close(self) -> None:
        """Free what is held on the device."""


@dataclass
class Context:
    """One device. `dtype` (bfloat16 or float16) is that of activations and decoded weights, the
    residual stream is float32.

    `settings`: the `CacheSettings` of calls without a state (None: keys and values as they are).
    `ubatch`: the most tokens in one pass of the prompt path. `ser`: None or (K, t), the K best
    experts and further ones only if their probability exceeds t times the largest. `rounds`:
    dense products of prompts are in 8 bits. `verbose` gets a
    line, with the reason, for every kind of layer that runs on a slower path. `share`: what this
    tensor-parallel rank computes, None for a whole model. `taps`: what looks at the inputs of
    products. `showing`: layers run as they do while inputs are shown, even if nothing looks.
    `replaced`: names of tensors that have other blocks than kernels read, at any time.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    settings: CacheSettings | None = None
    ubatch: int = 512
    ser: tuple[int, float] | None = None
    rounds: bool = False
    verbose: Callable[[str], None] | None = None
    share: Share | None = None
    taps: Taps = field(default_factory=Taps)
    showing: bool = False
    replaced: Collection[str] = ()
    row_links: PeerRows | None = None  # how ranks meet in prompts; None: through the group
    # Layers whose keys and values those that share them find in buffers: all of these are fast.
    sources: Collection[int] = ()
    growths: int = 0  # times that a buffer was replaced by a larger one
    # From (module class, reason) to layers.
    slow: dict[tuple[str, str, bool], list[int]] = field(default_factory=dict)
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _angles: Angles = field(default_factory=dict)
    _kept: dict[str, SupportsClose] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # cuBLAS repeats its bits only with a workspace of fixed size per stream. It reads this when
        # its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @property
    def shows(self) -> bool:
        """Return whether layers take the form whose inputs observers want."""
        return self.showing or bool(self.taps.fast)

    def shares(self, layer: int) -> bool:
        """Return whether the keys and values of a layer may be in buffers alone, for others."""
        return layer in self.sources and not self.shows and not self.replaced

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory, the same for every call with this name: a layer that wants
        to keep the content must copy it.

        It grows to the largest requested shape. Layers can share it because they run one after the
        other on one stream.
        """
        n_bytes = dtype.itemsize
        for size in shape:
            n_bytes *= size
        held = self._buffers.get(name)
        if held is None or held.numel() < n_bytes:
            self.growths += held is not None
            # Free the old one first, as both may not fit. (What is pending after a graph keeps its
            # buffers until the graph is captured again or dropped: the residual stream and the
            # result of one branch, not the largest buffers.)
            self._buffers.pop(name, None)
            del held
            held = self._buffers[name] = torch.empty(
                max(n_bytes, 16), dtype=torch.uint8, device=self.device
            )
        return held[:n_bytes].view(dtype).view(shape)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the first call with `key`. `close` closes it."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def close(self) -> None:
        """Close what `once` has made. No pass may run, or follow."""
        while self._kept:
            self._kept.popitem()[1].close()

    def angles(self, rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `rope.angles(positions)`, computed once for all layers of a pass; `forget_angles`
        begins the next pass.
        """
        if id(rope) not in self._angles:
            self._angles[id(rope)] = rope.angles(positions)
        return self._angles[id(rope)]

    def temperatures(self, t: Temperature, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of queries float32[n], computed once for all layers of a pass as
        `angles` are.
        """
        if t not in self._angles:
            self._angles[t] = temperature(t, positions).float()
        return self._angles[t]

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions int64[n] of a pass where its first layer has found them, kept as
        `angles` are: graphs read them there.
        """
        return self._angles.setdefault("positions", positions)

    def use_angles(self, angles: Angles) -> None:
        """Keep angles in `angles` from now on: those of the rows that follow."""
        self._angles = angles

    def forget_angles(self) -> None:
        """Forget angles of the positions so far."""
        self._angles = {}

    @property
    def group(self) -> Group | None:
        """The tensor-parallel ranks, of which this is one."""
        return None if self.share is None else self.share.meeting  # pyright: ignore[reportReturnType]  on GPUs it is a group

    def defers(self, width: int) -> bool:
        """Return whether the last products of prompts are computed together with their sums over
        ranks, in pieces. Else they are computed before, within a graph.
        """
        row_bytes = width * self.dtype.itemsize
        alone = self.group is None or self.row_links is not None
        return not alone and self.ubatch * row_bytes > PIECE_BYTES

    def same_choices(self, executors: list[Any | None]) -> list[Any | None]:
        """Return the executors of all branches, None where a rank has none: all ranks have to meet
        in the same way.
        """
        if self.group is None:
            return executors
        missing = {i for i, found in enumerate(executors) if found is None}
        anywhere = set().union(*self.group.exchange(missing))
        return [None if i in anywhere else found for i, found in enumerate(executors)]

    def report(self, kind: str, reason: str | Exception, layer: int) -> None:
        """Note that a layer runs on the reference path. `report_all` tells `verbose`, once for all
        layers of a kind and reason, and whether the reason is a placement.
        """
        placed = getattr(reason, "placed", False)
        self.slow.setdefault((kind, str(reason), placed), []).append(layer)

    def report_all(self) -> None:
        """Tell `verbose` what `report` has gathered since the last call."""
        for (kind, reason, placed), layers in self.slow.items():
            if self.verbose is not None:
                shown = (
                    f"layer {layers[0]}"
                    if len(layers) == 1
                    else f"{len(layers)} layers from {layers[0]}"
                )
                why = ", as placed" * placed
                self.verbose(f"slow path{why}: {kind} of {shown}: {reason}")
        self.slow.clear()
