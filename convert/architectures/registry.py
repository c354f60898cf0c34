"""Find the class that converts a Hugging Face model class. Each file of this folder registers its
classes:

@register("LlamaForCausalLM")
class Llama(Architecture): ...
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from ...errors import ArchitectureError, printable
from .base import Architecture

_Class = TypeVar("_Class", bound=type[Architecture])

# (class, model_type of its text model); None is for all other text models.
_REGISTRY: dict[tuple[str, str | None], type[Architecture]] = {}
_loaded = False


def register(*hf_classes: str, model_type: str | None = None) -> Callable[[_Class], _Class]:
    """Register the decorated class for checkpoints whose `architectures[0]` is one of `hf_classes`.

    Multimodal classes wrap several text models. With `model_type` only those with this `model_type`
    in config.json (in its `text_config`, if there is one) are converted by the class. A class
    registered without it converts the others.
    """

    def add(converter: _Class) -> _Class:
        for name in hf_classes:
            if (name, model_type) in _REGISTRY:
                raise RuntimeError(
                    f"{name} is registered by {_REGISTRY[name, model_type].__name__} and by"
                    f" {converter.__name__}"
                )
            _REGISTRY[name, model_type] = converter
        return converter

    return add


def supported() -> list[str]:
    """Return all Hugging Face class names that can be converted."""
    global _loaded
    if not _loaded:
        package = importlib.import_module(__name__.rpartition(".")[0])
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        _loaded = True
    return sorted({name for name, _ in _REGISTRY})


def converters() -> set[type[Architecture]]:
    """Return all classes that convert checkpoints."""
    supported()
    return {*_REGISTRY.values()}


def architecture_class(hf_class: str, model_type: object = None) -> type[Architecture]:
    """Return the converter of a Hugging Face class and text model. Raise ArchitectureError with the
    most similar known classes if there is none.
    """
    names = supported()
    for kind in (model_type, None):
        if isinstance(kind, str | None) and (hf_class, kind) in _REGISTRY:
            return _REGISTRY[hf_class, kind]
    if hf_class in names:
        kinds = ", ".join(kind for name, kind in _REGISTRY if name == hf_class and kind)
        raise ArchitectureError(
            f"the text model '{printable(model_type)}' of '{hf_class}' is not supported yet;"
            f" {kinds} is"
        )
    close = difflib.get_close_matches(hf_class, names, n=3, cutoff=0.6)
    hint = f"most similar: {', '.join(close)}" if close else f"known: {', '.join(names)}"
    raise ArchitectureError(f"model class '{printable(hf_class)}' is not supported yet ({hint})")
