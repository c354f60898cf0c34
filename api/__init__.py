"""The public Python API: everything that the commands do.

The modules here join the folders, none of which may know all the others. `api.table` lists the
public names; each is imported when it is first used.
"""

from __future__ import annotations

from typing import Any

from .table import PUBLIC, resolve

__all__ = sorted(PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]  one table


def __getattr__(name: str) -> Any:
    found = resolve(name, __name__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
