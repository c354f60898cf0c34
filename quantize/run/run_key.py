"""The key of a run: everything that its output depends on. A later run compares keys to know
whether it may resume.

Only the fingerprint reads data of the source, some rows of every tensor (see
`provenance.source_fingerprint`). In addition, every weight file must have the same size and
modification time. Names, shapes and types of all tensors are in the key; the metadata is in the
header of the output.
"""

from __future__ import annotations

import json
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
    """Return the part of a key that is the same for all outputs of a run."""
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
    rounding: str | None = None,
) -> RunKey:
    """Return the key of one output.

    headers: a hash of the headers of the output or its shards; files: their paths. imatrix: a hash.
    devices: GPUs quantize, which matters only for types whose bytes differ from the CPU's.
    rounding: the text of how tensors are rounded with which second moments, if with any.
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
        "rounding": rounding,
        "recipe": recipe,
        "nan_to_zero": any(plan.nan_to_zero for plan in planned),
        "device": ("gpu" if devices else "cpu") if trellis else "any",
        "files": [os.path.basename(file) for file in files],
        "header": headers,
        "tensors": tensors,
    }


def changes(before: RunKey, now: RunKey) -> list[str]:
    """Describe the differences; empty if a run may resume. Adding `nan_to_zero` is no difference,
    as the tensors that were finished without it had no values to set to 0.
    """
    found = []
    names = {
        "iqforge": "the version of iqforge",
        "searches": "the digest of iqforge's sources",
        "source": "the path of the source",
    }
    tensors = _changed_tensors(before.get("tensors", []), now["tensors"])
    devices = before.get("device"), now["device"]
    if not tensors or "any" not in devices:  # else it only follows from the types
        names["device"] = "the device of trellis types"
    for key, name in names.items():
        if before.get(key) != now[key]:
            found.append(f"{name} was {before.get(key)}, now {now[key]}")
    if before.get("source") == now["source"]:  # else it is another source with other files
        found += _changed_files(before.get("source files", {}), now["source files"])
        if before.get("source values") != now["source values"]:
            found.append("the values of the source have changed")
    if before.get("imatrix") != now["imatrix"]:
        found.append(_changed_imatrix(before.get("imatrix"), now["imatrix"]))
    if before.get("rounding") != now.get("rounding"):
        found.append("the second moments, or how they are used, have changed")
    if before.get("nan_to_zero") and not now["nan_to_zero"]:
        found.append("--nan-to-zero was given, now it is not")
    recipes = before.get("recipe", ""), now["recipe"]
    presets = tuple(_preset(recipe) for recipe in recipes)
    if tensors and presets[0] != presets[1]:
        tensors = [f"the type was {presets[0]}, now {presets[1]} ({tensors[0]})"]
    found += tensors
    if not tensors and recipes[0] != recipes[1]:
        found.append(f"the recipe was {recipes[0]}, now {recipes[1]}")
    if before.get("files") != now["files"]:
        found.append("the names of the output files have changed")
    if not found and before.get("header") != now["header"]:
        found.append("the metadata of the output has changed")
    return found


def _preset(recipe: str) -> str:
    """Return the preset in the text of a recipe, see `provenance.recipe_text`."""
    try:
        return str(json.loads(recipe)["type"])
    except (ValueError, KeyError, TypeError):
        return ""


def _changed_imatrix(before: str | None, now: str | None) -> str:
    if before is None:
        return "there was no importance matrix, now there is one"
    if now is None:
        return "there was an importance matrix, now there is none"
    return "the importance matrix has changed"


def _changed_files(before: dict[str, list[int]], now: dict[str, list[int]]) -> list[str]:
    found = []
    for name in sorted(before.keys() | now.keys()):
        if (was := before.get(name)) == (is_now := now.get(name)):
            continue
        if was is None:
            what = "is new"
        elif is_now is None:
            what = "no longer exists"
        elif was[0] != is_now[0]:
            what = f"had {was[0]} bytes, now {is_now[0]}"
        else:
            what = "was modified"
        found.append(f"the source file {name} {what}")
    return found


def _changed_tensors(before: list[list], now: list[list]) -> list[str]:
    if [tensor[:4] for tensor in before] != [tensor[:4] for tensor in now]:
        return ["the tensors of the source or of the output have changed"]
    types = [(one[0], one[4], other[4]) for one, other in zip(before, now) if one != other]
    if not types:
        return []
    name, was, is_now = types[0]
    count = (
        "1 tensor has another type"
        if len(types) == 1
        else f"{len(types)} tensors have another type"
    )
    return [f"{count}, first '{name}' from {was} to {is_now}"]
