"""The layout of floats, which is that of the file: 32 of them make a unit."""

from ...formats.codecs.bit_moves import bits
from .layout import BlockLayout


def _plain(n_bytes: int) -> BlockLayout:
    return BlockLayout(
        (("values", n_bytes),),
        lambda i: [(bits(0, 0, 8 * n_bytes), "values", bits(0, 0, 8 * n_bytes))],
    )


LAYOUTS = {"F32": _plain(4), "F16": _plain(2), "BF16": _plain(2)}
