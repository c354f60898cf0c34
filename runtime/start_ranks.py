"""From options to ranks: start them for a command, and join them in a process that is one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, cast

from ..errors import NotFoundError, UsageError
from .parallel.alike import check_alike, load_facts, model_facts
from .parallel.arrival import tell_failure
from .parallel.launch import run_ranks
from .parallel.modes import Split, has_ranks
from .parallel.ranks import Ranks, named_ranks
from .weights.devices import usable_device

if TYPE_CHECKING:
    import torch

    from ..formats.source import Source
    from .network.network import Network
    from .options import LoadOptions
    from .parallel.expert_mode import ExpertChoice
    from .parallel.group import Group
    from .parallel.share import Share
    from .parallel.stages import Stage
    from .weights.split_plan import SplitPlan
    from .weights.switches import Switches

_PACKAGE = __name__.partition(".")[0]
_OF_ONE_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/self/")
_joined: list[Group] = []  # the group of this process, which its models share


def run_as_ranks(
    words: Sequence[str],
    options: LoadOptions,
    *,
    files: Sequence[str] = (),
    check: Callable[[], object] = lambda: None,
    interactive: bool = False,
) -> int | None:
    """Run the command line `words` as one process per device if the options ask for that, and
    return its exit status. None if this process evaluates the model: alone, or because it is a
    rank. interactive: Ctrl-C is for the first rank. files: what the command reads besides adapters;
    before any process starts, NotFoundError if one of all is missing, and UsageError if it is a
    pipe or the like. check: is called then, and
    raises what else would end every rank.
    """
    if not has_ranks(options.split_mode) or Ranks.here() is not None:
        return None
    split = split_of(options)
    if split.n_ranks < 2:
        return None
    device = str(options.device)
    if device.startswith("cuda:"):
        raise UsageError(
            f"--device {device} is one GPU, -sm {split.mode} takes {split.n_ranks}: choose them"
            " with -ts, -mg and --max-gpu"
        )
    for path in (*files, *(adapter.path for adapter in options.adapters())):
        if not os.path.exists(path):
            raise NotFoundError("no such file or folder", file=path)
        if path.startswith(_OF_ONE_PROCESS) or not (os.path.isfile(path) or os.path.isdir(path)):
            raise UsageError(
                f"{path} can be read by one process only, -sm {split.mode} has {split.n_ranks}:"
                " expected a file"
            )
    check()
    command = [sys.executable, "-m", _PACKAGE, *words]
    return run_ranks(command, split.n_ranks, interactive=interactive)


def is_first() -> bool:
    """Return whether this process is the first rank, or evaluates alone: it writes files."""
    ranks = Ranks.here()
    return ranks is None or ranks.rank == 0


@contextmanager
def silent_unless_first() -> Iterator[None]:
    """While the context is open, print nothing in ranks other than the first. Errors that leave it
    can be printed.
    """
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell the other processes of torchrun why this one fails before it has joined them: they wait
    for it. Later they see that its connections end.
    """
    try:
        yield
    except Exception as error:
        ranks = Ranks.here()
        if ranks is not None and not ranks.launched and ranks.size > 1 and not _joined:
            tell_failure(ranks, str(error) or type(error).__name__)
        raise


def split_of(options: LoadOptions) -> Split:
    """Return the split that the options ask for here, without using a device."""
    import torch

    device = str(options.device)  # a torch.device is accepted too
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return options.split(torch.device("cuda" if on_gpu else "cpu"))


def device_here(options: LoadOptions) -> torch.device:
    """Return the device on which this process evaluates, alone or as a rank. UsageError for one
    that is not there.
    """
    split, ranks = split_of(options), Ranks.here()
    own, together = next(iter(split.devices), 0), False
    if has_ranks(split.mode) and ranks is not None:
        together = True
        _check_size(split, ranks)
        own = split.devices[ranks.local_rank]
    if options.device not in ("auto", "cuda"):
        device = usable_device(options.device)
        if together and device.type == "cuda" and device.index != own:
            raise UsageError(
                f"-sm {split.mode} on {device}: the GPU of this rank is cuda:{own} (-ts, -mg)"
            )
        return device
    usable = options.device == "cuda" or _has_gpu()
    if usable and (together or own):
        return usable_device(f"cuda:{own}")
    return usable_device(options.device if usable else "cpu")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_size(split: Split, ranks: Ranks) -> None:
    if split.n_ranks != ranks.size:
        raise UsageError(
            f"-sm {split.mode} is over {split.n_ranks} devices (-ts, --max-gpu), but {ranks.size}"
            " processes were started"
        )


