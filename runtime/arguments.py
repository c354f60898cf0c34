"""The options of `Model`: of the right kind, or a UsageError that names the option."""

from __future__ import annotations

from ..errors import UsageError, printable
from ..formats.arguments import callback, instance, whole_number
from .parallel.share import Share
from .parallel.stages import Stage
from .state.cache import CacheSettings
from .weights.placement import Request
from .weights.switches import Switches


def check_options(**options) -> None:
    """UsageError for an option of `Model` that does not exist or is not what it should be."""
    for name, value in options.items():
        if name in ("cache_bytes", "context"):
            whole_number(name, value, 0)
        elif name == "ubatch":
            whole_number(name, value, 1)
        elif name == "placement":
            instance(name, value, Request, "a runtime.weights.placement.Request")
        elif name == "switches":
            instance(name, value, Switches, "a runtime.weights.switches.Switches")
        elif name == "cache":
            instance(
                name, value, (CacheSettings, type(None)), "a runtime.state.cache.CacheSettings"
            )
        elif name == "share":
            instance(name, value, (Share, type(None)), "a runtime.parallel.share.Share")
        elif name == "stage":
            instance(name, value, (Stage, type(None)), "a runtime.parallel.stages.Stage")
        elif name == "verbose":
            callback(name, value)
        elif name != "precision":
            raise UsageError(f"a model has no option '{printable(name, 40)}'")
