"""How a model is split over devices (`-sm`), and with what it can be combined. Imports nothing
heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UsageError, printable

if TYPE_CHECKING:
    from ..options import LoadOptions
    from .ranks import Ranks

MODES = ("none", "layer", "row", "graph", "attn", "tensor", "data")
_GRAPH = ("graph", "row", "attn", "tensor")
_NUMBER = r"(\d+(\.\d*)?|\.\d+)"
_SHARES = rf"(?=.*[1-9]){_NUMBER}([,/;]{_NUMBER})*"
MOST_RANKS = 8
REDUCE_TYPES = ("f32", "bf16", "f16", "q8_0")
EXPERT_CHOICES = ("auto", "columns", "whole")
NO_PROMPT_CACHE = "a prompt cache does not go together with -sm graph or layer"
DEFAULT_TIMEOUT = 600.0  # seconds
MOST_TIMEOUT = 1e7


@dataclass(frozen=True)
class Split:
    """mode: `none`: one device; others have one process per device. `graph`: each has a part of
    every layer; `layer`: some whole layers; `data`: the whole model, for other chunks of a text.
    devices: numbers of the GPUs of this host in the order of its ranks; unused on the CPU. shares:
    the part of the work of each device, of all hosts. why: what the user should know of it, or "".
    """

    mode: str
    devices: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = (1.0,)
    why: str = ""

    @property
    def n_ranks(self) -> int:
        """How many processes evaluate the model."""
        return len(self.shares) if has_ranks(self.mode) else 1


def is_graph(mode: str | None) -> bool:
    """Return whether a value of `-sm` asks for a part of every layer on each device."""
    return mode in _GRAPH


def has_ranks(mode: str | None) -> bool:
    """Return whether a value of `-sm` asks for one process per device."""
    return is_graph(mode) or mode in ("layer", "data")


def parse_shares(text: str | Sequence[float]) -> tuple[float, ...]:
    """Return the shares of devices from `3,1` (or `3/1`), or from numbers. UsageError for anything
    else.
    """
    shown = printable(str(text), 40)
    if isinstance(text, str):
        parts = re.split("[,/;]", text)
        for i, part in enumerate(parts, 1):
            if re.fullmatch(f"-{_NUMBER}", part) and float(part) < 0:
                raise UsageError(
                    f"-ts is '{shown}': share {i} is {printable(part, 20)}, expected 0 or more"
                )
        numbers = parts if re.fullmatch(_SHARES, text) else ()
    else:
        given = text if isinstance(text, Sequence) else (text,)
        are_shares = all(isinstance(x, (int, float)) and x >= 0 for x in given)
        numbers = given if are_shares else ()
    if not numbers:
        raise UsageError(f"-ts is '{shown}', expected shares such as 3,1, not all of them 0")
    shares = tuple(map(float, numbers))
    if not 0 < sum(shares) < math.inf:
        raise UsageError(f"-ts is '{shown}', shares that are too large or too small")
    return shares


def planned_split(
    options: LoadOptions, on_gpu: bool, n_gpus: int, ranks: Ranks | None = None
) -> Split:
    """Return the split that the options ask for, on a host with `n_gpus`, in the process `ranks`
    (None: alone). UsageError for devices that are not there, and for options that contradict the
    split.
    """
    mode = options.split_mode or "none"
    if is_graph(mode):
        mode = "graph"
    if has_ranks(mode) and ranks is not None and not ranks.launched:
        check_combinations(options)
        return _of_processes(mode, options, on_gpu, n_gpus, ranks)
    if not on_gpu and not has_ranks(mode):
        return Split("none", why="everything is on the CPU")
    if mode == "none":
        return Split("none", (options.main_gpu or 0,))
    given = None if options.tensor_split is None else parse_shares(options.tensor_split)
    if on_gpu and not n_gpus:
        raise UsageError("there is no GPU here")
    if not on_gpu and given is None:
        return Split("none", why="everything is on the CPU, and -ts names no shares")
    shares = given or (1.0,) * n_gpus
    if on_gpu and len(shares) > n_gpus:
        raise UsageError(f"-ts or -dev asks for {len(shares)} GPUs, here are {n_gpus}")
    devices = [i for i, share in enumerate(shares) if share > 0]
    if (main := options.main_gpu) is not None and on_gpu:
        if main not in devices:
            raise UsageError(f"-mg is {main}, which is not one of the GPUs {devices}")
        devices.remove(main)
        devices.insert(0, main)
    devices = devices[: options.max_gpu or None]
    if len(devices) > MOST_RANKS:
        raise UsageError(f"-sm {mode} over {len(devices)} devices, expected at most {MOST_RANKS}")
    if len(devices) < 2:
        kind = "GPU" if on_gpu else "device"
        return Split("none", tuple(devices), why=f"there is one {kind} to use")
    check_combinations(options)
    total = sum(shares[i] for i in devices)
    chosen = tuple(shares[i] / total for i in devices)
    return Split(mode, tuple(devices), chosen)


def _of_processes(
    mode: str, options: LoadOptions, on_gpu: bool, n_gpus: int, ranks: Ranks
) -> Split:
    """Return the split over processes that torchrun has started: -ts has a share for each of them,
    or for each of one host.
    """
    here = ranks.local_size
    if ranks.size == 1:
        return Split("none", (options.main_gpu or 0,), why="one process was started")
    if on_gpu and here > n_gpus:
        raise UsageError(f"{here} processes were started here, and there are {n_gpus} GPUs")
    given = options.tensor_split
    shares = (1.0,) * ranks.size if given is None else parse_shares(given)
    if len(shares) == here:
        shares *= ranks.size // here
    if len(shares) != ranks.size:
        raise UsageError(
            f"-ts has {len(shares)} shares, but {ranks.size} processes were started, {here} of them"
            " here"
        )
    total = sum(shares)
    return Split(mode, tuple(range(here)), tuple(share / total for share in shares))


@dataclass(frozen=True)
class Combination:
    """What another option does together with `-sm graph` and `-sm layer`. effect: `works` or
    `refused`. why: the reason, or how it works with `graph`; layer: with `layer`.
    """

    flag: str
    given: Callable[[LoadOptions], bool]
    effect: str
    why: str
    layer: str = "as on one device"


COMBINATIONS = (
    Combination(
        "--fit",
        lambda o: o.fit is not None,
        "refused",
        "it chooses by the memory of one GPU, and all ranks need the same placement: give -ngl,"
        " --n-cpu-moe or -ot",
        layer="as with graph",
    ),
    Combination(
        "-cmoe",
        lambda o: o.cpu_moe,
        "works",
        "each rank computes its part of the experts on the CPU",
        layer="each rank computes the experts of its layers on the CPU",
    ),
    Combination(
        "--n-cpu-moe",
        lambda o: o.n_cpu_moe is not None,
        "works",
        "each rank computes its part of these experts on the CPU",
        layer="each rank computes those of its layers on the CPU",
    ),
    Combination(
        "-ot",
        lambda o: bool(o.override_tensor),
        "works",
        "a pattern holds for every rank; CUDAn must be the device of the rank, so name CPU",
        layer="a pattern holds for the rank of the layer; CUDAn must be its device, so name CPU",
    ),
    Combination(
        "-ngl",
        lambda o: o.gpu_layers is not None,
        "works",
        "layers on the CPU are split as well, and summed there",
        layer="the layers that are on GPUs are divided; the first rank has the others too",
    ),
    Combination(
        "-muge", lambda o: o.merge_gate_up, "works", "each rank merges its rows of gate and up"
    ),
    Combination(
        "-ctk",
        lambda o: o.cache_type_k is not None,
        "works",
        "each rank has the cache of its heads",
        layer="each rank has the cache of its layers",
    ),
    Combination("-ctv", lambda o: o.cache_type_v is not None, "works", "as -ctk"),
    Combination("-khad", lambda o: o.k_cache_hadamard, "works", "it acts on each head"),
    Combination("-vhad", lambda o: o.v_cache_hadamard, "works", "it acts on each head"),
    Combination("-ser", lambda o: o.expert_reduction is not None, "works", "all ranks route alike"),
    Combination("-fa off", lambda o: o.flash_attn in (False, "off"), "works", "for local heads"),
    Combination("-amb", lambda o: o.attention_max_batch > 0, "works", "the bound is per rank"),
    Combination("-mla", lambda o: o.mla != 3, "works", "heads are split, each rank has the cache"),
    Combination("--swa-full", lambda o: o.swa_full, "works", "as on one device"),
)


def check_combinations(options: LoadOptions) -> None:
    """UsageError for what cannot be combined with several ranks."""
    for one in COMBINATIONS:
        if one.effect == "refused" and one.given(options):
            raise UsageError(
                f"{one.flag} does not go together with -sm {options.split_mode}: {one.why}"
            )


def split_notes(options: LoadOptions, split: Split, on_gpu: bool = True) -> list[tuple[str, str]]:
    """Return (flags, why) of options about the split that were given and change nothing."""
    of_sums = {"-grt": options.reduce_type, "--split-experts": options.split_experts}
    notes: list[tuple[Sequence[str], str]] = []
    if not has_ranks(split.mode):
        of_split = {
            "-sm": options.split_mode if options.split_mode != split.mode else None,
            "-ts": options.tensor_split,
            "--max-gpu": options.max_gpu,
            **of_sums,
            "-mg": options.main_gpu if options.main_gpu != split.devices[0] else None,
        }
        why = split.why or "one device has the whole model (-sm graph and -sm layer split it)"
        notes.append(([flag for flag, value in of_split.items() if value], why))
    else:
        if split.mode != "graph":
            kind = "whole layers" if split.mode == "layer" else "the whole model"
            given = [flag for flag, value in of_sums.items() if value is not None]
            notes.append((given, f"ranks with {kind} add nothing up"))
        if options.main_gpu is not None and not on_gpu:
            notes.append((["-mg"], "everything is on the CPU"))
        elif options.main_gpu is not None and options.main_gpu != split.devices[0]:
            notes.append((["-mg"], "each process takes the device of its own number"))
        if options.max_gpu and options.max_gpu < split.n_ranks:
            notes.append((["--max-gpu"], f"{split.n_ranks} processes were started"))
    return [(", ".join(flags), why) for flags, why in notes if flags]
