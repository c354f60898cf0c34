"""A model opened from a GGUF file: tokens in, logits out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import wraps

import torch

from ..errors import ShapeError, UsageError
from ..formats import arguments
from ..formats.gguf.reader import open_gguf
from . import memory
from .arguments import check_options
from .evaluation_paths import EvaluationPaths
from .layers.batch import Batch
from .network.sampling import Sampling, sample
from .state.cache import CacheSettings, padded
from .state.pool import Pool
from .state.sequence import State, reserve
from .tokens import TokenIds, as_tensor, check_hidden, checked_tokens
from .weights.devices import usable_device
from .weights.encoded import DEFAULT_CACHE_BYTES


def load_model(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    **options,
) -> Model:
    """Open a GGUF file, or a split model through its first shard. `options`: those of `Model`.

    On the CPU, weights stay encoded in the file, and at most `cache_bytes` of decoded
    float32 matrices are kept. On a GPU they are encoded in its memory, from the first use on or
    from `Model.load`. MalformedFileError, ConfigError or ArchitectureError say what is wrong with
    the file; UsageError for a device that does not exist.
    """
    usable_device(device)  # before a large file is read
    check_options(cache_bytes=cache_bytes, **options)
    source = open_gguf(arguments.path("path", path))
    try:
        return Model(source, device, cache_bytes, **options)
    except BaseException:
        source.close()
        raise


def _named_errors(method: Callable) -> Callable:
    @wraps(method)
    def run(self: Model, *args, **options):
        with memory.named_errors(self.device, self.source.path):
            return method(self, *args, **options)

    return run


class Model(EvaluationPaths):
    """A network with its tokenizer. Close it, or use it as a context manager, to close the file.
    Arguments: those of `opened.OpenModel`.

    Hidden states and logits are on `network.output_device`, at every precision: on the GPU, unless
    `placement` leaves the output on the CPU (`gpu_layers` no more than there are layers).
    """

    def forward(self, token_ids: TokenIds) -> torch.Tensor:
        """Logits float32[n, vocab] of one sequence of n token ids, each row predicting the token
        after it.

        The same call gives the same bits. ShapeError if `token_ids` is not a non-empty row of
        ids below the vocabulary size.
        """
        return self.logits(self.hidden(as_tensor(token_ids)[None])[0])

    @_named_errors
    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Final hidden states float32[sequences, n, width], normed, of independent sequences
        int[sequences, n] from position `start`.
        """
        tokens = self._same(self._checked(tokens))
        if (fast := self._fast) is not None:
            return fast.hidden(tokens, start)
        n_sequences, n_tokens = tokens.shape
        h = self._reference.hidden(
            tokens.reshape(-1), Batch.of(n_sequences, n_tokens, start, self.device, self.cache)
        )
        return h.view(n_sequences, n_tokens, -1)

    @_named_errors
    @torch.no_grad()
    def first_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the first layer reads, float32[rows, width], for tokens int64[rows]."""
        if (fast := self._fast) is not None:
            return fast.prompt.first_states(tokens.to(self.device))
        return self._reference.first_states(tokens)

    @_named_errors
    @torch.no_grad()
    def after_layer(
        self, layer: int, tokens: torch.Tensor, h: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """What comes out of a layer for the states h float32[rows, width] that it reads, and may
        change; see `runtime.layerwise`.
        """
        if (fast := self._fast) is not None:
            return fast.prompt.after_layer(layer, tokens.to(self.device), h.to(self.device), batch)
        return self._reference.after_layer(layer, tokens, h, batch)

    @_named_errors
    def new_state(self, capacity: int, settings: CacheSettings | None = None) -> State:
        """An empty sequence for at most `capacity` tokens (rounded up to a multiple of
        `cache.PADDING`). `settings`: else the model's.

        UsageError for cache types that do not suit the model's heads, DeviceError for more than the
        CPU has memory for.
        """
        capacity = arguments.whole_number("capacity", capacity)
        if capacity < 1:
            raise UsageError(f"a sequence of {capacity} tokens was asked for, expected at least 1")
        chosen = self._settings(settings, self.weights)
        memory.check_cache(self.network, padded(capacity), chosen, self.ubatch)
        return self.network.new_state(capacity, chosen, self.ubatch)

    @_named_errors
    def new_pool(
        self, capacity: int, n_sequences: int, settings: CacheSettings | None = None
    ) -> Pool:
        """Memory for up to `n_sequences` sequences of `capacity` tokens together (rounded up as for
        `new_state`). Errors as for `new_state`.
        """
        capacity = padded(arguments.whole_number("capacity", capacity, 1))
        n_sequences = arguments.whole_number("n_sequences", n_sequences, 1)
        chosen = self._settings(settings, self.weights)
        memory.check_cache(self.network, capacity, chosen, self.ubatch, n_sequences)
        return self.network.new_pool(capacity, chosen, n_sequences, self.ubatch)

    @_named_errors
    @torch.no_grad()
    def prepare(self, state: State, n: int) -> None:
        """Compile on the CPU, or load from the disk, what a prompt of n tokens and steps of the
        sequence of `state` run, so that the first of them take no longer than the next.
        """
        self._check_state(state)
        if self._steps is None or self.weights.taps.readers:
            return
        if self.precision == "int8":
            self._steps.compile_ahead(state, n)
        self._steps.has_program([state])

    def count_missing_code(self) -> int:
        """Return how many functions for steps on the CPU are not compiled yet."""
        return 0 if self._steps is None else self._steps.count_missing(self.new_state(1))

    @_named_errors
    @torch.no_grad()
    def extend(
        self,
        token_ids: TokenIds,
        state: State,
        all_logits: bool = False,
    ) -> torch.Tensor:
        """Append tokens to the sequence of `state`: logits float32[vocab] after the last one, or
        float32[n, vocab] with `all_logits`.

        At most `ubatch` tokens go through the model at a time. ShapeError for tokens as in
        `forward`, or more than the state holds.
        """
        tokens = self._same(self._checked(as_tensor(token_ids)[None])[0])
        self._check_state(state)
        if state.n_past + len(tokens) > state.capacity:
            raise ShapeError(
                f"{state.n_past} tokens and {len(tokens)} more do not fit a sequence of at most"
                f" {state.capacity}"
            )
        if (fast := self._fast_sequences) is not None:
            return fast.extend(tokens, state, all_logits)
        if self.precision == "int8" and self._steps is not None and not self.weights.taps.readers:
            self._steps.compile_ahead(state, len(tokens))
        if len(tokens) == 1 and (found := self._step(int(tokens[0]), state)) is not None:
            return found[None] if all_logits else found
        logits = []
        pieces = tokens.split(self.ubatch)
        for number, piece in enumerate(pieces, 1):
            h = self._reference.hidden(
                piece,
                Batch.after([state], [len(piece)], self.device),
                final=all_logits or number == len(pieces),
            )
            if all_logits:
                logits.append(self._reference.logits(h))
        return torch.cat(logits) if all_logits else self._reference.logits(h[-1:])[0]

    @_named_errors
    @torch.no_grad()
    def extend_together(self, pieces: Sequence[tuple[TokenIds, State]]) -> torch.Tensor:
        """Append tokens to several sequences in one pass: logits float32[len(pieces), vocab] after
        the last token of each.

        Sequences can have any lengths; together they have at most `ubatch` new tokens. On the fast
        path they are evaluated one after the other. ShapeError as for `extend`.
        """
        tokens = [self._checked(as_tensor(ids)[None])[0] for ids, _ in pieces]
        states = [self._check_state(state) for _, state in pieces]
        if not states:
            raise ShapeError("there are no sequences to extend")
        if len({id(state) for state in states}) != len(states):
            raise UsageError("a sequence is in the batch twice")
        if (total := sum(map(len, tokens))) > self.ubatch:
            raise ShapeError(f"{total} tokens are more than a pass of {self.ubatch} holds (-ub)")
        if self._fast_sequences is not None:
            return torch.stack(
                [self.extend(ids, state) for ids, state in zip(tokens, states, strict=True)]
            )
        lengths = [len(ids) for ids in tokens]
        if set(lengths) == {1} and self._steps is not None and self._steps.has_program(states):
            reserve(states, lengths)
            return torch.stack(
                [self.extend(ids, state) for ids, state in zip(tokens, states, strict=True)]
            )
        h = self._reference.hidden(
            self._same(torch.cat(tokens)), Batch.after(states, lengths, self.device)
        )
        ends = torch.tensor(lengths, device=h.device).cumsum(0) - 1
        return self._reference.logits(h[ends])

    def follow(self, token: int, state: State, n: int, sampling: Sampling) -> Iterator[int]:
        """Append `token`, then every token that is drawn, and yield the `n` drawn tokens; the last
        one is not appended.

        The caller may stop at any time: `state.n_past` counts what was appended for the tokens
        yielded so far. ShapeError for more tokens than the state holds, EvaluationError for logits
        that are not finite.
        """
        self._check_state(state)
        arguments.instance("sampling", sampling, Sampling)
        n = arguments.whole_number("n", n)
        if state.n_past + n > state.capacity:
            raise ShapeError(
                f"{state.n_past} tokens and {n} more do not fit a sequence of at most"
                f" {state.capacity}"
            )
        # A step on a device does not check it.
        self._checked(torch.tensor([[arguments.whole_number("token", token)]]))
        if self.group is not None:
            token, sampling = self.group.from_first((token, sampling))
        if (fast := self._fast_sequences) is not None:
            yield from fast.steps.follow(token, state, n, sampling)
            return
        largest = None if self._steps is None else self._steps.largest
        if self.precision == "int8" and self._steps is not None:
            self._steps.compile_ahead(state, 1)
        for _ in range(n):
            token = sample(self._after(token, state), sampling, state.n_past, largest)
            yield token

    def _after(self, token: int, state: State) -> torch.Tensor:
        """Return what `extend` does for a token that is known to be valid, in memory that the next
        token may overwrite.
        """
        logits = self._step(token, state, copied=False)
        return self.extend([token], state) if logits is None else logits

    @_named_errors
    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width] of `hidden`, on any device, to float32[rows, vocab]. Raise
        ShapeError for another shape.
        """
        check_hidden(hidden, self.network.width, self.source.path)
        hidden = hidden.to(self.network.output_device)
        if (fast := self._fast) is not None:
            return fast.logits(hidden)
        return self._reference.logits(hidden)

    def _same(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the first rank: all ranks must evaluate the same."""
        return tokens if self.group is None else self.group.tokens(tokens)

    def _check_state(self, state: State) -> State:
        arguments.instance("state", state, State)
        blocks, own = self.network.blocks, self.network.layers
        same = len(blocks) == state.n_layers
        if not same or (own and blocks[own[0]].mixer is not state.mixers[own[0]]):
            raise UsageError("the sequence is of another model", file=self.source.path)
        return state

    def _checked(self, tokens: torch.Tensor) -> torch.Tensor:
        return checked_tokens(tokens, self.n_vocab, self.source.path)
