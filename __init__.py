"""iqforge: GGUF quantization and conversion with a reference runtime.

The functions of `iqforge.api` are available here too. They are imported when they are first used,
so that `import iqforge` is instant.
"""

from __future__ import annotations

from typing import Any

from .api.table import PUBLIC, resolve

__all__ = sorted([*PUBLIC, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]  one table


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .version import __version__ as found
    else:
        found = resolve(name, __name__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
