"""Models of random weights as GGUF files, which other engines open too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ...formats.arguments import instance
from ...formats.gguf.writer import GGUFWriter
from ...formats.output import refuse_same_file
from ...formats.source import Source, TensorInfo
from ...formats.values import Value, ValueType, array, boolean, string, u32
from .synthetic import SyntheticSource

_PIECE = 16 << 20  # bytes that are written at a time
_SPECIAL = ("<unk>", "<s>", "</s>", "<|endoftext|>")  # llama.cpp wants the last one for phi3
# Kinds of tokens in GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6

OnBytes = Callable[[int], None]


def write_random_model(
    spec: str, out: str | os.PathLike, *, progress: OnBytes | None = None
) -> Path:
    """Write the model of `SHAPE:TYPE` (see `runtime.bench.synthetic`) as one GGUF file with a small
    vocabulary, and return its path. `progress` is called with the number of bytes written since the
    last call.

    The file is streamed and gets its name at the end. UsageError or NotFoundError for a spec that
    cannot be; OutputError before anything is written if the disk has too little space.
    """
    source, path = SyntheticSource(instance("spec", spec, str, "SHAPE:TYPE")), Path(out)
    refuse_same_file(path, source.files)
    metadata = source.metadata | vocabulary(source.shape.n_vocab)
    try:
        with GGUFWriter(path, metadata, source.tensors) as writer:
            for tensor in source.tensors:
                for piece in pieces(source, tensor):
                    writer.write(tensor, piece)
                    if progress is not None:
                        progress(piece.nbytes)
    finally:
        source.close()
    return path


def written_bytes(spec: str) -> int:
    """Return how many bytes of tensors `write_random_model` writes."""
    source = SyntheticSource(spec)
    try:
        return sum(tensor.n_bytes for tensor in source.tensors)
    finally:
        source.close()


def pieces(source: Source, tensor: TensorInfo) -> Iterator[np.ndarray]:
    """Yield the rows of a tensor, uint8[rows, row_bytes], in groups that belong together."""
    group = tensor.type.group_rows
    step = max(1, _PIECE // (tensor.row_bytes * group)) * group
    for first in range(0, tensor.n_rows, step):
        yield source.read_rows(tensor, first, min(first + step, tensor.n_rows))


def vocabulary(n: int) -> dict[str, Value]:
    """Return the keys of a SentencePiece vocabulary of n tokens: special ones, one for each
    byte, one for a space, and others that stand for their number.
    """
    texts = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"][:n]
    kinds = [_UNKNOWN, *[_CONTROL] * 3, *[_BYTE] * 256, _NORMAL][:n]
    others = n - len(texts)
    texts += [f"[{number}]" for number in range(len(texts), n)]
    kinds += [_NORMAL] * others
    return {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": array(ValueType.STRING, texts),
        "tokenizer.ggml.scores": array(ValueType.FLOAT32, [-float(i) for i in range(n)]),
        "tokenizer.ggml.token_type": array(ValueType.INT32, kinds),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
        "tokenizer.ggml.add_bos_token": boolean(True),
        "tokenizer.ggml.add_space_prefix": boolean(True),
    }
