"""Importance matrices, and their files, with given numbers; and a model to collect with."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.formats.gguf.reader import open_gguf
from iqforge.imatrix.data import Entry, Imatrix

from .tiny_checkpoint import make_tiny_llama
from .tiny_model import write_gguf

N_CTX = 32
UP, ROUTER = "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight"


def tiny_llama_file(folder: Path) -> Path:
    """Write a Llama of one layer as a GGUF file."""
    make_tiny_llama(folder / "hf", n_layers=1)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        return write_gguf(folder / "model.gguf", source)


def write_dat(path: Path, entries: dict[str, tuple[int, list[float]]], calls: int) -> Path:
    pieces = [struct.pack("<i", len(entries))]
    for name, (ncall, values) in entries.items():
        pieces += [
            struct.pack("<i", len(name)),
            name.encode(),
            struct.pack("<ii", ncall, len(values)),
            np.array(values, "<f4").tobytes(),
        ]
    path.write_bytes(b"".join([*pieces, struct.pack("<ii", calls, 0)]))
    return path


def tokens(sums, counts, chunk_size=N_CTX, name=UP, path=None) -> Imatrix:
    return Imatrix(
        {name: Entry(np.array(sums, dtype=float), np.array(counts))}, 1, chunk_size, ("t",), path
    )


def imatrix_of(path: Path, seed: int = 0) -> Imatrix:
    generator, entries = np.random.default_rng(seed), {}
    with open_gguf(path) as source:
        for t in source.tensors:
            if t.name.startswith("blk.") and len(t.shape) > 1:
                entries[t.name] = Entry(
                    generator.lognormal(size=(t.n_matrices, t.n_cols)) * 100,
                    np.full(t.n_matrices, 100),
                )
    return Imatrix(entries, chunk_count=7, chunk_size=512, datasets=("text.txt",), path="some.dat")
