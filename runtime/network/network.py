"""The network that an architecture file builds: embedding, blocks, final norm and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..layers.absent import AbsentMixer
from ..layers.batch import Batch
from ..layers.block import Block
from ..layers.layer_input import LayerInputs, TokenIds
from ..layers.norm import Norm
from ..layers.rowwise.altup import leave_streams, left_streams
from ..layers.streams import Ends
from ..state.cache import CacheSettings
from ..state.pool import Pool, rows_of, window_of
from ..state.sequence import State, reserve
from ..weights.linear import Embedding, Linear

if TYPE_CHECKING:
    from ..parallel.stages import Stage


@dataclass(frozen=True)
class Network:
    """Embedding, blocks, final norm and output projection.

    Blocks can be of different kinds. embedding_scale: embeddings are multiplied by it. softcap:
    logits become softcap * tanh(logits / softcap); 0 for none. inputs: computes `Batch.inputs` from
    token ids int64[rows] and their embeddings. join: joins the logits of all tensor-parallel ranks,
    each of which has some rows of `output`; None if `output` is whole. stage: which blocks this
    process evaluates; None for all. n_streams: vectors of the width that a token has between
    layers; the first is the residual stream, others are in the scratch of a batch
    (`rowwise.altup`). streams: how several residual streams begin and end; None for one.
    """

    embedding: Embedding
    blocks: Sequence[Block]
    output_norm: Norm
    output: Linear
    n_vocab: int
    embedding_scale: float = 1.0
    softcap: float = 0.0
    inputs: LayerInputs | TokenIds | None = None
    join: Callable[[torch.Tensor], torch.Tensor] | None = None
    stage: Stage | None = None
    n_streams: int = 1
    streams: Ends | None = None

    @property
    def layers(self) -> range:
        """The numbers of the blocks that this process evaluates."""
        return range(len(self.blocks)) if self.stage is None else self.stage.layers

    @property
    def width(self) -> int:
        """Elements of a hidden vector."""
        return self.output_norm.weight.numel()

    @property
    def stream_width(self) -> int:
        """Elements of what blocks hand on: of a hidden vector, or of all streams."""
        return self.width * (1 if self.streams is None else self.streams.n)

    @property
    def output_device(self) -> torch.device:
        """The device of final hidden states and logits: that of the final norm, whatever the device
        of the output matrix.
        """
        return self.output_norm.weight.device

    def new_pool(
        self, n_tokens: int, settings: CacheSettings, n_sequences: int = 1, ubatch: int = 512
    ) -> Pool:
        """Memory for `n_sequences` of `n_tokens` tokens together."""
        mixers = [
            (block.mixer if layer in self.layers else AbsentMixer(), block.device)
            for layer, block in enumerate(self.blocks)
        ]
        # What layers with two mixers keep for the second one follows (`Decoder.side_by_side`,
        # `ngrams`).
        if any(len(block.mixers) > 1 for block in self.blocks):
            seconds = [(*block.mixers[1:], AbsentMixer())[0] for block in self.blocks]
            mixers += [
                (second if layer in self.layers else AbsentMixer(), device)
                for layer, (second, (_, device)) in enumerate(zip(seconds, mixers, strict=True))
            ]
        return Pool(mixers, settings, n_tokens, n_sequences, ubatch, len(self.blocks))

    def new_state(self, capacity: int, settings: CacheSettings, ubatch: int = 512) -> State:
        """Return an empty sequence of at most `capacity` tokens, with its own memory."""
        return self.new_pool(capacity, settings, 1, ubatch).sequence(
            reserved=True, context=capacity
        )

    def state_bytes(
        self,
        capacity: int,
        settings: CacheSettings,
        ubatch: int,
        device: torch.device | None = None,
        n_sequences: int = 1,
    ) -> int:
        """Return the bytes that `new_pool` and its sequences take, on `device` or on all. Those of
        windows and recurrent states belong to each sequence, others are shared.
        """
        total = 0
        for layer in self.layers:
            block = self.blocks[layer]
            if device is not None and block.device != device:
                continue
            window = window_of(block.mixer, settings, capacity, ubatch)
            size = block.state_bytes(rows_of(window, capacity, ubatch), settings)
            own = size if window else block.state_bytes(0, settings)
            total += size + (n_sequences - 1) * own
        return total

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first hidden states float32[rows, width] of tokens int64[rows]."""
        h = self.embedding(tokens)
        return h if self.embedding_scale == 1 else h * self.embedding_scale

    def begun(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the first block reads, float32[rows, stream_width], of embeddings
        float32[rows, width].
        """
        return h if self.streams is None else self.streams.begin(h)

    def ended(self, h: torch.Tensor) -> torch.Tensor:
        """Return final hidden states float32[rows, width], normed, of what the last block gives,
        float32[rows, stream_width].
        """
        h = h.to(self.output_device)
        return self.output_norm(h if self.streams is None else self.streams.end(h))

    def prepared(self, tokens: torch.Tensor, h: torch.Tensor, batch: Batch) -> Batch:
        """Return the batch with what blocks need of the tokens themselves."""
        return batch if self.inputs is None else replace(batch, inputs=self.inputs(tokens, h))

    def hidden(self, tokens: torch.Tensor, batch: Batch, *, final: bool = True) -> torch.Tensor:
        """Return final hidden states float32[rows, width], normed, for tokens int64[rows] as
        `batch` says, and append them to the sequences of its states. If there is no memory for one
        of them, all stay as they are.

        final: whether the result is used. If it is not, a stage does not wait for it.
        """
        states = batch.states or ()
        reserve(states, batch.lengths)
        h = self.embed(tokens)
        batch = self.prepared(tokens, h, batch)
        h = self.begun(h)
        if self.stage is not None:
            h = self.taken(self.stage, h, batch)
        for layer in self.layers:
            block = self.blocks[layer]
            h = block(h.to(block.device), batch.at(layer, block.device))
        if self.stage is not None:
            h = self.handed_on(self.stage, h, len(h), batch, final=final)
        for state, n in zip(states, batch.lengths, strict=False):
            state.advance(n)
        return self.ended(h)

    @property
    def moved_width(self) -> int:
        """Elements of a token that a stage hands on: those of all streams."""
        return self.n_streams * self.stream_width

    def taken(self, stage: Stage, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what the first layer here reads: the embeddings h float32[rows, width] or what the
        rank before sends, which overwrites h as `Stage.take` does. Other streams go to the scratch.
        """
        if self.n_streams == 1 or stage.line.rank == 0:
            return stage.take(h)
        moved = stage.take(h.new_empty(len(h), self.moved_width))
        self.leave(moved, batch)
        return h.to(moved.device).copy_(moved[:, : self.width])

    def handed_on(
        self, stage: Stage, h: torch.Tensor, rows: int, batch: Batch, *, final: bool = True
    ) -> torch.Tensor:
        """Hand h float32[n, width] on with the other streams, which are in the scratch after all
        layers but the last. Return what `Stage.hand_on` does, of the first stream.
        """
        if self.n_streams == 1:
            return stage.hand_on(h, rows, final=final)
        moved = h.new_zeros(len(h), self.moved_width)
        moved[:, : self.width] = h
        if not stage.is_last:
            self.gather_streams(moved, batch)
        return stage.hand_on(moved, rows, final=final)[:, : self.width].contiguous()

    def leave(self, moved: torch.Tensor, batch: Batch) -> None:
        """Leave the streams but the first of float32[rows, `moved_width`] for the first layer
        here.
        """
        others = moved[:, self.width :].unflatten(1, (self.n_streams - 1, self.width))
        leave_streams(batch, self.layers.start, others.clone())

    def gather_streams(self, moved: torch.Tensor, batch: Batch) -> None:
        """Write what the layers here have left to float32[rows, `moved_width`]; where no layer has
        left anything, the zeros that the first layer replaces.
        """
        if (others := left_streams(batch, self.layers.stop)) is not None:
            moved[:, self.width :] = others.flatten(1).to(moved.device)

    def first_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the first block reads, float32[rows, stream_width], of tokens int64[rows]."""
        return self.begun(self.embed(tokens)).to(self.blocks[0].device)

    def after_layer(
        self, layer: int, tokens: torch.Tensor, h: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return what comes out of one block for the states h float32[rows, stream_width] that it
        reads. The scratch of `batch` holds what earlier layers have left.
        """
        if self.inputs is not None:
            batch = replace(batch, inputs=self.inputs(tokens, self.embed(tokens)))
        block = self.blocks[layer]
        return block(h.to(block.device), batch.at(layer, block.device))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, vocab] of normed hidden states float32[rows, width]."""
        logits = self.local_logits(hidden)
        return logits if self.join is None else self.join(logits)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the rows of `output` on this rank."""
        logits = self.output(hidden)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
