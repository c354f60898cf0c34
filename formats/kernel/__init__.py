"""Compile plain Python functions over one block into native loops over many blocks.

A codec or a search is written once, as a function over the small arrays of one block. The loop over
rows is made here from a template. Fast math is off and numba does not contract `a*b + c` on the
CPU, so every function rounds exactly where its source says, and the same source can be compiled for
a GPU with another loop.

Compiled functions release the GIL: callers get parallelism from threads over row ranges, which
cannot change any result. Code is cached on disk (`cache`). `rehearse` says which code a call needs
and whether it is cached.
"""

from .cache import is_cached, locked, share_between_processes, sources_digest
from .functions import (
    Code,
    CompiledLoop,
    compiled_callback,
    device_function,
    inlined_function,
    part_function,
    rehearse,
)
from .templates import defined, from_source, over_blocks, specialize, specialized_loop, unbound

__all__ = [
    "Code",
    "CompiledLoop",
    "compiled_callback",
    "defined",
    "device_function",
    "from_source",
    "inlined_function",
    "is_cached",
    "locked",
    "over_blocks",
    "part_function",
    "rehearse",
    "share_between_processes",
    "sources_digest",
    "specialize",
    "specialized_loop",
    "unbound",
]
