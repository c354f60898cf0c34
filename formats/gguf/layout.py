"""The layout of a GGUF file that is to be written. It is known, and checked, before the first
byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import IqforgeError, OutputError
from ..source import TensorInfo
from ..values import Value, u32
from .header import DEFAULT_ALIGNMENT, Header, encode_header, pad_to, parse_header, stated_alignment


class FileLayout:
    """Header bytes, tensor places and final size of a file that is to be written."""

    def __init__(
        self,
        path: str | os.PathLike,
        metadata: dict[str, Value],
        tensors: Sequence[TensorInfo],
        alignment: int | None = None,
    ):
        self.path, self.tensors = os.fspath(path), tuple(tensors)
        if alignment is not None and alignment != DEFAULT_ALIGNMENT:
            metadata = {**metadata, "general.alignment": u32(alignment)}
        self.metadata = metadata
        try:
            self.alignment = stated_alignment(metadata, self.path)
            self.header, self.offsets = encode_header(metadata, self.tensors, self.alignment)
            self.n_bytes = (
                pad_to(self.offsets[-1] + self.tensors[-1].n_bytes, self.alignment)
                if self.tensors
                else len(self.header)
            )
            self.check(parse_header(self.header, self.path, self.n_bytes))
        except OutputError:
            raise
        except IqforgeError as error:
            raise OutputError(f"would not be a valid file: {error}", file=self.path) from error

    def check(self, found: Header) -> None:
        """Raise OutputError if a parsed header is not the one that was to be written."""
        kinds = [
            {key: (value.type, value.element) for key, value in metadata.items()}
            for metadata in (found.metadata, self.metadata)
        ]
        same = (
            found.tensors == self.tensors
            and list(found.offsets) == self.offsets
            and found.alignment == self.alignment
        )
        if kinds[0] != kinds[1] or not same:
            raise OutputError(
                "the header reads back differently from what was written", file=self.path
            )
