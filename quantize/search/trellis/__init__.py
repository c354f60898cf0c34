"""IQ1_KT to IQ4_KT: settings of the search (`rows.py`) and packing. Byte maps:
`formats/codecs/trellis.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....formats.codecs.scalars import write_float, write_u16
from ....formats.kernel import device_function
from ....formats.tables import IQ4NL_VALUES
from .rows import Settings, trellis_search
from .tree import search_tree

# Sizes, trials and spreads were chosen on Gaussian, Student's t and weight-like rows, gains by the
# KL divergence of a small model, reaches by speed.
_TABLE = (
    tuple(IQ4NL_VALUES[IQ4NL_VALUES > 0].tolist()),
    tuple((-IQ4NL_VALUES[IQ4NL_VALUES < 0][::-1]).tolist()),
)
SETTINGS = {
    "IQ1_KT": Settings(*_TABLE, size=0.74, trials=3, gain=1.10, reach=0.3),
    "IQ2_KT": Settings(*_TABLE, size=0.77, trials=2, gain=1.05, reach=0.25),
    "IQ3_KT": Settings(
        tuple(range(1, 16)), (), size=0.79, trials=4, spread=0.01, gain=1.02, reach=0.65
    ),
    "IQ4_KT": Settings(
        tuple(range(1, 64)), tuple(range(1, 65)), size=0.9, trials=7, spread=0.07, reach=0.4
    ),
}
_iq1_kt, _iq2_kt, _iq3_kt, _iq4_kt = (
    trellis_search(name, settings) for name, settings in SETTINGS.items()
)


@device_function
def _table_code(multiple):
    """Return the position of a multiple in IQ4NL_VALUES."""
    code = 0
    for k in range(16):
        code = k if IQ4NL_VALUES[k] == np.float32(multiple) else code
    return code


def iq1_kt(x, w, head, blocks, own, groups, lanes, words, indices, leaf_boxes, node_boxes):
    """Search a row of IQ1_KT and write it: x, w float32[n], head uint8[4], blocks uint8[n/256, 56];
    words, indices, leaf_boxes, node_boxes: the tree of code words, see `tree.py`; own, groups,
    lanes: scratch.
    """
    chosen = np.empty((len(x) // 32, 6), np.int32)
    write_float(head, 0, _iq1_kt(x, w, words, indices, leaf_boxes, node_boxes, own, groups, chosen))
    blocks[:] = 0
    for b in range(len(chosen)):
        block = blocks[b // 8]
        block[b % 8] = _table_code(chosen[b, 4])
        for g in range(4):
            m = 4 * (b % 8) + g
            index = chosen[b, g]
            block[b % 8] |= index >> 12 << (4 + g)
            block[8 + m] = index & 255
            block[40 + (m & 15)] |= (index >> 8 & 15) << (4 * (m >> 4))


def iq2_kt(x, w, head, blocks, own, groups, lanes, words, indices, leaf_boxes, node_boxes):
    """Search a row of IQ2_KT and write it: x, w float32[n], head uint8[4], blocks uint8[n/256, 68];
    words, indices, leaf_boxes, node_boxes: the tree of code words, see `tree.py`; own, groups,
    lanes: scratch.
    """
    chosen = np.empty((len(x) // 32, 6), np.int32)
    write_float(head, 0, _iq2_kt(x, w, words, indices, leaf_boxes, node_boxes, own, groups, chosen))
    blocks[:] = 0
    for b in range(len(chosen)):
        block = blocks[b // 8]
        block[b & 3] |= _table_code(chosen[b, 4]) << (4 * (b >> 2 & 1))
        for g in range(4):
            write_u16(block, 4 + 2 * (4 * (b % 8) + g), chosen[b, g])


def iq3_kt(x, w, head, blocks, own, groups, lanes, words, indices, leaf_boxes, node_boxes):
    """Search a row of IQ3_KT and write it: x, w float32[n], head uint8[4], blocks uint8[n/256,
    100]; words, indices, leaf_boxes, node_boxes: the tree of code words, see `tree.py`; own,
    groups, lanes: scratch.
    """
    chosen = np.empty((len(x) // 32, 6), np.int32)
    write_float(head, 0, _iq3_kt(x, w, words, indices, leaf_boxes, node_boxes, own, groups, chosen))
    blocks[:] = 0
    for b in range(len(chosen)):
        block = blocks[b // 8]
        block[b & 3] |= chosen[b, 4] << (4 * (b >> 2 & 1))
        for g in range(4):
            write_u16(block, 4 + 2 * (4 * (b % 8) + g), chosen[b, g])
        for l in range(32):
            block[68 + l] |= (1 if x[32 * b + l] < 0 else 0) << (b % 8)


def iq4_kt(x, w, head, blocks, own, groups, lanes, words, indices, leaf_boxes, node_boxes):
    """Search a row of IQ4_KT and write it: x, w float32[n], head uint8[4], blocks uint8[n/256,
    128]; words, indices, leaf_boxes, node_boxes: the tree of code words, see `tree.py`; own,
    groups, lanes: scratch.
    """
    chosen = np.empty((len(x) // 32, 10), np.int32)
    write_float(head, 0, _iq4_kt(x, w, words, indices, leaf_boxes, node_boxes, own, groups, chosen))
    blocks[:] = 0
    for b in range(len(chosen)):
        block = blocks[b // 8]
        at = 4 * (b % 8)
        block[at] = chosen[b, 9] | (chosen[b, 8] + 64) << 1
        high = 0
        for g in range(8):
            m = 8 * (b % 8) + g
            index = chosen[b, g]
            high |= index >> 12 << (3 * g)
            block[32 + m] = index & 255
            block[96 + (m & 31)] |= (index >> 8 & 15) << (4 * (m >> 5))
        block[at + 1] = high & 255
        block[at + 2] = high >> 8 & 255
        block[at + 3] = high >> 16


def _tree(name: str) -> Callable[[], tuple[np.ndarray, ...]]:
    return lambda: search_tree(name)


ROW_SEARCHES = {"IQ1_KT": iq1_kt, "IQ2_KT": iq2_kt, "IQ3_KT": iq3_kt, "IQ4_KT": iq4_kt}
SEARCH_TABLES = {name: _tree(name) for name in ROW_SEARCHES}
