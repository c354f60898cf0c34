"""Metadata of a quantized file: the keys of the source, and those that the run adds or removes."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.values import Value, i32, string, u32

_SECRET = "top_secret"
QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class ImatrixNote:
    """The record of the importance matrix that was used.

    sha256: of the matrix's file, None if not recorded. hidden: record only that there was a matrix.
    """

    file: str
    dataset: str | None
    entries: int
    chunks: int
    sha256: str | None = None
    hidden: bool = False

    def shown(self) -> ImatrixNote:
        """Return the note as it is recorded: hidden as llama-quantize --hide-imatrix does it."""
        return ImatrixNote(_SECRET, self.dataset and _SECRET, 0, 0) if self.hidden else self


def quantized_metadata(
    metadata: dict[str, Value],
    file_type: int | None,
    imatrix: ImatrixNote | None = None,
    overrides: dict[str, Value] | None = None,
) -> dict[str, Value]:
    """Return the keys of a quantized file. Keys keep their places, and new ones come last, as
    ik_llama.cpp writes them. Split keys are removed.

    overrides: keys that a user sets, which replace others.
    """
    keys = {key: value for key, value in metadata.items() if key not in _SPLIT_KEYS}
    keys["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    if file_type is not None:
        keys["general.file_type"] = u32(file_type)
    keys |= overrides or {}
    if imatrix is not None:
        shown = imatrix.shown()
        keys["quantize.imatrix.file"] = _short(shown.file)
        if shown.dataset:
            keys["quantize.imatrix.dataset"] = _short(shown.dataset)
        keys["quantize.imatrix.entries_count"] = i32(shown.entries)
        if imatrix.chunks > 0:
            keys["quantize.imatrix.chunks_count"] = i32(shown.chunks)
    return keys


def _short(text: str) -> Value:
    """Return at most 127 bytes, as the original does. Bytes that are not UTF-8 are dropped."""
    return string(text.encode(errors="surrogateescape")[:127].decode(errors="ignore"))
