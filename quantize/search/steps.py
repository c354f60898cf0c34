"""Searches in steps, so that many threads can work on a block, or on a row where the scale belongs
to the row.

A step is a function step(x, w, own, groups, lanes, index) that is called once per group, per 256
elements, per lane or per row. The calls of one step do not depend on each other and see the results
of all earlier steps. A CPU thread makes the calls one after another. A GPU gives a row to a block
of threads, which share the calls and wait for each other between steps. A call only stores results
of one group; later steps add up over a row, in one order, so the bytes are the same.

Arrays: x, w float32[n]; own float32[n], the weights in use and at the end the codes; groups
float32[n / group + 1, COLUMNS], a row per group and a last row for all groups together; lanes
float32[6, LANES], scratch of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from ...formats.kernel import defined, device_function
from .lanes import LANES

# Odd, so that threads that read one column of their groups use different banks of a GPU's shared
# memory.
COLUMNS = 27
SUPER = 256  # elements of a block

_CALLS = {
    "group": "len(x) // {group}",
    "block": f"len(x) // {SUPER}",
    "lane": str(LANES),
    "row": "1",
}


@dataclass(frozen=True)
class Steps:
    """The steps of a search over groups of `group` elements: pairs of a key of _CALLS, which says
    how often the step is called, and the step. The steps numbered in `again` run `rounds` times.
    """

    name: str
    group: int
    steps: tuple[tuple[str, Callable], ...]
    again: range = range(0)
    rounds: int = 1

    def loops(self, loop: str, after: str = "") -> str:
        """Return source that makes all calls: `loop` with {calls} filled in, then a call with index
        i; `after` follows each step.
        """
        source = ""
        for n, (over, _) in enumerate(self.steps):
            lines = (
                loop.format(calls=_CALLS[over].format(group=self.group))
                + f"    step{n}(x, w, own, groups, lanes, i)\n"
                + after
            )
            if n in self.again:
                lines = f"for _ in range({self.rounds}):\n" * (n == self.again[0]) + indent(
                    lines, "    "
                )
            source += indent(lines, "    ")
        return source

    @property
    def names(self) -> dict[str, Any]:
        """Functions that the source of `loops` calls."""
        return {f"step{n}": step for n, (_, step) in enumerate(self.steps)}


@dataclass(frozen=True)
class BlockSearch:
    """The search of a type with one scale per block, and the function that writes the block after
    its steps: write(block, codes, groups) with the block's 256 codes and all rows of `groups`.
    """

    steps: Steps
    write: Callable
    file: str

    name = property(lambda self: f"block_{self.steps.name}")
    parameters = "x, w, block, own, groups, lanes"

    @property
    def writers(self) -> dict[str, Any]:
        """The compiled writer by its name in the source of `end`."""
        return {"write": device_function(self.write)}

    def end(self, once: str, each: str) -> str:
        """Return source that writes the results: `once` precedes code that runs once, `each`
        precedes code that runs for every block b.
        """
        return once + "write(block, own, groups)\n"

    def in_sequence(self) -> Callable:
        """Return the search(x, w, block, own, groups, lanes) for one block, to be compiled."""
        return _in_sequence(self)


@dataclass(frozen=True)
class RowSearch:
    """The search of a type with one scale per row, and the functions that write the row after its
    steps.

    write_head(head, common) writes the row header from the last row of `groups`.
    write_block(block, codes, groups) writes a block from its 256 codes and its rows of `groups`.
    """

    steps: Steps
    write_head: Callable
    write_block: Callable
    file: str

    name = property(lambda self: f"row_{self.steps.name}")
    parameters = "x, w, head, blocks, own, groups, lanes"

    @property
    def writers(self) -> dict[str, Any]:
        """The compiled writers by their names in the source of `end`."""
        return {
            "write_head": device_function(self.write_head),
            "write_block": device_function(self.write_block),
        }

    def end(self, once: str, each: str) -> str:
        """End a block as `BlockSearch.end` does; blocks are counted by b."""
        per = SUPER // self.steps.group
        part = f"own[{SUPER} * b : {SUPER} * (b + 1)], groups[{per} * b : {per} * (b + 1)]"
        return (
            f"{once}write_head(head, groups[len(x) //"
            f" {self.steps.group}])\n{each}write_block(blocks[b], {part})\n"
        )

    def in_sequence(self) -> Callable:
        """Return the search(x, w, head, blocks, own, groups, lanes) for one row, to be compiled."""
        return _in_sequence(self)


@functools.cache  # a new function would be loaded or compiled again
def _in_sequence(search: BlockSearch | RowSearch) -> Callable:
    source = (
        f"def {search.name}({search.parameters}):\n"
        + search.steps.loops("for i in range({calls}):\n")
        + search.end("    ", "    for b in range(len(blocks)):\n        ")
    )
    return defined(source, search.name, search.file, search.steps.names | search.writers)
