"""Check that two model files have the same contents, whatever shards they are in."""

from __future__ import annotations

from pathlib import Path

from ..errors import MalformedFileError, printable


def compare(api, one: Path, other: Path) -> str:
    """Return a sentence on the equal contents of two model files.

    Raises MalformedFileError naming the first difference. Keys `split.*` are ignored, because
    merging removes them.
    """
    with api.open_source(one) as a, api.open_source(other) as b:
        keys, others = (
            {k: v for k, v in f.metadata.items() if not k.startswith("split.")} for f in (a, b)
        )
        if keys != others:
            different = sorted(
                k for k in keys.keys() | others.keys() if keys.get(k) != others.get(k)
            )
            raise MalformedFileError(
                f"keys differ from those of {printable(one, 400)}: {', '.join(different)}",
                file=other,
            )
        if a.tensors != b.tensors:
            raise MalformedFileError(
                f"the tensor table differs from that of {printable(one, 400)}", file=other
            )
        for tensor in a.tensors:
            if (
                a.read_bytes(tensor, 0, tensor.n_bytes) != b.read_bytes(tensor, 0, tensor.n_bytes)
            ).any():
                raise MalformedFileError(
                    f"data differ from those in {printable(one, 400)}",
                    file=other,
                    tensor=tensor.name,
                )
        return (
            f"{len(a.tensors)} tensors with {sum(t.n_bytes for t in a.tensors):,} bytes and"
            f" {len(keys)} keys are equal"
        )
