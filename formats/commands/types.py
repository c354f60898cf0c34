"""`iqforge types`: print the table of ggml types for users, also as a page of the documentation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection

from ..types import TYPES, GGMLType, ggml_type

HEADINGS = (
    "type",
    "id",
    "bits/weight",
    "row length",
    "rows",
    "header",
    "decode",
    "quantize",
    "importance",
    "interleaves",
)

_PAGE = """\
# Types

Every type that GGUF files store tensors in, and what this version can do with it. Printed by
`iqforge types --md`.

- bits/weight: of the blocks. `header` bytes per row are added.
- row length: the length of a row is a multiple of this. rows: the number of rows is a multiple of
  this, because such a group of rows is stored interleaved.
- decode: on the CPU, and with torch on CUDA and other devices, all bits as from ggml's row
  decoders. The runtime uses the weights that matrix products use, which differ for IQ6_K, IQ2_KT
  and IQ3_KT; on CUDA it has kernels for every type that says CUDA. "whole tensor": one scale
  follows all rows, so a tensor can only be decoded as a whole, and it has a multiple of 128
  elements.
- quantize: where a search runs. Floats are only rounded, on the CPU. CPU and CUDA searches have
  the same source and give the same bytes, except for the trellis types, IQ1_KT to IQ4_KT
  (docs/benchmarks/trellis.md).
- importance: what an importance matrix is to a quantizer. "required": llama-quantize refuses to
  run without one (llama.cpp also for IQ3_XXS); here it is possible, and loses more. "useful": the
  search weighs errors by it. "ignored": there is nothing to choose.
- interleaves: the type whose rows are stored interleaved. Its bytes can be converted in both
  directions without loss.
- Ids above 96 exist in ik_llama.cpp only; 34, 35, 40 and 42 in llama.cpp only; 31, 32 and 33 were
  removed from llama.cpp.

{table}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge types` to its parser."""
    parser.description = "The table of ggml types, and what can be done with each."
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--md", action="store_true", help="as the page docs/reference/types.md")
    form.add_argument("--json", action="store_true", help="as JSON: a list of objects")


def run(args: argparse.Namespace, api) -> int:
    """Print the table of types as text, Markdown or JSON, and return 0."""
    rows = support_table(api.decodable_types(), api.encodable_types())
    if args.md:
        print(markdown_page(rows), end="")
    elif args.json:
        print(json.dumps([dict(zip(HEADINGS, row)) for row in rows], indent=1))
    else:
        cells = [HEADINGS, *([str(value) for value in row] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
        for row in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


def support_table(decodable: Collection[str], encodable: Collection[str]) -> list[tuple]:
    """Return a row per type of numbers that models are stored in, with the columns of
    `HEADINGS`.
    """
    kinds = (kind for kind in TYPES.values() if kind.is_quantized or kind.name in decodable)
    return [
        (
            kind.name,
            kind.id,
            round(kind.bits_per_weight, 4),
            kind.row_multiple,
            kind.group_rows,
            kind.header_bytes,
            "whole tensor" if kind.tail_bytes else _places(kind.name in decodable),
            _places(kind.name in encodable, not _only_rounded(kind)),
            _importance(kind, kind.name in encodable),
            kind.base or "",
        )
        for kind in kinds
    ]


def _places(known: bool, on_cuda: bool = True) -> str:
    return ("CPU, CUDA" if on_cuda else "CPU") if known else "-"


def _only_rounded(kind: GGMLType) -> bool:
    return kind.is_float or (kind.base is not None and ggml_type(kind.base).is_float)


def _importance(kind: GGMLType, encodable: bool) -> str:
    if kind.needs_importance:
        return "required"
    return "ignored" if _only_rounded(kind) else "useful" if encodable else "-"


def markdown_page(rows: list[tuple]) -> str:
    """Return the page docs/reference/types.md."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *([str(value) for value in row] for row in rows)]
    return _PAGE.format(table="\n".join(f"| {' | '.join(line)} |" for line in lines))
