"""A check of `precompiled_charsmap`, the rules of Unicode normalization in SentencePiece models.

The package `sentencepiece` follows its offsets without checking them, so a damaged one would crash
the process.

Layout: uint32 size of the trie in bytes; the trie, uint32 units of a double array (Darts-clone);
replacement texts, each ended by a zero byte. A unit holds its label in bits 0-7 (bit 31 set for a
value), whether it has a value in bit 8, and its offset in bits 10-30, times 256 if bit 9 is set.
The children of node n are at n ^ offset ^ label; its value is at n ^ offset.
"""

from __future__ import annotations

import numpy as np

_VALUE = np.uint32(1 << 31)


def check_charsmap(charsmap: bytes) -> str | None:
    """Return what is wrong with a map, None if nothing is."""
    if len(charsmap) < 4:
        return f"has {len(charsmap)} bytes, expected at least 4"
    size = int.from_bytes(charsmap[:4], "little")
    if size % 1024 or not 0 < size <= len(charsmap) - 4:
        return f"holds a trie of {size} bytes in {len(charsmap) - 4}"
    texts = charsmap[4 + size :]
    if texts and texts[-1]:
        return "ends inside a replacement text"
    units = np.frombuffer(charsmap, dtype="<u4", count=size // 4, offset=4)
    values = _values(units)
    if values is None:
        return "has a trie that leads outside of itself"
    if len(values) and int(values.max()) >= len(texts):
        return f"refers to byte {int(values.max())} of {len(texts)} bytes of replacement texts"
    return None


def _values(units: np.ndarray) -> np.ndarray | None:
    """Return the values of the trie, None if a node leads out of the array."""
    offsets = (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
    labels = np.arange(1, 256, dtype=np.uint32)
    nodes = np.zeros(1, dtype=np.uint32)
    seen = np.zeros(len(units), dtype=bool)
    found = []
    while len(nodes):
        seen[nodes] = True
        bases = nodes ^ offsets[nodes]
        if int((bases | np.uint32(255)).max()) >= len(units):
            return None
        found.append(units[bases[(units[nodes] >> np.uint32(8)) & np.uint32(1) == 1]] & ~_VALUE)
        children = bases[:, None] ^ labels
        kept = (units[children] & (_VALUE | np.uint32(255))) == labels
        nodes = np.unique(children[kept])
        nodes = nodes[~seen[nodes]]  # branches with the same rest share their nodes
    return np.concatenate(found)
