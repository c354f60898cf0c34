"""How long a run will take and how much memory: its own pipeline, tried for a moment on rows of the
very tensors.

Tensors are put into kinds, whose pieces cost the same per element: the types before and after in
every output, with or without importances, the length of a row and about the size of a piece. Some
pieces of every kind go through `run.stream`, with the threads or devices of the run, from the
source into a scratch file on the disk of the outputs. What a kind costs per element is multiplied
by its elements. The first piece of a kind, which compiles its search or loads the compiled code, is
timed apart.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...formats.output import disk_needs
from ...formats.source import Source
from ..cuda import pieces as cuda_run
from ..plan.plan import PlannedTensor
from . import background as behind
from .kinds import Estimate, Kind
from .piece import PIECE_ELEMENTS, ImportanceLookup
from .sample import Rows, SampledSource, spread
from .scratch import Scratch
from .stream import RELEASE_BYTES, RELEASE_BYTES_DEVICE, Output, stream, thread_count

TIMED_SECONDS = 0.5  # that a kind is tried for, in all
_ROUNDS = 2
_SIZINGS = 3
_FIRST_ELEMENTS = 1 << 14
_SMALL_SHARE = 0.02  # kinds with less of the elements are tried for a quarter of the time


def estimate_run(
    source: Source,
    plans: Sequence[Sequence[PlannedTensor]],
    lookups: Sequence[ImportanceLookup | None],
    *,
    threads: int = 0,
    devices: Sequence[int] = (),
    files: Sequence[tuple[str | os.PathLike, int]] = (),
    setup: float = 0.0,
    timed_seconds: float = TIMED_SECONDS,
) -> Estimate:
    """Time and memory of `run.stream` with these plans, one for each output, on this machine as
    busy as it is now.

    files: paths and bytes of the outputs; a file without a name is written beside the first. setup:
    seconds that the caller's preparations took. Reads some rows, and raises what reading and
    quantizing them raises, such as NonFiniteError.
    """
    threads = thread_count(threads)
    before = resident_bytes("VmHWM")
    disks = disk_needs(files)
    kinds = kinds_of(source, plans, lookups, bool(devices))
    n_elements = sum(kind.n_elements for kind in kinds)
    with Scratch(disks[0].folder if disks else None) as scratch, _compiling() as compiling:
        trial = _Trial(source, lookups, threads, devices, scratch)
        for kind in kinds:
            trial.first(kind, compiling)
        base = resident_bytes()
        for turn in range(_ROUNDS):
            for kind in kinds:
                share = 1 if kind.n_elements >= _SMALL_SHARE * n_elements else 0.25
                trial.timed(kind, share * timed_seconds / _ROUNDS, (turn + 0.5) / _ROUNDS)
        writing, finishing = scratch.seconds_for(
            sum(plan.target.n_bytes for planned in plans for plan in planned)
        )
    working, loading = (
        sum(kind.seconds for kind in kinds),
        sum(kind.first for kind in kinds) + trial.filling,
    )
    total = setup + loading + max(working, writing) + finishing
    peak = (
        base
        + memory_of_pieces(kinds, trial.workers)
        + (behind.MAX_BYTES if writing > working else 0)
    )
    return Estimate(
        total,
        max(before, peak),
        setup,
        loading,
        max(working, writing),
        finishing,
        sum(compiling),
        writing > working,
        disks,
        kinds,
    )


def kinds_of(
    source: Source,
    plans: Sequence[Sequence[PlannedTensor]],
    lookups: Sequence[ImportanceLookup | None],
    with_devices: bool = False,
) -> list[Kind]:
    """The kinds of a run, in the order in which it meets them."""
    wanted: dict[str, list[tuple[int, PlannedTensor]]] = defaultdict(list)
    for output, planned in enumerate(plans):
        for plan in planned:
            wanted[plan.source.name].append((output, plan))
    kinds: dict[tuple, Kind] = {}
    for info in source.tensors:
        if own := wanted.get(info.name):
            kept, on_device = (
                all(plan.kept for _, plan in own),
                with_devices and all(cuda_run.takes(plan) for _, plan in own),
            )
            weighted = tuple(
                not plan.kept
                and lookups[output] is not None
                and lookups[output](info.name, info.shape) is not None
                for output, plan in own
            )
            matrices = 1 if kept or on_device else info.n_matrices
            piece = min(
                cuda_run.PIECE_ELEMENTS if on_device else PIECE_ELEMENTS,
                info.n_elements // matrices,
            )
            key = (
                info.type.name,
                tuple((output, plan.target.type.name, plan.nan_to_zero) for output, plan in own),
                weighted,
                0 if kept else info.n_cols,
                piece.bit_length(),
            )
            kind = kinds.setdefault(key, Kind(info, tuple(own), any(weighted), piece, on_device))
            kind.piece = max(kind.piece, piece)
            kind.tensors.append(info)
    return list(kinds.values())


class _Trial:
    """Runs some pieces of kinds. workers: pieces that are worked on at a time. filling: seconds
    until the devices had memory for all pieces under way.
    """

    def __init__(
        self,
        source: Source,
        lookups: Sequence[ImportanceLookup | None],
        threads: int,
        devices: Sequence[int],
        scratch: Scratch,
    ):
        self.source, self.lookups, self.threads, self.devices, self.scratch = (
            source,
            lookups,
            threads,
            devices,
            scratch,
        )
        self.workers = cuda_run.slot_count(len(devices), threads) if devices else threads
        self.filling = 0.0
        self._pace: dict[int, float] = {}  # of a kind: seconds per element and worker, so far

    def first(self, kind: Kind, compiling: list[float]) -> None:
        """Load or compile what the kind needs, and see roughly how fast it is."""
        rows = spread(kind.tensors, 1, _FIRST_ELEMENTS, kind.group)
        before, once = sum(compiling), self._run(kind, rows)
        again = self._run(kind, rows)
        kind.first = max(0.0, once - (sum(compiling) - before) - again)
        self._pace[id(kind)] = again / rows[0].n_elements

    def timed(self, kind: Kind, seconds: float, offset: float) -> None:
        """About `seconds` of the kind. A trial that turns out much shorter, as too little was known
        of its pace, is made again.
        """
        for _ in range(_SIZINGS):
            n_elements = min(int(seconds / self._pace[id(kind)]) * self.workers, kind.n_elements)
            spent, tried = self._trial(kind, max(1, n_elements), offset)
            self._pace[id(kind)] = spent / tried * self.workers
            if spent > seconds / 3 or n_elements == kind.n_elements:
                break
        kind.spent, kind.tried = kind.spent + spent, kind.tried + tried

    def _trial(self, kind: Kind, n_elements: int, offset: float) -> tuple[float, int]:
        """(seconds, elements) of about so many elements, in pieces as large as the run's if that
        gives every worker two.
        """
        skipped = (
            self.workers if kind.on_device else 0
        )  # the first piece of a worker gets it its memory, which stays
        count = max(2, round(n_elements / kind.piece / self.workers)) * self.workers + skipped
        rows = spread(
            kind.tensors,
            count,
            max(1, min(kind.piece, n_elements // count)),
            kind.group,
            offset,
            kind.on_device,
        )
        started, self.scratch.written_at = time.perf_counter(), []
        spent = self._run(kind, rows)
        if skipped:
            written = self.scratch.written_at[
                len(kind.planned) - 1 :: len(kind.planned)
            ]  # when all outputs had a piece
            spent, before = written[-1] - written[skipped - 1], written[skipped - 1] - started
            self.filling = max(self.filling, before - spent * skipped / (count - skipped))
        return max(spent, 1e-9), sum(own.n_elements for own in rows[skipped:])

    def _run(self, kind: Kind, rows: list[Rows]) -> float:
        """Seconds for these pieces."""
        sampled = SampledSource(self.source, rows)
        outputs: list[Output] = []
        for number, plan in kind.planned:
            planned = [
                replace(plan, source=info, target=info.with_type(plan.target.type))
                for info in sampled.tensors
            ]
            outputs.append(Output(planned, self.scratch, sampled.importance(self.lookups[number])))
        started = time.perf_counter()
        stream(sampled, outputs, threads=self.threads, devices=self.devices)
        return time.perf_counter() - started


def memory_of_pieces(kinds: Sequence[Kind], workers: int) -> int:
    """Bytes that the pieces under way take at most, with the pages of the source that are not
    handed back yet.

    A worker holds the values as float32, their errors and the magnitudes of these; results wait for
    their turn, two for each worker. On devices the host holds what is read and what was made,
    pinned.
    """
    working = waiting = mapped = 0.0
    for kind in kinds:
        stored = kind.source.type.block_bytes / kind.source.type.block_size
        made = [
            plan.target.type.block_bytes / plan.target.type.block_size for _, plan in kind.planned
        ]
        if kind.on_device:
            working = max(working, kind.piece * (4 + sum(made)))
        elif not kind.kept:
            working = max(working, kind.piece * (3 * 4 + max(made)))
        waiting = max(waiting, kind.piece * sum(made) * (1 if kind.on_device else 2))
        window = RELEASE_BYTES_DEVICE if kind.on_device else RELEASE_BYTES
        mapped = max(
            mapped,
            min(window, max(info.n_bytes for info in kind.tensors)) + workers * kind.piece * stored,
        )
    return int(workers * (working + waiting) + mapped)


def resident_bytes(what: str = "VmRSS") -> int:
    """Of this process, now; what: VmHWM for the most it had so far."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what + ":"))


@contextlib.contextmanager
def _compiling() -> Iterator[list[float]]:
    """Seconds that numba spends compiling inside, appended as they are spent; loading compiled code
    is not among them.
    """
    from numba.core import event

    class Listener(event.Listener):
        depth, started = 0, 0.0

        def on_start(self, event: event.Event) -> None:
            if self.depth == 0:
                self.started = time.perf_counter()
            self.depth += 1

        def on_end(self, event: event.Event) -> None:
            self.depth -= 1
            if self.depth == 0:
                seconds.append(time.perf_counter() - self.started)

    seconds: list[float] = []
    with event.install_listener("numba:compile", Listener()):
        yield seconds
