"""The code words of the trellis types, arranged so that a search can skip most of them.

A group of 8 values (IQ4_KT: 4) is one of 2^13, 2^15 or 2^16 code words, vectors of integers that
look random. They are halved along the coordinate in which they vary most, repeatedly, until some
tens remain: a leaf. Sixteen leaves are a node. Leaves and nodes have bounding
boxes, and the distance from a vector to a box is a lower bound for the distance to every code word
in it (J. H. Friedman, J. L. Bentley, R. A. Finkel, An Algorithm for Finding Best Matches in
Logarithmic Expected Time, 1977). Each cut is along one coordinate, so boxes are useful for any
weights of the coordinates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....formats.codecs.trellis import MULTIPLIER, OFFSET

FAN = 16  # leaves per node
LEAF = 64  # words per leaf, on the CPU


@dataclass(frozen=True)
class Codebook:
    """Geometry of one type's code words: `dim` values each, `starts` the generator's first index
    per book, `size` words per book.
    """

    dim: int
    size: int
    starts: tuple[int, ...] = (OFFSET,)
    magnitudes: bool = False  # signs are stored separately

    def nodes(self, leaf: int) -> int:
        """Return the number of nodes per book, for so many words per leaf."""
        return self.size // (leaf * FAN)


CODEBOOKS = {
    "IQ1_KT": Codebook(8, 1 << 13),
    "IQ2_KT": Codebook(8, 1 << 16),
    "IQ3_KT": Codebook(8, 1 << 16, magnitudes=True),
    "IQ4_KT": Codebook(4, 1 << 15, (OFFSET, OFFSET + 32768)),
}


def code_words(book: Codebook) -> np.ndarray:
    """Return int8[len(starts), size, dim]: word i of a book is what the decoder makes from index i.
    Formula: `formats/codecs/trellis.py`.
    """
    x = np.arange(book.size, dtype=np.uint64) + np.array(book.starts, dtype=np.uint64)[:, None]
    words = np.empty((*x.shape, book.dim), dtype=np.int8)
    for j in range(book.dim):
        x = x * np.uint64(MULTIPLIER % 2**32) & np.uint64(0xFFFFFFFF)
        sixes = x & np.uint64(0x3F3F3F3F)
        value = (
            sum(
                (sixes >> np.uint64(8 * byte) & np.uint64(255)).astype(np.int64)
                for byte in range(4)
            )
            - 126
        )
        words[..., j] = abs(value) if book.magnitudes else value
    return words


def _cut(words: np.ndarray, leaf: int) -> np.ndarray:
    """Return the order of the words, [leaves, leaf]: halves of halves, each cut along the
    coordinate of the largest variance. Ties keep their order.
    """
    order = np.arange(len(words)).reshape(1, -1)
    while order.shape[1] > leaf:
        points = words[order].astype(np.float32)
        widest = points.var(axis=1).argmax(axis=1)
        keys = np.take_along_axis(words[order], widest[:, None, None], axis=2)[:, :, 0]
        order = np.take_along_axis(order, np.argsort(keys, axis=1, kind="stable"), axis=1).reshape(
            2 * len(order), -1
        )
    return np.sort(order, axis=1)


@functools.cache
def search_tree(name: str, leaf: int = LEAF) -> tuple[np.ndarray, ...]:
    """Return the tables of a type's search: words int8[books, leaves, dim * leaf], their indices
    int32[books, leaves, leaf], boxes of leaves float32[books, nodes, 2 * dim * FAN], boxes of nodes
    float32[books, 1, 2 * dim * nodes]; lowest corners first.
    """
    book = CODEBOOKS[name]
    words = code_words(book)
    order = np.stack([_cut(w, leaf) for w in words])
    leaves = np.stack([w[o] for w, o in zip(words, order)])  # books, leaves, leaf, dim
    # [books, 2, leaves, dim]
    boxes = np.stack([leaves.min(axis=2), leaves.max(axis=2)], axis=1).astype(np.float32)
    by_node = boxes.reshape(len(words), 2, book.nodes(leaf), FAN, book.dim)
    # [books, 2, nodes, dim]
    whole = np.stack([by_node[:, 0].min(axis=2), by_node[:, 1].max(axis=2)], axis=1)
    books = len(words)
    return (
        leaves.transpose(0, 1, 3, 2).reshape(books, -1, book.dim * leaf),
        order.astype(np.int32),
        by_node.transpose(0, 2, 1, 4, 3).reshape(books, book.nodes(leaf), -1),
        whole.transpose(0, 1, 3, 2).reshape(books, 1, -1),
    )
