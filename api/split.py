"""Plan how a model is split over GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.options import unknown_option
from .source import PathLike

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..runtime.split_report import SplitReport


def plan_split(
    model: PathLike | Source,
    shares: str | Sequence[float],
    *,
    synthetic: bool = False,
    merge_gate_up: bool = False,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    **options: Any,
) -> SplitReport:
    """Return what GPUs, one for each of the shares (numbers, or "3,1"), would hold of a model and
    compute, and how fast that is predicted to be. No matrix is read.

    model: a path, or a source; with `synthetic` a known shape such as `llama-70b:IQ4_K`. options:
    experts, reference, context, n_past, n_prompt, reduce_bytes, n_hosts and costs of
    `runtime.split_report.split_report`. Raise NoPlanError, a UsageError, for a model that cannot be
    split, and UsageError for shares that are not possible or an unknown option.
    """
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..formats.source import Source
    from ..runtime.parallel.modes import parse_shares
    from ..runtime.split_report import split_report
    from ..runtime.state.cache import CacheSettings
    from ..runtime.weights.switches import Switches
    from .bench import random_source
    from .source import open_source

    known = inspect.signature(split_report).parameters.keys() - {"source", "switches", "settings"}
    for name in options:
        if name not in known:
            raise unknown_option(plan_split, name, known)
    options["switches"] = Switches(merge_gate_up=merge_gate_up)
    options["settings"] = CacheSettings(cache_type_k, cache_type_v)
    shares = parse_shares(shares)
    if isinstance(model, Source):
        return split_report(model, shares, **options)
    with random_source(str(model)) if synthetic else open_source(model) as source:
        return split_report(source, shares, **options)
