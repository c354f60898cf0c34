"""What evaluating a model must read and compute at least: the base of GB/s and of shares of a
device's limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName


@dataclass(frozen=True)
class Cost:
    """Bytes and floating-point operations that no implementation can avoid.

    step_bytes: weights read for one token by itself (of experts the used ones; of the embedding one
    row). cache_bytes: state read per position before a token. token_flop: of all matrix products
    but the output's, per token; output_flop: of the output's, per row of logits; pair_flop: of
    attention, per pair of a token and a position it sees. last_flop, last_pair_flop: the part of
    token_flop and pair_flop in the last block after its keys and values, which only tokens with
    logits need.
    """

    step_bytes: float
    cache_bytes: float
    token_flop: float
    output_flop: float
    pair_flop: float
    last_flop: float
    last_pair_flop: float

    @classmethod
    def of(cls, model, state=None) -> Cost:
        """Return the cost of a `Model`; `state` gives the size of the cache."""
        tensors = {
            tensor.name: tensor
            for tensor in model.source.tensors
            if model.weights.uses(tensor.name)
        }
        output = OUTPUT if OUTPUT in tensors else TOKEN_EMBEDDING
        step_bytes = token_flop = output_flop = last_flop = 0.0
        last_layer = len(model.network.blocks) - 1
        for name, tensor in tensors.items():
            parsed = TensorName.parse(name)
            share = _share_used(model, tensor)
            step_bytes += (
                tensor.row_bytes
                if name == TOKEN_EMBEDDING and name != output
                else share * tensor.n_bytes
            )
            if len(tensor.shape) < 2:
                continue
            if name == output:
                output_flop = 2.0 * tensor.n_elements
            elif name != TOKEN_EMBEDDING:
                token_flop += 2 * share * tensor.n_elements
                if parsed.layer == last_layer and parsed.is_after_keys:
                    last_flop += 2 * share * tensor.n_elements
        pair_flop = last_pair_flop = 0.0
        for block in model.network.blocks:
            last_pair_flop = block.mixer.pair_flop
            pair_flop += last_pair_flop
        cache_bytes = 0.0 if state is None else state.nbytes / state.capacity
        return cls(
            step_bytes, cache_bytes, token_flop, output_flop, pair_flop, last_flop, last_pair_flop
        )

    def generation_bytes(self, n_past: int, n: int) -> float:
        """Return the bytes read by n tokens, one after the other, after n_past others."""
        return n * self.step_bytes + self.cache_bytes * _pairs(n_past, n)

    def prompt_flop(self, n_past: int, n: int, n_batch: int) -> float:
        """Return the operations for n tokens after n_past others, n_batch at a time with logits for
        the last one of each batch.
        """
        # Positions that each batch's last token sees.
        ends = [n_past + min(first + n_batch, n) for first in range(0, n, n_batch)]
        products = n * (self.token_flop - self.last_flop) + len(ends) * (
            self.last_flop + self.output_flop
        )
        return (
            products
            + (self.pair_flop - self.last_pair_flop) * _pairs(n_past, n)
            + self.last_pair_flop * sum(ends)
        )


def _pairs(n_past: int, n: int) -> float:
    """Pairs of one of n tokens and a position that it sees, itself included."""
    return n * n_past + n * (n + 1) / 2


def _share_used(model, tensor: TensorInfo) -> float:
    """The part of a tensor that one token needs."""
    if TensorName.parse(tensor.name).expert_layer is None:
        return 1.0
    p = model.hyperparameters
    return p.integer("expert_used_count") / p.integer("expert_count")
