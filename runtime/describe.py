"""A model in a few words."""

from __future__ import annotations

from collections import Counter

from ..formats.ftypes import FILE_TYPES
from ..formats.source import Source


def model_type(source: Source) -> str:
    """Return architecture, size and type, as in `llama 8B IQ4_K`. The type is the one that the file
    says it was quantized to, or else its most frequent one by bytes.
    """
    metadata = source.metadata
    architecture = metadata["general.architecture"].data
    n = n_parameters(source)
    size = (
        metadata["general.size_label"].data
        if "general.size_label" in metadata
        else f"{n / 1e9:.0f}B"
        if n >= 1e9
        else f"{n / 1e6:.0f}M"
    )
    return f"{architecture} {size} {file_type_name(source)}"


def file_type_name(source: Source) -> str:
    """Return the name of the type that a model was quantized to."""
    metadata = source.metadata
    number = metadata["general.file_type"].data if "general.file_type" in metadata else None
    name = next((f.name for f in FILE_TYPES.values() if f.number == number), None)
    if name is None:
        by_type: Counter[str] = Counter()
        for tensor in source.tensors:
            by_type[tensor.type.name] += tensor.n_bytes
        name = by_type.most_common(1)[0][0]
    return name


def n_parameters(source: Source) -> int:
    """Return the number of weights."""
    return sum(tensor.n_elements for tensor in source.tensors)


def bits_per_weight(source: Source) -> float:
    """Return the bits that a weight takes on average."""
    return 8 * sum(tensor.n_bytes for tensor in source.tensors) / n_parameters(source)


def short_count(n: int) -> str:
    """Return a number with a unit, as in `8.03 B` or `1.25 M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)
