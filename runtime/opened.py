"""What is loaded of a model: its file, weights on their devices, its network, its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Self

import torch

from ..errors import UsageError, printable
from ..formats import arguments
from ..formats.source import Source
from . import describe, memory
from .architectures import build_network
from .arguments import check_options
from .network.experts import moe_layers
from .network.network import Network
from .parallel.share import Meeting, Peers, Share
from .parallel.stages import Line, Stage
from .precision import usable_precision
from .state.cache import CacheSettings, padded
from .tokenizer import SpecialTokens, Tokenizer
from .weights.devices import usable_device
from .weights.encoded import DEFAULT_CACHE_BYTES, DecodeCache
from .weights.hyperparameters import Hyperparameters
from .weights.placement import Placement, Request, fit
from .weights.resident import LoadProgress
from .weights.switches import Switches
from .weights.taps import FastObserver
from .weights.weights import Weights

DEFAULT_UBATCH = 512  # tokens of a sequence that go through the model at a time


class OpenModel:
    """The file, weights and network of a `Model`, with its tokenizer.

    precision: f32, the reference path (the default on the CPU), or bf16 (the default on a GPU) or
    f16, the fast path: fused kernels with activations of that type. int8 on the CPU: products
    with quantized weights in 8 bits, those of steps (`cpu.plan`) and of more than four rows
    (`weights.rounded`), and layers of many rows in compiled code (`layers.many_rows`), in float32.
    int8 on a GPU: as bf16, with dense products of prompts in 8 bits (`cuda.prompt.common.rounded`).
    placement: which tensors are on the GPU. switches: how layers are evaluated. cache: types of
    keys and values, for `new_state` and also for calls without a state (`forward`, `hidden`; None:
    float32). ubatch: the most tokens of a sequence that go through the model at a time. context:
    tokens of a sequence for which memory is estimated. verbose: is called with a line about
    everything that runs on a slower path. share: the rank of a split plan that this model is; None
    for a whole model. stage: the layers that this rank evaluates; None for all. peers: ranks with
    the whole model, which evaluate other chunks of a text.
    """

    def __init__(
        self,
        source: Source,
        device: str | torch.device = "cpu",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        *,
        precision: str | None = None,
        placement: Request = Request(),
        switches: Switches = Switches(),
        cache: CacheSettings | None = None,
        ubatch: int = DEFAULT_UBATCH,
        context: int = 0,
        verbose: Callable[[str], None] | None = None,
        share: Share | None = None,
        stage: Stage | None = None,
        peers: Peers | None = None,
    ):
        check_options(
            cache_bytes=cache_bytes,
            placement=placement,
            switches=switches,
            cache=cache,
            ubatch=ubatch,
            context=context,
            verbose=verbose,
            share=share,
            stage=stage,
        )
        self.source, self.device = source, usable_device(device)
        self.precision = usable_precision(precision, self.device)
        self.cache, self.ubatch, self.context, self.verbose = cache, ubatch, context, verbose
        self.peers = peers
        self.hyperparameters = Hyperparameters(source.metadata, os.fspath(source.path))
        placement.check(self.device)

        def build(place: Placement) -> tuple[Weights, Network]:
            weights = Weights(source, place, DecodeCache(cache_bytes), switches, share)
            network = build_network(self.hyperparameters, weights)
            self._leave_to_reference_path(network)
            return weights, network if stage is None else replace(network, stage=stage)

        n_layers = self.hyperparameters.integer("block_count", 0)
        if placement.fit_margin is not None and self.device.type != "cpu":
            place = fit(
                self.device,
                n_layers,
                placement.fit_margin,
                lambda p: self._needed(*build(p)),
                memory.free_bytes(self.device) or 0,
                [tensor.name for tensor in source.tensors],
            )
        else:
            here = None if stage is None else stage.layers
            place = Placement(self.device, n_layers, placement, here)
        self.weights, self.network = build(place)
        self.weights.store.rounds = self.precision != "f32"  # what is on the CPU
        if self.device.type != "cpu":
            self._offload_experts()
        self.n_vocab = self.network.n_vocab

    def _leave_to_reference_path(self, network: Network) -> None:
        """Evaluate in float32 on a GPU what has several residual streams: kernels know one."""
        if network.streams is not None and self.is_fast:
            self.precision = "f32"
            if self.verbose is not None:
                self.verbose("several residual streams have no kernels: float32, layer by layer")

    def _offload_experts(self) -> None:
        """Let experts on the CPU run as programs, if there are any."""
        if "cpu" in {moe.experts.down.device.type for moe in moe_layers(self.network)}:
            from .cpu.offloaded import offload_experts

            rounds, weights = self.precision != "f32", self.weights
            offload_experts(self.network, weights.store, weights.taps, rounds=rounds)

    def __repr__(self) -> str:
        """Architecture, size, type, device and context, in a line."""
        source, trained = self.source, self.hyperparameters.integer("context_length", None)
        return (
            f"<Model {self.architecture}, {describe.short_count(describe.n_parameters(source))}"
            f" parameters, {describe.file_type_name(source)}"
            f" ({describe.bits_per_weight(source):.2f} bits per weight), {self.precision} on"
            f" {self.device}{'' if trained is None else f', context {trained}'}:"
            f" {printable(source.path, 400)}>"
        )

    def load(self, progress: LoadProgress | None = None) -> None:
        """Copy weights to GPUs now instead of at their first use. `progress(bytes done, bytes in
        total)` is called from time to time.
        """
        self.weights.store.load(progress)

    def memory(self, rows: int = 0, window: int = 0, context: int = 0) -> list[memory.DeviceMemory]:
        """Return what the model takes on each device for a sequence of `context` tokens (0: the
        model's `context`) of which `rows` are evaluated at a time (0: `ubatch`); see
        `memory.estimate`.
        """
        return self._memory(self.weights, self.network, rows, window, context)

    def _memory(
        self, weights: Weights, network: Network, rows: int = 0, window: int = 0, context: int = 0
    ) -> list[memory.DeviceMemory]:
        return memory.estimate(
            network,
            weights,
            capacity=padded(context or self.context),
            settings=self._settings(None, weights),
            rows=rows or self.ubatch,
            window=window,
            precision=self.precision if self.is_fast else "f32",
        )

    def _settings(self, settings: CacheSettings | None, weights: Weights) -> CacheSettings:
        """How a sequence is kept for which `settings` (None: the model's) are asked."""
        chosen = settings or self.cache or CacheSettings()
        arguments.instance("settings", chosen, CacheSettings)
        # Kernels read caches whose positions follow each other.
        full = chosen.swa_full or weights.switches.swa_full or self.is_fast
        return replace(chosen, swa_full=full)

    @property
    def is_fast(self) -> bool:
        """Whether kernels evaluate the model on a GPU."""
        return self.precision != "f32" and self.device.type != "cpu"

    def _needed(self, weights: Weights, network: Network) -> int:
        return sum(m.total for m in self._memory(weights, network) if m.device == self.device)

    @property
    def architecture(self) -> str:
        """`general.architecture` of the file."""
        return self.hyperparameters.architecture

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file, made at the first use. TokenizerError if it has none."""
        return Tokenizer.from_metadata(self.source.metadata, file=os.fspath(self.source.path))

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """BOS and EOS of the vocabulary, also if there is no tokenizer for it."""
        return SpecialTokens.read(self.source.metadata, file=os.fspath(self.source.path))

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files: it is alone, or the first rank."""
        if self.peers is not None:
            return self.peers.rank == 0
        stage, share = self.network.stage, self.weights.share
        return (stage is None or stage.line.rank == 0) and (share is None or share.rank == 0)

    @property
    def group(self) -> Meeting | Line | None:
        """The ranks that evaluate this model together; None for a whole model."""
        if self.network.stage is not None:
            return self.network.stage.line
        return None if self.weights.share is None else self.weights.share.meeting

    @contextmanager
    def observe(
        self,
        callback: Callable[[str, torch.Tensor, torch.Tensor | None], None],
        *,
        reads: bool = True,
    ) -> Iterator[None]:
        """While the context is open, call `callback(tensor name, x, experts)` for every product
        with a weight matrix.

        x is float32[rows, n_in] and must not be kept or changed. For expert tensors there is one
        call with all rows, grouped by expert, and experts int64[rows] is the expert of each row;
        the heads of latent attention are seen in the same way. It is None for other tensors. reads:
        the callback uses x, so that latent attention is evaluated in the form whose inputs are
        those of its tensors. UsageError for that with a rank of a split model.
        """
        if reads and self.group is not None:
            raise UsageError(
                "a rank has a part of the model: inputs of products are those of a whole one"
            )
        taps = self.weights.taps
        taps.observers.append(callback)
        taps.readers += reads
        try:
            yield
        finally:
            taps.observers.remove(callback)
            taps.readers -= reads

    @contextmanager
    def observe_fast(self, observer: FastObserver) -> Iterator[None]:
        """While the context is open, show `observer` what products read on the fast path, in
        bfloat16 or float16; layers that cannot show it run on the reference path. With precision
        f32, or beside an observer of `observe`, this is `observe`.

        Only `hidden` and `logits` show inputs on the fast path.
        """
        taps = self.weights.taps
        with self.observe(observer):
            taps.fast.append(observer)
            try:
                yield
            finally:
                taps.fast.remove(observer)

    def close(self) -> None:
        """Close the file and free the memory of GPUs."""
        self.weights.store.release()
        self.source.close()
        if self.device.type == "cuda":
            # torch keeps freed memory, and cannot reuse that of graphs. Once it is returned to the
            # driver, `memory.free_bytes` counts it as free before the next model is placed, and
            # other processes can use it.
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
