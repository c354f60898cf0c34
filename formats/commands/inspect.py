"""`iqforge inspect`: show keys, tensors, types and sizes of a GGUF model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import printable

if TYPE_CHECKING:
    from ..tools.summary import ModelSummary, TypeTotal
    from ..values import Value, ValueType

_ITEM_LENGTH, _TEXT_LENGTH, _LIST_ITEMS = 40, 160, 6


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge inspect` to its parser."""
    parser.description = (
        "Print the keys, tensors, types and sizes of a GGUF file, or of a split model through its"
        " first shard. Only headers are read. Control characters are printed as escapes."
    )
    parser.add_argument(
        "model", metavar="FILE", help="a GGUF file; of a split model the first shard"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--full", action="store_true", help="do not shorten long arrays and texts")
    parser.add_argument("--no-tensors", action="store_true", help="leave out the list of tensors")
    parser.add_argument(
        "--data-offset",
        action="store_true",
        help="print the byte at which each tensor's data start in its file",
    )


def run(args: argparse.Namespace, api) -> int:
    """Print the summary as text or JSON, and return 0."""
    summary = api.inspect_model(args.model)
    if args.json:
        found = summary.as_json(args.full)
        if args.no_tensors:
            del found["tensors"]
        # ASCII: control characters and lone surrogates are escaped.
        print(json.dumps(found, indent=1, allow_nan=False))
        return 0
    for line in text_lines(
        summary, full=args.full, tensors=not args.no_tensors, offsets=args.data_offset
    ):
        print(line)
    return 0


def text_lines(
    summary: ModelSummary, *, full: bool = False, tensors: bool = True, offsets: bool = False
) -> list[str]:
    """Return the lines that the command prints; every line is printable text."""
    files = summary.files
    name = printable(files[0], 400) + (
        f" and {len(files) - 1} more shards" if len(files) > 1 else ""
    )
    lines = [
        (
            f"{name}: GGUF version {summary.version}, {summary.file_bytes} bytes, data aligned to"
            f" {summary.alignment}"
        ),
        "",
        f"{len(summary.metadata)} keys",
    ]
    lines += _table(
        [
            (printable(key), _kind(value), _shown(value, full))
            for key, value in summary.metadata.items()
        ]
    )
    if tensors:
        rows = []
        for number, placed in enumerate(summary.tensors):
            info = placed.info
            where = (
                (
                    f"at {placed.offset}"
                    + (f" of shard {files.index(placed.file) + 1}" if len(files) > 1 else "")
                )
                if offsets
                else ""
            )
            rows.append(
                (
                    str(number),
                    printable(info.name),
                    " x ".join(str(n) for n in reversed(info.shape)),
                    info.type.name,
                    f"{info.n_bytes} bytes",
                    f"{placed.bits_per_weight:.3f} bpw",
                    where,
                )
            )
        lines += [
            "",
            f"{len(summary.tensors)} tensors (row length first)",
            *_table(rows, right=(0, 4, 5)),
        ]
    lines += [
        "",
        "types",
        *_table(
            [(t.name, *_amounts(t), f"{t.bits_per_weight:.3f} bpw") for t in summary.types],
            right=(1, 2, 3, 4),
        ),
    ]
    return [
        *lines,
        "",
        (
            f"{', '.join(_amounts(summary.total))}, {summary.total.bits_per_weight:.3f} bits per"
            " weight"
        ),
    ]


def _amounts(total: TypeTotal) -> tuple[str, str, str]:
    return f"{total.n_tensors} tensors", f"{total.n_elements} weights", f"{total.n_bytes} bytes"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table with aligned columns; the last one is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _kind(value: Value) -> str:
    return value.type.name if value.element is None else f"{value.element.name}[{len(value.data)}]"


def _shown(value: Value, full: bool) -> str:
    if value.element is None:
        return _item(value.data, value.type, 10**9 if full else _TEXT_LENGTH)
    limit = len(value.data) if full else _LIST_ITEMS
    items = [
        _item(item, value.element, 10**9 if full else _ITEM_LENGTH) for item in value.data[:limit]
    ]
    return f"[{', '.join(items)}{', ...' if len(value.data) > limit else ''}]"


def _item(item: Any, kind: ValueType, limit: int) -> str:
    if isinstance(item, str):
        return f"'{printable(item, limit)}'"
    if kind.name == "FLOAT32":
        return str(np.float32(item))  # as many digits as distinguish it from its neighbours
    return repr(item) if isinstance(item, (bool, int, float)) else _shown(item, False)
