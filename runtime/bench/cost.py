"""What evaluating a model must read and compute at least: the base of GB/s and of shares of a
device's limits. Layers say what they cost; this adds it up.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName
from ..layers.block import Mixer
from ..model import Model
from ..split_model import network_and_weights
from ..state.cache import CacheSettings
from ..state.sequence import State
from ..weights.linear import Embedding


@dataclass(frozen=True)
class Cost:
    """Bytes and floating-point operations that no implementation can avoid.

    step_bytes: weights read for one token by itself (of experts the used ones; of embeddings one
    row). token_flop: of all matrix products but the output's, per token; output_flop: of the
    output's, per row of logits. last_flop: the part of token_flop in the last block after its keys
    and values, which only tokens with logits need. mixers: what mixes tokens in each block.
    settings: how states are stored; None: what is read of them is not counted.
    """

    step_bytes: float
    token_flop: float
    output_flop: float
    last_flop: float
    mixers: tuple[Mixer, ...]
    settings: CacheSettings | None

    @classmethod
    def of(cls, model: Model, state: State | None = None) -> Cost:
        """Return the cost of a model, of which this process may have a part; with a `state`, also
        of reading it.
        """
        whole, weights = model.network, model.weights
        if weights.share is not None:
            whole, weights = network_and_weights(model.source, weights.switches)
        tensors = {
            tensor.name: tensor for tensor in model.source.tensors if weights.uses(tensor.name)
        }
        output = OUTPUT if OUTPUT in tensors else TOKEN_EMBEDDING
        # Tables of embeddings, of which a token reads one row.
        tables = {p.name for p in weights.parameters if p.role == Embedding.role} - {output}
        blocks = whole.blocks
        # Of the expert tensors of each layer.
        shares = [min((m.expert_share for m in block.row_layers), default=1.0) for block in blocks]
        step_bytes = token_flop = output_flop = last_flop = 0.0
        for name, tensor in tensors.items():
            parsed = TensorName.parse(name)
            share = 1.0 if parsed.expert_layer is None else shares[parsed.expert_layer]
            step_bytes += tensor.row_bytes if name in tables else share * tensor.n_bytes
            if len(tensor.shape) < 2:
                continue
            if name == output:
                output_flop = 2.0 * tensor.n_elements
            elif name not in tables:
                token_flop += 2 * share * tensor.n_elements
                if parsed.layer == len(blocks) - 1 and parsed.is_after_keys:
                    last_flop += 2 * share * tensor.n_elements
        mixers = tuple(block.mixer for block in blocks)
        settings = None if state is None else state.settings
        return cls(step_bytes, token_flop, output_flop, last_flop, mixers, settings)

    def generation_bytes(self, n_past: int, n: int) -> float:
        """Return the bytes read by n tokens, one after the other, after n_past others."""
        found = n * self.step_bytes
        if self.settings is not None:
            found += sum(mixer.read_bytes(n_past, n, self.settings) for mixer in self.mixers)
        return found

    def prompt_flop(self, n_past: int, n: int, n_batch: int) -> float:
        """Return the operations for n tokens after n_past others, n_batch at a time with logits for
        the last one of each batch.
        """
        # Tokens before the last one of each batch, and those of all.
        before_ends = [n_past + min(first + n_batch, n) - 1 for first in range(0, n, n_batch)]
        products = n * (self.token_flop - self.last_flop) + len(before_ends) * (
            self.last_flop + self.output_flop
        )
        *others, last = self.mixers
        return (
            products
            + sum(mixer.flop(n_past, n) for mixer in others)
            + sum(last.flop(end, 1) for end in before_ends)
        )
