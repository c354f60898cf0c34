"""Merge LoRA adapters into models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats.options import checks_keywords
from .source import PathLike, open_source

if TYPE_CHECKING:
    from ..formats.tools.lora_source import AdapterFile
    from ..formats.tools.split import OnBytesCopied


@checks_keywords
def export_lora(
    src: PathLike,
    out: PathLike,
    adapters: PathLike | Sequence[str | AdapterFile],
    *,
    outtype: str | None = None,
    progress: OnBytesCopied | None = None,
) -> Path:
    """Write the model `src`, a GGUF file or a checkpoint folder, to `out` with adapters merged in.

    adapters: one or several GGUF files, each as FILE or FILE:SCALE. outtype: f32, f16 or bf16, the
    type of the weights that they change; by default their own if that is a float type, else f16.
    All other tensors keep their bytes. Raise ArchitectureError, MalformedFileError or ShapeError
    for an adapter of another model.
    """
    from ..formats.tools.lora import merged_source, write_merged

    given = [os.fspath(adapters)] if isinstance(adapters, (str, os.PathLike)) else list(adapters)
    with open_source(src) as source, merged_source(source, given, outtype) as merged:
        return write_merged(merged, out, progress)
