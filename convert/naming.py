"""Choose the path of a converted model when the user gives a folder, a pattern or nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import OutputError, UsageError
from ..formats.output import refuse_same_file
from ..formats.source import Source
from .source import CheckpointSource
from .tensors.outtype import type_word

_SIZE_WORD = re.compile(r"(?:^|[-_ ])(?:\d+x)?\d+(?:\.\d+)?[KMBT](?:$|[-_ ])", re.IGNORECASE)


def output_path(source: Source, out: str | os.PathLike | None, outtype: str) -> Path:
    """Return the file to write: `out` with `{ftype}` and `{outtype}` (or in upper case) filled in;
    in a folder, by default the checkpoint's, a name made from the model's.

    Raise OutputError if the folder does not exist or the file belongs to the checkpoint, UsageError
    if `source` is not a checkpoint.
    """
    if not isinstance(source, CheckpointSource):
        raise UsageError(
            "is not a folder with a Hugging Face checkpoint, and only those can be converted",
            file=source.path,
        )
    vocab_only = not source.tensors
    kind = "vocab" if vocab_only else type_word(source.tensors, outtype)
    if out is None and (default := source.checkpoint.default_output) is not None:
        path = default.with_name(f"{default.name}-{kind}.gguf")
    elif out is None:
        path = Path(source.path)
    else:
        spelled = os.fspath(out)
        for key in ("ftype", "outtype"):
            spelled = spelled.replace(f"{{{key}}}", kind).replace(
                f"{{{key.upper()}}}", kind.upper()
            )
        path = Path(spelled)
        if spelled.endswith(("/", os.sep)) and not path.is_dir():
            raise OutputError("is not a folder", file=spelled)
    if path.is_dir():
        label = source.metadata.get("general.size_label")
        prefix = "mtp-" if source.options.mtp == "only" else ""
        path /= prefix + default_file_name(
            source.metadata["general.name"].data, label and label.data, kind
        )
    if not path.parent.is_dir():
        raise OutputError(f"folder {path.parent} does not exist", file=path)
    refuse_same_file(path, source.files)
    return path


def default_file_name(name: str, label: str | None, kind: str) -> str:
    """Return `<name>-<size>-<TYPE>.gguf`, or `<name>-vocab.gguf`. The size is omitted if the name
    has one.
    """
    stem = re.sub(r"[\s/\\\0]+", "-", name).strip("-.") or "model"
    parts = [
        stem,
        *([label] if label and not _SIZE_WORD.search(stem) else []),
        kind if kind == "vocab" else kind.upper(),
    ]
    return "-".join(parts) + ".gguf"