def joined(options: LoadOptions, device: torch.device) -> Group | None:
    """Return the group of ranks that evaluates the model with this process, whose device is
    `device`; None for a single process. UsageError if there are no other processes.
    """
    split, ranks = options.split(device), Ranks.here()
    if not has_ranks(split.mode):
        return None
    if ranks is None:
        raise UsageError(
            f"split_mode {split.mode} needs one process per device: start this program with"
            f" torchrun --nproc-per-node {split.n_ranks}"
        )
    _check_size(split, ranks)
    from .parallel.group import Group

    precision = "f32" if device.type == "cpu" else options.precision or "bf16"
    reduce_type = options.reduce_type or ("bf16" if precision == "int8" else precision)
    if not _joined:
        _joined.append(Group(ranks, device, timeout=options.timeout))
        atexit.register(_joined[0].close)
    _joined[0].reduce_type = reduce_type
    return _joined[0]


def joined_part(
    options: LoadOptions, device: torch.device, source: Source, switches: Switches
) -> Share | Stage | None:
    """Return what this process evaluates of a model together with others: a part of every layer
    with `-sm graph`, some layers with `-sm layer`; None otherwise.

    If there is no split plan for the model, ranks have whole layers, and a line says so. UsageError
    if ranks were given other models or options.
    """
    group = joined(options, device)
    if group is None:
        return None
    if not group.ranks.launched:  # those have the same command line, and the same files
        split = options.split(device)
        facts = load_facts(options, split.shares, split.mode, device) | model_facts(source)
        check_alike(group, facts)
    if options.split_mode == "data":
        return None

    def stage() -> Stage:
        from .split_model import make_stage
        from .weights.placement import ALL

        layers, shares = options.gpu_layers, options.split(device).shares
        found = make_stage(
            source,
            shares,
            group,
            device,
            gpu_layers=ALL if layers is None or layers < 0 else layers,
            switches=switches,
        )
        idle = [str(i) for i in range(group.size) if shares[i] > 0 and not found.layers_of(i)]
        if idle and group.rank == 0:
            named, n_layers = named_ranks(idle), found.ends[-1]
            few = n_layers < sum(share > 0 for share in shares)
            why = f"the model has {n_layers}" if few else "the others cannot be divided"
            print(f"note: no layers for {named}: {why}", file=sys.stderr)
        return found

    if options.split_mode == "layer":
        return stage()
    from .parallel.planner import NoPlanError, plan_split
    from .parallel.share import Share
    from .split_model import network_of

    experts = cast("ExpertChoice", options.split_experts or "auto")
    network, shares = network_of(source, switches), options.split(device).shares
    try:
        plan = plan_split(network, source.tensors, shares, experts=experts)
    except NoPlanError as error:
        if group.rank == 0:
            print(f"note: ranks have whole layers (-sm layer): {error}", file=sys.stderr)
        return stage()
    if group.rank == 0 and device.type == "cuda":
        _note_speed(source, network, plan, device, experts)
    return Share(plan, group.rank, group)


def joined_peers(options: LoadOptions, device: torch.device) -> Group | None:
    """Return the ranks that evaluate other chunks of a text; None without `-sm data`."""
    return joined(options, device) if options.split_mode == "data" else None


def _note_speed(
    source: Source,
    network: Network,
    plan: SplitPlan,
    device: torch.device,
    experts: ExpertChoice,
) -> None:
    """Print a line if fewer GPUs like `device` are predicted to generate faster."""
    import torch

    from .split_report import faster_with_fewer

    room = 0.9 * torch.cuda.get_device_properties(device).total_memory
    if (line := faster_with_fewer(source, network, plan, room, experts)) is not None:
        print(f"note: {line}", file=sys.stderr)
