"""What evaluating a model must read and compute at least: the figures behind GB/s, and the shares of a device's limits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..formats.source import TensorInfo

_OF_EXPERTS = re.compile(r"_exps\.|\.ffn_(gate|up|down)\.\d+\.")  # stacked, or one tensor each as in very old files


@dataclass(frozen=True)
class Cost:
    """Bytes and floating-point operations that no implementation can avoid.

    step_bytes: weights read for one token by itself (of experts the used ones; of the embedding one row).
    cache_bytes: state read per position before a token. token_flop: of all matrix products but the output's, per token;
    output_flop: of the output's, per row of logits; pair_flop: of attention, per pair of a token and a position it sees.
    """

    step_bytes: float
    cache_bytes: float
    token_flop: float
    output_flop: float
    pair_flop: float

    @classmethod
    def of(cls, model, state=None) -> Cost:
        """Of a `Model`; `state` gives the size of the cache."""
        tensors = {tensor.name: tensor for tensor in model.source.tensors}
        output = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        step_bytes = token_flop = output_flop = 0.0
        for name, tensor in tensors.items():
            share = _share_used(model, tensor)
            step_bytes += tensor.row_bytes if name == "token_embd.weight" and name != output else share * tensor.n_bytes
            if len(tensor.shape) < 2:
                continue
            if name == output:
                output_flop = 2.0 * tensor.n_elements
            elif name != "token_embd.weight":
                token_flop += 2 * share * tensor.n_elements
        pair_flop = 0.0
        for block in model.network.blocks:
            mixer = getattr(block, "mixer", None)
            if hasattr(mixer, "n_heads"):
                pair_flop += 2.0 * mixer.n_heads * (mixer.key_length + mixer.value_length)
        return cls(step_bytes, 0.0 if state is None else state.nbytes / state.capacity, token_flop, output_flop, pair_flop)

    def generation_bytes(self, n_past: int, n: int) -> float:
        """Bytes read by n tokens, one after the other, behind n_past others."""
        return n * self.step_bytes + self.cache_bytes * _pairs(n_past, n)

    def prompt_flop(self, n_past: int, n: int, n_batch: int) -> float:
        """Operations for n tokens behind n_past others, n_batch at a time with logits for the last one of each batch."""
        return n * self.token_flop + -(-n // n_batch) * self.output_flop + self.pair_flop * _pairs(n_past, n)


def _pairs(n_past: int, n: int) -> float:
    """Pairs of one of n tokens and a position that it sees, itself included."""
    return n * n_past + n * (n + 1) / 2


def _share_used(model, tensor: TensorInfo) -> float:
    """The part of a tensor that one token needs."""
    if not _OF_EXPERTS.search(tensor.name):
        return 1.0
    p = model.hyperparameters
    return p.integer("expert_used_count") / p.integer("expert_count")
