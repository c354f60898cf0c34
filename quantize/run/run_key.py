"""What a run is made of: everything that its output depends on, to tell whether a later run may go
on with what it left.

Of the source, which may be hundreds of gigabytes, nothing is read but what its fingerprint takes
(some rows of every tensor, see `provenance.source_fingerprint`); besides, every file of weights
must have the size and the time of change that it had. Names, shapes and types of all tensors are in
the key, its metadata is in the header of the output.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...formats.kernel import sources_digest
from ...formats.source import Source
from ..encode import TRELLIS_TYPES
from ..plan.plan import PlannedTensor

RunKey = dict[str, Any]
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def source_key(source: Source, fingerprint: str) -> RunKey:
    """The part of a key that is the same for all outputs of a run."""
    files = {}
    for file in source.files:
        if file.endswith(_WEIGHTS) and os.path.exists(file):
            state = os.stat(file)
            files[os.path.basename(file)] = [state.st_size, state.st_mtime_ns]
    path = os.path.realpath(source.path) if os.path.exists(source.path) else source.path
    return {"source": path, "source files": files, "source values": fingerprint}


def run_key(
    planned: Sequence[PlannedTensor],
    headers: str,
    files: Sequence[str],
    *,
    source: RunKey,
    recipe: str,
    imatrix: str | None,
    version: str,
    devices: bool = False,
) -> RunKey:
    """headers: a hash of those of the output or its shards, files: their paths. imatrix: a hash.
    devices: whether GPUs quantize, which counts where their bytes are others than the CPU's.
    """
    trellis = any(not plan.kept and plan.target.type.name in TRELLIS_TYPES for plan in planned)
    tensors = [
        [
            plan.target.name,
            plan.source.name,
            list(plan.source.shape),
            plan.source.type.name,
            plan.target.type.name,
        ]
        for plan in planned
    ]
    return {
        "iqforge": version,
        "searches": sources_digest(),
        **source,
        "imatrix": imatrix,
        "recipe": recipe,
        "nan_to_zero": any(plan.nan_to_zero for plan in planned),
        "device": ("gpu" if devices else "cpu") if trellis else "any",
        "files": [os.path.basename(file) for file in files],
        "header": headers,
        "tensors": tensors,
    }


def changes(before: RunKey, now: RunKey) -> list[str]:
    """What differs, in words; empty if a run may go on. What was made without `nan_to_zero` had
    nothing to set to 0, so that one may be added.
    """
    found = []
    names = {
        "iqforge": "the version of iqforge",
        "searches": "iqforge's own sources",
        "source": "the path of the source",
        "device": "what the trellis types are searched on",
    }
    for key, name in names.items():
        if before.get(key) != now[key]:
            found.append(f"{name} was {before.get(key)}, is {now[key]}")
    found += _changed_files(before.get("source files", {}), now["source files"])
    if before.get("source values") != now["source values"]:
        found.append("the values of the source")
    if before.get("imatrix") != now["imatrix"]:
        found.append("the importance matrix")
    if before.get("nan_to_zero") and not now["nan_to_zero"]:
        found.append("--nan-to-zero was given, is not")
    tensors = _changed_tensors(before.get("tensors", []), now["tensors"])
    found += tensors
    if not tensors and before.get("recipe") != now["recipe"]:
        found.append(f"the recipe was {before.get('recipe')}, is {now['recipe']}")
    if before.get("files") != now["files"]:
        found.append("the names of the files to write")
    if not found and before.get("header") != now["header"]:
        found.append("the metadata of the output")
    return found


def _changed_files(before: dict[str, list[int]], now: dict[str, list[int]]) -> list[str]:
    found = []
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            what = (
                "is new"
                if name not in before
                else (
                    "is gone"
                    if name not in now
                    else (
                        f"had {before[name][0]} bytes, has {now[name][0]}"
                        if before[name][0] != now[name][0]
                        else "was written to"
                    )
                )
            )
            found.append(f"the source file {name} {what}")
    return found


def _changed_tensors(before: list[list], now: list[list]) -> list[str]:
    if [tensor[:4] for tensor in before] != [tensor[:4] for tensor in now]:
        return ["the tensors of the source or of the output"]
    types = [(one[0], one[4], other[4]) for one, other in zip(before, now) if one != other]
    if not types:
        return []
    name, was, now_is = types[0]
    return [f"the types of {len(types)} tensors, first '{name}': was {was}, is {now_is}"]
