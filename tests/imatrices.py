"""Importance matrices and files of them with given numbers."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from iqforge.imatrix.data import Entry, Imatrix

N_CTX = 32
UP, ROUTER = "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight"


def write_dat(path: Path, entries: dict[str, tuple[int, list[float]]], calls: int) -> Path:
    pieces = [struct.pack("<i", len(entries))]
    for name, (ncall, values) in entries.items():
        pieces += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", ncall, len(values)), np.array(values, "<f4").tobytes()]
    path.write_bytes(b"".join([*pieces, struct.pack("<ii", calls, 0)]))
    return path


def tokens(sums, counts, chunk_size=N_CTX, name=UP, path=None) -> Imatrix:
    return Imatrix({name: Entry(np.array(sums, dtype=float), np.array(counts))}, 1, chunk_size, ("t",), path)
