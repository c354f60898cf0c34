"""Metadata of a quantized file: the source's keys, with what the run adds or removes."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.gguf.values import Value, i32, string, u32

_SECRET = "top_secret"
QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class ImatrixNote:
    """What is recorded of the importance matrix that was used. sha256: of its file, None where that
    is not recorded. hidden: only that there was one.
    """

    file: str
    dataset: str | None
    entries: int
    chunks: int
    sha256: str | None = None
    hidden: bool = False

    def shown(self) -> ImatrixNote:
        """As llama-quantize --hide-imatrix of ik_llama.cpp has it, if it is hidden."""
        return ImatrixNote(_SECRET, self.dataset and _SECRET, 0, 0) if self.hidden else self


def quantized_metadata(
    metadata: dict[str, Value],
    file_type: int | None,
    imatrix: ImatrixNote | None = None,
    overrides: dict[str, Value] | None = None,
) -> dict[str, Value]:
    """Keys keep their places; new ones come last, as ik_llama.cpp writes them. Split keys go: the
    output is one file. overrides: keys that a user sets, whatever they are otherwise.
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
    """At most 127 bytes of it, as the reference keeps; bytes that are not UTF-8 are left out."""
    return string(text.encode(errors="surrogateescape")[:127].decode(errors="ignore"))
