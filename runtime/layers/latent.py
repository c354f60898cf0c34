"""From latent vectors to keys and values of heads: the up-projection of latent attention, in the
two ways in which files have it.

Head h has W_k [nope, rank] and W_v [value, rank]: its key is W_k c and its value W_v c, for the
latent vector c of a position. `attn_kv_b` has the rows of both, head after head. `attn_k_b` has W_k
transposed, and `attn_v_b` W_v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..weights.linear import Linear
from ..weights.stacked_linear import HeadLinear
from .specs import MLASpec


class UpProjection(Protocol):
    """The matrices W_k and W_v of all heads. c: float32[n, rank]."""

    @property
    def absorbs_only(self) -> bool:
        """Return whether observers need the inputs of the absorbed form."""
        ...

    @property
    def latent_inputs(self) -> tuple[str, ...]:
        """Return the tensors whose input the latent vectors of new positions are."""
        ...

    def observe(self, c: torch.Tensor) -> None:
        """Show observers the latent vectors of new positions."""
        ...

    def keys_and_values(self, c: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_k c and W_v c of some heads, float32[n, heads, nope] and [n, heads, value]."""
        ...

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """Return W_k^T q of every head, float32[n, heads, rank] for q float32[n, heads, nope]: its
        product with c is that of q with the key.
        """
        ...

    def results(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return W_v x of every head, float32[n, heads, value], for mixtures of latent vectors
        float32[n, heads, rank].
        """
        ...


class PerHead:
    """`attn_k_b` and `attn_v_b`.

    Observers see what these are multiplied by in the absorbed form: queries, and mixtures of latent
    vectors. joined: an `attn_kv_b` that the file has as well; `observe` shows them the latent
    vectors as its input.
    """

    def __init__(
        self,
        k_b: HeadLinear,
        v_b: HeadLinear,
        joined: str = "",
        observe: Callable[[str, torch.Tensor], None] | None = None,
    ):
        self.k_b, self.v_b, self._observe = k_b, v_b, observe
        self.latent_inputs = (joined,) if joined else ()

    @property
    def absorbs_only(self) -> bool:
        return self.v_b.is_read

    def observe(self, c: torch.Tensor) -> None:
        for name in self.latent_inputs:
            if self._observe is not None:
                self._observe(name, c)

    def keys_and_values(self, c: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_b.transposed(c, heads), self.v_b.of_one(c, heads)

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        return self.k_b(q)

    def results(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.v_b(mixed)


class Joined:
    """`attn_kv_b` alone. Its decoded rows serve both forms: nothing is quantized again."""

    absorbs_only = False

    def __init__(self, kv_b: Linear, spec: MLASpec):
        self.kv_b, self.spec = kv_b, spec

    @property
    def latent_inputs(self) -> tuple[str, ...]:
        return self.kv_b.observed

    def observe(self, c: torch.Tensor) -> None:
        self.kv_b.observe(c)

    def keys_and_values(self, c: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b.check((c @ self._matrices(c)[heads].mT).transpose(0, 1))
        return both[..., : self.spec.nope_length], both[..., self.spec.nope_length :]

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        w_k = self._matrices(q)[:, : self.spec.nope_length]
        return self.kv_b.check((q.transpose(0, 1) @ w_k).transpose(0, 1))

    def results(self, mixed: torch.Tensor) -> torch.Tensor:
        w_v = self._matrices(mixed)[:, self.spec.nope_length :]
        return self.kv_b.check((mixed.transpose(0, 1) @ w_v.mT).transpose(0, 1))

    def _matrices(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.kv_b.decoded().to(x.device)
        return whole.view(self.spec.heads, -1, self.spec.kv_rank)
