"""One file per model family. A class registers itself for the Hugging Face class names it converts; the files are found by name.

    @register("LlamaForCausalLM")
    class Llama(Architecture): ...
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING, Callable

from ...errors import ArchitectureError, printable

if TYPE_CHECKING:
    from .base import Architecture

_REGISTRY: dict[str, type[Architecture]] = {}
_loaded = False


def register(*hf_classes: str) -> Callable[[type[Architecture]], type[Architecture]]:
    """Class decorator: this class converts checkpoints whose `architectures[0]` is one of `hf_classes`."""
    def add(converter: type[Architecture]) -> type[Architecture]:
        for name in hf_classes:
            if name in _REGISTRY:
                raise RuntimeError(f"{name} is registered by {_REGISTRY[name].__name__} and by {converter.__name__}")
            _REGISTRY[name] = converter
        return converter
    return add


def supported() -> list[str]:
    """All Hugging Face class names that can be converted."""
    global _loaded
    if not _loaded:
        for module in pkgutil.iter_modules(__path__):
            importlib.import_module(f"{__name__}.{module.name}")
        _loaded = True
    return sorted(_REGISTRY)


def architecture_class(hf_class: str) -> type[Architecture]:
    """The converter of a Hugging Face class. ArchitectureError naming the nearest known classes if there is none."""
    names = supported()
    if hf_class in _REGISTRY:
        return _REGISTRY[hf_class]
    close = difflib.get_close_matches(hf_class, names, n=3, cutoff=0.6)
    hint = f"nearest known: {', '.join(close)}" if close else f"known: {', '.join(names)}"
    raise ArchitectureError(f"model class '{printable(hf_class)}' is not supported yet ({hint})")
