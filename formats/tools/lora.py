"""Write a model with LoRA adapters merged in, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ..gguf.writer import GGUFWriter
from ..options import checks_keywords
from ..output import refuse_same_file
from ..source import Source, TensorInfo
from ..types import TYPES
from .lora_source import FLOATS, AdapterFile, LoraSource, parse_adapter
from .split import OnBytesCopied

_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_PIECE = 16 << 20  # bytes of float32 that are merged at a time


def merged_source(
    source: Source, adapters: Sequence[str | AdapterFile], outtype: str | None = None
) -> LoraSource:
    """Return `source` with adapters merged in. outtype: the type of the weights that they change;
    by default their own if that is a float type, else f16. Raise UsageError if there is no adapter,
    or for an unknown outtype.
    """
    files = [
        one
        for given in adapters
        for one in ([given] if isinstance(given, AdapterFile) else parse_adapter(os.fspath(given)))
    ]
    if not files:
        raise UsageError("an adapter is needed (--lora FILE)")
    if outtype is not None and outtype.upper() not in FLOATS:
        raise UsageError(f"outtype is '{outtype}', expected one of f32, f16, bf16")
    return LoraSource(source, files, None if outtype is None else TYPES[outtype.upper()])


@checks_keywords
def write_merged(
    source: LoraSource, out: str | os.PathLike, progress: OnBytesCopied | None = None
) -> Path:
    """Write a source with adapters to the GGUF file `out`, as one file."""
    refuse_same_file(out, source.files)
    metadata = {key: value for key, value in source.metadata.items() if key not in _SPLIT_KEYS}
    with GGUFWriter(out, metadata, source.tensors) as sink:
        for tensor in source.tensors:
            for piece in _pieces(source, tensor):
                sink.write(tensor, piece)
                if progress is not None:
                    progress(piece.nbytes)
            source.release(tensor)
    return Path(out)


def _pieces(source: LoraSource, tensor: TensorInfo):
    """Yield the bytes of a tensor in order."""
    if tensor.name not in source.changed:  # some types have bytes after their rows
        for start in range(0, tensor.n_bytes, _PIECE):
            yield source.read_bytes(tensor, start, min(start + _PIECE, tensor.n_bytes))
        return
    stored = source.stored(tensor).type
    step = max(1, _PIECE // (4 * tensor.n_cols) // stored.group_rows) * stored.group_rows
    for start in range(0, tensor.n_rows, step):
        rows = source.read_rows(tensor, start, min(start + step, tensor.n_rows))
        yield rows.reshape(-1)
