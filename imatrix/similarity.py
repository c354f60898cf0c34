"""Measure how much each layer changes the hidden states: cosines between its input and output, as
in ik_llama.cpp's imatrix.

The inputs compared are those of the first product of a layer, of its feed-forward part, and of the
next layer (after the last one, of the output matrix), all after their norm. A layer that hardly
changes the direction of its input matters little.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from ..formats.tensor_names import TensorName

# Rows of `sums`, named as in the reference: from the input of a layer to that of the next layer, to
# that of its feed-forward part, and from there to the next layer.
KINDS = ("layer", "attention", "ffn")
_LAYER, _ATTENTION, _FFN = range(3)


class LayerSimilarity:
    """Observe the products of a model; `end_of_pass` must get the final hidden states. Every row
    counts the same.

    sums: float64[3, n_layers] of cosines, rows as KINDS; rows: float64[n_layers], the number of
    rows.
    """

    def __init__(self, n_layers: int):
        self.sums, self.rows = np.zeros((3, n_layers)), np.zeros(n_layers)
        self._layer = -1  # of the pass
        self._input: torch.Tensor | None = None
        self._ffn_input: torch.Tensor | None = None

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        parsed = TensorName.parse(name)
        if parsed.layer is None or experts is not None:
            return
        if parsed.layer != self._layer:
            self._leave(x)
            self._layer, self._input, self._ffn_input = parsed.layer, x.clone(), None
        elif self._input is not None and self._ffn_input is None and parsed.role.startswith("ffn"):
            self._ffn_input = x.clone()
            self._add(_ATTENTION, self._input, x)

    def end_of_pass(self, states: torch.Tensor) -> None:
        """Add the final hidden states of all rows, float32[..., width], in order, after the
        norm.
        """
        self._leave(states.reshape(-1, states.shape[-1]))
        self._layer = -1
        self._input = self._ffn_input = None

    def means(self, kind: str) -> np.ndarray:
        """Return float64[n_layers], the mean cosine of one of KINDS."""
        return self.sums[KINDS.index(kind)] / np.maximum(self.rows, 1)

    def state(self) -> np.ndarray:
        """Return float64[4 * n_layers], for `restore`."""
        return np.concatenate([*self.sums, self.rows])

    def restore(self, state: np.ndarray) -> None:
        """Continue from what `state` returned."""
        *sums, self.rows = state.reshape(4, -1).copy()
        self.sums = np.stack(sums)

    def lines(self) -> list[str]:
        """Return three lists in the words of the reference; layers that matter most come first."""
        lines = []
        for kind in KINDS:
            means = self.means(kind)
            lines += ["", f"======================== sorted {kind} importances"]
            lines += [
                f"{rank:3d}: Layer {layer:3d}, <cos_sim> = {means[layer]:g}"
                for rank, layer in enumerate(np.argsort(np.abs(means), kind="stable"))
            ]
        return lines

    def _leave(self, x: torch.Tensor) -> None:
        """End the layer; `x` is the input of the next one."""
        if self._input is None:
            return
        self._add(_LAYER, self._input, x)
        if self._ffn_input is not None:
            self._add(_FFN, self._ffn_input, x)
        self.rows[self._layer] += len(x)

    def _add(self, kind: int, a: torch.Tensor, b: torch.Tensor) -> None:
        self.sums[kind, self._layer] += float(
            F.cosine_similarity(a.to(b.device), b, dim=-1).sum(dtype=torch.float64)
        )
