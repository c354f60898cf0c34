"""Decoding steps of a network on the CPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..layers import expert_rows, many_rows
from ..layers.attention import Attention
from ..layers.block import AttentionAndStateSpace, Block, Branch
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.mla import MLA
from ..layers.moe import MoE
from ..layers.norm import Norm
from ..layers.recurrent.delta_net import DeltaNet
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.recurrent.ngrams import Ngrams
from ..layers.recurrent.short_conv import ShortConv
from ..layers.recurrent.state_space import StateSpace
from ..layers.rope import Rope
from ..network.experts import moe_layers
from ..network.network import Network
from ..simd import tiles, together
from ..simd.operations import compile_together, not_compiled, operation, rehearsed
from ..simd.step import norms
from ..simd.threads import Program, compile_loops, run
from ..state.cache import CacheSettings, KVCache
from ..state.latent import LatentCache
from ..state.recurrent import RecurrentState
from ..state.sequence import State
from ..state.table import BLOCK_TOKENS, Table
from ..weights.encoded import Matrix
from ..weights.matrix import FEW_ROWS, FEW_ROWS_ONCE
from ..weights.ranges import RangeName, opened, recording
from ..weights.store import TensorStore
from .attention import plan_attention
from .choice import Largest
from .delta import plan_delta_net
from .feed_forward import plan_gated, plan_moe, plan_plain
from .kimi_delta import plan_kimi_delta
from .latent import plan_latent
from .memory import Buffer
from .norms import add_and_norm
from .plan import LANES, NotPlanned, Plan
from .short_conv import plan_short_conv
from .state_space import plan_state_space

_PLANS: list[tuple[type, Callable[[Plan, Any, Buffer], Buffer]]] = [
    (Attention, plan_attention),
    (MLA, plan_latent),
    (DeltaNet, plan_delta_net),
    (KimiDelta, plan_kimi_delta),
    (ShortConv, plan_short_conv),
    (StateSpace, plan_state_space),
    (GatedFFN, plan_gated),
    (PlainFFN, plan_plain),
    (MoE, plan_moe),
]
# Lengths of prompts with code of their own: steps; rows of an expert; few rows of other matrices,
# if these stay in memory in 8 bits or not; more rows; compiled layers.
_LENGTHS = (
    *(range(1, sys.maxsize), range(2, sys.maxsize), range(2, FEW_ROWS + 1)),
    *(range(2, FEW_ROWS_ONCE + 1), range(FEW_ROWS + 1, sys.maxsize)),
    range(many_rows.LEAST_ROWS, sys.maxsize),
)


class StepPath:
    """Steps of one token of a network that is on the CPU as a whole.

    report: is called with a line if steps run on the reference path, and why.
    """

    def __init__(
        self, network: Network, store: TensorStore, report: Callable[[str], None] | None = None
    ):
        self._network, self._store, self._report = network, store, report
        self._programs: dict[tuple[CacheSettings, int], StepProgram | None] = {}
        self._lengths = _lengths(network)
        self._n_threads = self._n_changes = 0
        self._lock = threading.Lock()
        self.watched: tuple[str, ...] = ()  # the first and the last product of a step
        self.largest = Largest()
        self._ahead: set[range] = set()  # ranges of `_LENGTHS` that were compiled for

    def step(self, token: int, state: State, copied: bool = True) -> torch.Tensor | None:
        """Append a token: logits float32[vocab] after it, in memory that the next step overwrites
        unless they are copied. None, with nothing changed, if the reference path has to do it:
        there is no program, or a number is not finite.
        """
        with self._lock:
            program = self._program(state)
            if program is None:
                return None
            self.watched = program.watched
            logits = program.step(token, state)
            return logits.clone() if copied and logits is not None else logits

    def compile_ahead(self, state: State, n: int) -> None:
        """Compile what a sequence like `state` needs for prompts of n tokens and for steps, unless
        it is on disk. For models whose products are in 8 bits.
        """
        lengths = {length for length in _LENGTHS if n in length}
        with self._lock:
            if lengths <= self._ahead:
                return
            self._ahead |= lengths
            with rehearsed() as wanted:
                with contextlib.suppress(NotPlanned):
                    program = StepProgram(
                        self._network, state, torch.get_num_threads(), rounds=self._store.rounds
                    )
                    program.ask_for_prompts(n)
                if n >= many_rows.LEAST_ROWS:
                    _ask_for_rows(self._network)
                self.largest.ask()
            compile_together(wanted, [compile_loops])

    def count_missing(self, state: State) -> int:
        """Return how many operations of a step are not compiled yet."""
        with self._lock, rehearsed() as wanted, contextlib.suppress(NotPlanned):
            StepProgram(self._network, state, torch.get_num_threads(), rounds=self._store.rounds)
        return len(not_compiled(wanted))

    def has_program(self, states: Iterable[State]) -> bool:
        """Return whether there are programs for all of these sequences."""
        with self._lock:
            return all(self._program(state) is not None for state in states)

    def _program(self, state: State) -> StepProgram | None:
        n_threads = torch.get_num_threads()
        if n_threads > self._n_threads or self._store.n_changes != self._n_changes:
            self._programs.clear()
            self._n_threads, self._n_changes = n_threads, self._store.n_changes
        key = state.settings, sum(state.context > length for length in self._lengths)
        if key not in self._programs:
            try:
                self._programs[key] = StepProgram(
                    self._network, state, n_threads, rounds=self._store.rounds
                )
            except NotPlanned as reason:
                self._programs[key] = None
                if self._report is not None:
                    self._report(f"steps run layer by layer: {reason}")
        return self._programs[key]


class StepProgram:
    """The program of a step, for sequences like `state`. rounds: see `Plan`."""

    def __init__(self, network: Network, state: State, n_threads: int, *, rounds: bool):
        if network.inputs is not None or network.join is not None:
            raise NotPlanned("layers that need the tokens themselves, or other ranks")
        self._plan = plan = Plan(n_threads, state.settings, state.context, rounds=rounds)
        self._sequences: WeakKeyDictionary[State, Sequence] = WeakKeyDictionary()
        memory, width = plan.memory, network.width
        h, x = memory.own_floats("h", width), memory.own_floats("x", width)
        embedded = memory.floats("embedded", width)
        table = network.embedding.matrix
        if not isinstance(table, Matrix) or (rows := table.kept()) is None:
            raise NotPlanned("the embedding is not kept in memory")
        with plan.within(network.embedding.range):
            self._embedding, self._rows = plan.decoding(rows, embedded), rows
        plan.meet()
        delta, first, post = embedded, float(network.embedding_scale), None
        for layer, block in enumerate(network.blocks):
            _check(block)
            for branch in block.branches:
                kind = RangeName(f"blk.{layer}", type(branch.module).__name__)
                with plan.within(_range_of(branch.norm, kind)):
                    add_and_norm(plan, h, delta, width, branch.norm, x, first=first, post=post)
                first, post = 0.0, branch.post_norm
                for number, module in enumerate(branch.modules):
                    plan.place = _place_of(branch, number, layer)
                    with plan.within(RangeName(f"blk.{layer}", type(module).__name__)):
                        if number:  # reads what the one before has read
                            add_and_norm(plan, h, delta, width, None, x)
                        delta = _planned(plan, module, x if branch.norm is not None else h)
        with plan.within(_range_of(network.output_norm, RangeName("output", "output_norm"))):
            add_and_norm(plan, h, delta, width, network.output_norm, x, first=first, post=post)
        found = memory.floats("logits", -(-network.output.rows // LANES) * LANES)
        plan.product(network.output, x, found)
        plan.meet()
        if network.softcap:
            plan.add(operation(norms.cap), found.address, network.n_vocab, float(network.softcap))
        self._program, self.watched = plan.program(), (plan.names[0], plan.names[-1])
        self._ranges: list[tuple[RangeName, Program]] = []
        self._logits = memory.view(found, network.n_vocab)
        self._result = torch.from_numpy(self._logits)

    def ask_for_prompts(self, n: int) -> None:
        """Ask for the products of prompts of n tokens with these weights."""
        if n > FEW_ROWS and tiles.available():
            for type in self._plan.rounded_types:
                tiles.operations_of(type)
        for type, rounds, matrix, is_expert in self._plan.multiplied:
            if n > 1 and (is_expert or matrix.is_few(n)):  # an expert has any number of tokens
                together.operation_of(type, rounds=rounds)

    def step(self, token: int, state: State) -> torch.Tensor | None:
        """See `StepPath.step`; the logits are not copied."""
        state.reserve(1)
        if (sequence := self._sequences.get(state)) is None:
            sequence = self._sequences[state] = Sequence(state)
        self._plan.frame[0], self._plan.frame[1] = state.n_past, sequence.address()
        for layer, kept in sequence.recurrent:
            kept.check(state.n_past, layer)
        self._embedding[0] = self._rows.data.ctypes.data + token * self._rows.data.strides[0]
        self._run(torch.get_num_threads())
        if not np.isfinite(self._logits.sum()):
            return None
        for _, kept in sequence.recurrent:
            kept.n_seen += 1
        state.advance(1)
        return self._result

    def _run(self, n_threads: int) -> None:
        """Run the program; while a model is profiled, range by range."""
        if not recording:
            run(self._program, n_threads)
            return
        self._ranges = self._ranges or self._plan.ranges()
        for name, program in self._ranges:
            with opened(*name):
                run(program, n_threads)


class Sequence:
    """The addresses of what layers keep of a sequence, see `simd.step.heads`."""

    def __init__(self, state: State):
        self._places = np.zeros((len(state.layers), 3), dtype=np.int64)
        self.recurrent: list[tuple[int, RecurrentState]] = []
        self._tables = {window: TableRows(table) for window, table in state.tables.items()}
        for layer, (kept, window) in enumerate(zip(state.layers, state.windows, strict=True)):
            if isinstance(kept, KVCache):
                storage = kept.storage
                addresses = storage.k.data_ptr(), storage.v.data_ptr()
                self._places[layer] = *addresses, self._tables[window].address
            elif isinstance(kept, LatentCache):
                rows = kept.rows.storage.k.data_ptr()
                self._places[layer] = rows, rows, self._tables[window].address
            elif isinstance(kept, RecurrentState):
                self._places[layer, :2] = kept.inputs.data_ptr(), kept.memory.data_ptr()
                self.recurrent.append((layer % state.n_layers, kept))

    def address(self) -> int:
        """Return where the addresses are, of blocks as they are now."""
        for table in self._tables.values():
            table.refresh()
        return self._places.ctypes.data


class TableRows:
    """The first row of every block of a table."""

    def __init__(self, table: Table):
        self._table, self._fixed = table, False
        self._rows = np.zeros(table.capacity // BLOCK_TOKENS + 2, dtype=np.int64)
        self.address = self._rows.ctypes.data

    def refresh(self) -> None:
        """Read the table; once is enough while it is reserved."""
        if self._fixed and self._table.run is not None:
            return
        blocks = self._table.blocks
        self._rows[: len(blocks)] = blocks
        self._rows[: len(blocks)] *= BLOCK_TOKENS
        self._fixed = self._table.run is not None


def _lengths(network: Network) -> set[int]:
    """Return the lengths of contexts from which on rotations are others."""
    mixers = [mixer for block in network.blocks for mixer in block.mixers]
    ropes = [mixer.rope for mixer in mixers if isinstance(mixer, (Attention, MLA))]
    return {rope.long[0] for rope in ropes if isinstance(rope, Rope) and rope.long is not None}


def _ask_for_rows(network: Network) -> None:
    """Ask for the operations of `many_rows` that layers of this network use."""
    mixers = [mixer for block in network.blocks for mixer in block.mixers]
    ropes = [mixer.rope for mixer in mixers if isinstance(mixer, (Attention, MLA))]
    splits = {rope.style != "norm" for rope in ropes if isinstance(rope, Rope)}
    branches = (branch for block in network.blocks for branch in block.branches)
    modules = [module for branch in branches for module in branch.modules]
    recurrent = {m.spec.value_length for m in modules if isinstance(m, DeltaNet)}
    experts = list(moe_layers(network))
    dense = [*modules, *(moe.shared for moe in experts)]
    gated = [m.down.matrix for m in dense if isinstance(m, GatedFFN)]
    gated += [m.output.matrix for m in modules if isinstance(m, DeltaNet)]
    gated += [moe.experts.down.matrices[0] for moe in experts]
    gates = {isinstance(matrix, Matrix) and matrix.is_rounded for matrix in gated}
    if experts:  # few rows of one are multiplied as they are stored
        gates.add(False)
    many_rows.ask_for_operations(splits, recurrent, gates)
    expert_rows.ask_for_operations({moe.spec for moe in experts})


def _check(block: Block) -> None:
    if block.output_scale is not None:
        raise NotPlanned("layers whose result is multiplied")
    for branch in block.branches:
        if branch.sum is not None:
            raise NotPlanned("layers of several ranks")
        if branch.streams is not None or isinstance(branch.module, Ngrams):
            raise NotPlanned("layers with several residual streams")


def _place_of(branch: Branch, number: int, layer: int) -> int:
    """Return the number of what a sequence keeps for one of the modules of a branch."""
    m = branch.module
    return m.place if number and isinstance(m, AttentionAndStateSpace) else layer


def _range_of(norm: Norm | None, other: RangeName) -> RangeName:
    return other if norm is None else norm.range


def _planned(plan: Plan, module: Any, x: Buffer) -> Buffer:
    for kind, planned in _PLANS:
        if type(module) is kind:
            return planned(plan, module, x)
    raise NotPlanned(f"no program for {type(module).__name__}")
