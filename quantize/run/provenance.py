"""Metadata keys that record the origin of a quantized file: its weights, its recipe and the version
that made it.

The same weights, importance matrix, recipe and version give the same keys wherever the files are
stored: there are no dates and no paths.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np

from ...errors import IqforgeError
from ...formats.codecs.codec import decodable_types, decode
from ...formats.source import Source, TensorInfo
from ...formats.values import Value, string
from ..plan.changes import Changes
from ..plan.overrides import Rule
from ..plan.recipe import Recipe
from .parallel import results_in_order

VERSION_KEY, RECIPE_KEY, SOURCE_KEY = (
    "quantize.iqforge.version",
    "quantize.recipe",
    "quantize.source.fingerprint",
)
IMATRIX_KEY = "quantize.imatrix.sha256"
# Second moments: the hash of their file, what they were collected from, and how they were used.
HESSIAN_KEY, TEXTS_KEY, ROUNDING_KEY = (
    "quantize.hessian.sha256",
    "quantize.hessian.texts",
    "quantize.hessian.rounding",
)
_MANY = 64
SAMPLES = 16  # groups of rows of a tensor that its fingerprint reads


def provenance_keys(
    recipe: Recipe, fingerprint: str, version: str, changes: Changes = Changes()
) -> dict[str, Value]:
    """Return the keys that record the version, the recipe with other changes, and the weights.

    fingerprint: `source_fingerprint` of the weights.
    """
    return {
        VERSION_KEY: string(version),
        RECIPE_KEY: string(recipe_text(recipe, changes)),
        SOURCE_KEY: string(fingerprint),
    }


def with_provenance(
    metadata: dict[str, Value], keys: dict[str, Value], *, imatrix: bool, imatrix_sha256: str | None
) -> dict[str, Value]:
    """Return `metadata` with `keys` at its end, without those of an earlier run.

    imatrix: there is a new importance matrix, which replaces the record of an earlier one.
    imatrix_sha256: of its file, None if unknown.
    """
    stale = {VERSION_KEY, RECIPE_KEY, SOURCE_KEY, HESSIAN_KEY, TEXTS_KEY, ROUNDING_KEY} | (
        {IMATRIX_KEY} if imatrix else set()
    )
    kept = {key: value for key, value in metadata.items() if key not in stale}
    return kept | ({IMATRIX_KEY: string(imatrix_sha256)} if imatrix_sha256 else {}) | keys


def rounding_keys(
    sha256: str, texts: Sequence[Mapping[str, Any]], rounding: str
) -> dict[str, Value]:
    """Return the keys that record second moments. texts: name, sha256 and tokens of each; rounding:
    JSON of how each role was rounded.
    """
    said = [[text.get("sha256"), text.get("tokens")] for text in texts]
    return {
        HESSIAN_KEY: string(sha256),
        TEXTS_KEY: string(json.dumps(said)),
        ROUNDING_KEY: string(rounding),
    }


def calibration_keys(texts: Sequence[Sequence[Any]], settings: dict[str, Any]) -> dict[str, Value]:
    """Return the keys that record calibration texts without a file of second moments. texts:
    SHA-256 and tokens of each.
    """
    return {
        TEXTS_KEY: string(json.dumps(texts)),
        ROUNDING_KEY: string(json.dumps(settings, sort_keys=True)),
    }


def recipe_text(recipe: Recipe, changes: Changes = Changes()) -> str:
    """Return JSON of the fields of recipe and changes that differ from their defaults, with sorted
    keys: {"custom_q": "attn=q6_K", "type": "IQ4_K"}.

    Rules from files are recorded as text. Many types by tensor, as in a plan, are recorded as their
    number and the SHA-256 of their JSON.
    """
    hidden = {"strict", "hide_imatrix"} | (
        {"include_weights", "exclude_weights"} if changes.hide_imatrix else set()
    )
    said = {}
    for part, kind in ((recipe, Recipe), (changes, Changes)):
        # A saved plan has more fields, none of which changes a file.
        for field in dataclasses.fields(kind):
            default = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            value = getattr(part, field.name)
            if field.name not in hidden and value != default and value not in ([], {}, ()):
                rules = isinstance(value, (list, tuple))
                said[field.name] = (
                    [item.text if isinstance(item, Rule) else item for item in value]
                    if rules
                    else value
                )
    if len(types := said.get("tensor_types", ())) > _MANY:
        digest = hashlib.sha256(json.dumps(types, sort_keys=True).encode()).hexdigest()
        said["tensor_types"] = f"{len(types)} types, sha256 {digest}"
    return json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)


def source_fingerprint(source: Source, threads: int = 1) -> str:
    """Return 64 hexadecimal digits: SHA-256 over name, shape and values (float32, little-endian) of
    every tensor in the order of their names.

    Only SAMPLES row groups of each tensor, evenly spaced, are read: the fingerprint distinguishes
    models and does not prove every byte. It hashes values instead of bytes, so that a checkpoint, a
    lossless conversion of it, and its shards have the same fingerprint.
    """
    total, known = hashlib.sha256(), frozenset(decodable_types())
    readers = source.parallel_reads or max(1, threads)
    works = (
        (tensor, functools.partial(_digest, source, tensor, tensor.type.name in known))
        for tensor in sorted(source.tensors, key=lambda tensor: tensor.name)
    )
    with (
        ThreadPoolExecutor(readers, thread_name_prefix="fingerprint") as pool,
        closing(results_in_order(pool, 2 * readers, works)) as results,
    ):
        for tensor, digest in results:
            total.update(digest)
            source.release(tensor)
    return total.hexdigest()


def _digest(source: Source, tensor: TensorInfo, decodable: bool) -> bytes:
    """Return the digest of a tensor: of its bytes if its type cannot be decoded row by row."""
    digest = hashlib.sha256(json.dumps([tensor.name, tensor.shape]).encode())
    for start, stop in _sampled_rows(tensor):
        rows = source.read_rows(tensor, start, stop)
        values = (
            decode(tensor.type, rows, tensor.n_cols).astype("<f4", copy=False)
            if decodable
            else np.ascontiguousarray(rows)
        )
        digest.update(values.data)
    return digest.digest()


def _sampled_rows(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    group = tensor.type.group_rows
    groups = tensor.n_rows // group
    if groups <= SAMPLES:
        yield 0, tensor.n_rows
    else:
        yield from (
            (group * start, group * start + group)
            for start in (index * groups // SAMPLES for index in range(SAMPLES))
        )


def file_sha256(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a whole file in hexadecimal. Raise IqforgeError if it cannot be
    read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise IqforgeError(f"cannot be read: {error.strerror}", file=path) from None
