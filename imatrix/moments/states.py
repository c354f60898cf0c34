"""The states of all tokens between two layers, float32[tokens, stream width]."""

from __future__ import annotations

import tempfile
from functools import cached_property

import numpy as np
import torch

from ...formats.disk import check_space, output_error
from ...runtime.memory import free_bytes
from ...runtime.model import Model

_DEVICE_PART = 8  # of the free memory of a GPU that states may take at most


class LayerStates:
    """States of `n` tokens: on the GPU if they take a small part of what is free there, otherwise
    in a file without a name in `folder`.
    """

    def __init__(self, model: Model, n: int, folder: str):
        self._model, self._folder = model, folder
        self._shape = n, model.network.stream_width

    @property
    def n_bytes(self) -> int:
        """Return what the states take."""
        return 4 * self._shape[0] * self._shape[1]

    def load(self, start: int, rows: int) -> torch.Tensor:
        """Return a copy of the states of `rows` tokens from `start`."""
        held = self._states[start : start + rows]
        return held.clone() if isinstance(held, torch.Tensor) else torch.from_numpy(held.copy())

    def save(self, start: int, h: torch.Tensor) -> None:
        """Keep the states h float32[rows, stream width] of the tokens from `start`."""
        held = self._states[start : start + len(h)]
        if isinstance(held, torch.Tensor):
            held.copy_(h)
        else:
            held[:] = h.numpy(force=True)

    def drop(self) -> None:
        """Free the memory, or the file."""
        self.__dict__.pop("_states", None)

    @cached_property
    def _states(self) -> torch.Tensor | np.ndarray:
        device, n_bytes = self._model.device, self.n_bytes
        if device.type == "cuda" and n_bytes < (free_bytes(device) or 0) // _DEVICE_PART:
            return torch.empty(self._shape, dtype=torch.float32, device=device)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                check_space(self._folder, n_bytes, self._folder)
                file.truncate(n_bytes)
                return np.memmap(file, np.float32, "r+", shape=self._shape)
        except OSError as error:
            raise output_error(error, self._folder) from None
