"""Every kernel spec there is: of each module of this folder that has a function `specs()`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from .compile import KernelSpec


def all_specs() -> Iterator[tuple[str, KernelSpec]]:
    """(module, spec) in order of module names. RuntimeError where two specs share a name, as their files would."""
    names: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda info: info.name):
        module = importlib.import_module(f".{info.name}", __package__)
        for spec in getattr(module, "specs", list)():
            if spec.name in names:
                raise RuntimeError(f"two kernel specs are named {spec.name}: of {names[spec.name]} and of {info.name}")
            names[spec.name] = info.name
            yield info.name, spec
