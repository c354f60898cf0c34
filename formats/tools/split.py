"""Split a GGUF model into shards and merge shards into one file, tensor by tensor in small pieces.

Shards are cut where llama.cpp's `gguf-split` cuts them, and carry the same keys, so either tool
reads the other's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import OutputError, SplitError, UsageError
from ..gguf import shards as shard_rules
from ..gguf.header import DEFAULT_ALIGNMENT, encode_header, pad_to
from ..gguf.reader import GGUFFile, open_gguf
from ..gguf.sharded_writer import ShardedWriter
from ..gguf.writer import GGUFWriter
from ..options import from_keywords
from ..output import refuse_same_file
from ..source import Sink, TensorInfo
from ..values import Value, u16
from .options import MergeShardsOptions, SplitOptions

DEFAULT_MAX_TENSORS = 128
_PIECE = 16 << 20  # bytes copied at once: the resident memory of a copy, whatever the model's size
OnBytesCopied = Callable[[int], None]  # called with the number of bytes copied since the last call


@dataclass(frozen=True)
class Shard:
    """A shard that is to be written, and the tensors that it holds."""

    path: Path
    tensors: tuple[TensorInfo, ...]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of tensor data, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def header_bytes(
        self, metadata: dict[str, Value], index: int, n_shards: int, n_tensors: int
    ) -> int:
        """Return the bytes before the tensor data of shard `index` of a model with `metadata`."""
        keys = (metadata if index == 0 else {}) | shard_rules.split_keys(index, n_shards, n_tensors)
        return len(encode_header(keys, self.tensors, DEFAULT_ALIGNMENT)[0])


def parse_size(text: str | int) -> int:
    """Return the number of bytes that `300M` (10^6 each) or `2G` (10^9) stands for; an int is one
    already. Raise UsageError for anything else.
    """
    if isinstance(text, int):
        size = text
    elif match := re.fullmatch(r"(\d{1,18})([MG])", text):
        size = int(match[1]) * {"M": 10**6, "G": 10**9}[match[2]]
    else:
        raise UsageError(
            f"shard size '{text}': expected a whole number and a unit; supported units are M (10^6"
            " bytes) or G (10^9)"
        )
    if size <= 0:
        raise UsageError(f"shard size '{text}' must be above 0")
    return size


def plan_split(
    source: GGUFFile,
    prefix: str | os.PathLike,
    options: SplitOptions = SplitOptions(),
) -> list[Shard]:
    """Return which tensors go into which shard `<prefix>-0000i-of-0000N.gguf`; a `.gguf` ending of
    `prefix` is dropped.

    With `max_size` (bytes, `300M`, `2G`) a shard ends before the tensor that would bring its padded
    data above that; a tensor that is larger gets its own shard. Else it ends after `max_tensors`
    tensors (default 128). `first_shard_metadata_only` puts a shard without tensors in front. Raise
    UsageError for impossible limits, OutputError if a shard would have no tensors.
    """
    max_tensors, max_size = options.max_tensors, options.max_size
    if max_tensors is not None and max_size is not None:
        raise UsageError("give either a number of tensors or a size per shard, not both")
    if max_tensors is not None and max_tensors < 1:
        raise UsageError(f"{max_tensors} tensors per shard; at least 1 is needed")
    if not source.tensors:
        raise OutputError("one of the splits has 0 tensors: the model has none", file=source.path)
    if max_size is None:
        groups = _cut_by_count(source.tensors, max_tensors or DEFAULT_MAX_TENSORS)
    else:
        groups = _cut_by_size(source, parse_size(max_size))
    if options.first_shard_metadata_only:
        groups.insert(0, [])
    prefix = re.sub(r"\.gguf$", "", os.fspath(prefix))
    return [
        Shard(shard_rules.shard_path(prefix, index, len(groups)), tuple(group))
        for index, group in enumerate(groups)
    ]


def _cut_by_count(tensors: Sequence[TensorInfo], max_tensors: int) -> list[list[TensorInfo]]:
    return [
        list(tensors[start : start + max_tensors]) for start in range(0, len(tensors), max_tensors)
    ]


def _cut_by_size(source: GGUFFile, max_size: int) -> list[list[TensorInfo]]:
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in source.tensors:
        size = pad_to(tensor.n_bytes, DEFAULT_ALIGNMENT)
        if filled + size > max_size:
            # The reference refuses this as well; a shard 1 without tensors has its own flag.
            if not groups[0]:
                raise OutputError(
                    f"one of the splits has 0 tensors: the first tensor takes {size} bytes, a shard"
                    f" may have {max_size}",
                    file=source.path,
                    tensor=tensor.name,
                )
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return groups


def write_split(
    source: GGUFFile, plan: Sequence[Shard], progress: OnBytesCopied | None = None
) -> list[Path]:
    """Write the shards of `plan` and return their paths. None of them gets its name before all are
    complete.
    """
    paths = [shard.path for shard in plan]
    for path in paths:
        refuse_same_file(path, source.files)
    prefix = str(paths[0]).removesuffix(f"-{1:05d}-of-{len(plan):05d}.gguf")
    with ShardedWriter(
        prefix, source.metadata, source.tensors, [shard.tensors for shard in plan]
    ) as sink:
        copy_tensors(source, sink, progress)
    return paths


def split_model(
    src: str | os.PathLike,
    prefix: str | os.PathLike,
    *,
    options: SplitOptions | None = None,
    progress: OnBytesCopied | None = None,
    on_plan: Callable[[GGUFFile, list[Shard]], None] | None = None,
    **keywords: Any,
) -> list[Path]:
    """Split the GGUF model `src` as `plan_split` says. Return the paths of the shards.

    keywords: fields of `formats.tools.options.SplitOptions`, which win over `options`: max_tensors
    (128) or max_size (bytes, `300M`, `2G`) of a shard; first_shard_metadata_only; dry_run: write
    nothing. on_plan: called with the open model and its shards before they are written.
    """
    [o] = from_keywords(split_model, keywords, (SplitOptions, options))
    with open_gguf(src) as source:
        plan = plan_split(source, prefix, o)
        if on_plan is not None:
            on_plan(source, plan)
        return [shard.path for shard in plan] if o.dry_run else write_split(source, plan, progress)


def open_shards(first: str | os.PathLike) -> GGUFFile:
    """Open a split model, also one of a single shard. Raise SplitError if `first` is whole or does
    not have the name of a first shard.
    """
    source = open_gguf(first)
    try:
        if shard_rules.KEY_COUNT not in source.metadata:
            raise SplitError(
                "the file does not contain split.count metadata: it is not a shard",
                file=source.path,
            )
        if shard_rules.split_number(source.metadata, shard_rules.KEY_COUNT, source.path) == 0:
            raise SplitError(
                "the file does not contain a valid split count: 0 says that it is merged already",
                file=source.path,
            )
        shard_rules.sibling_paths(source.path, source.metadata)
        return source
    except BaseException:
        source.close()
        raise


def merge_model(
    first: str | os.PathLike,
    out: str | os.PathLike,
    *,
    options: MergeShardsOptions | None = None,
    progress: OnBytesCopied | None = None,
    on_plan: Callable[[GGUFFile], None] | None = None,
    **keywords: Any,
) -> Path:
    """Merge the shards found through the first one into `out`, which must not exist. Return its
    path.

    Tensors come in shard order. Metadata is the first shard's with `split.count` set to 0, which is
    how the reference marks a merged file; `split.no` and `split.tensors.count` stay. delete_shards:
    remove the shards once `out` is complete and on the disk, so the disk has to hold both for a
    moment. dry_run: check the arguments, write nothing. on_plan: called with the open model before
    it is written. keywords: fields of `formats.tools.options.MergeShardsOptions`, which win over
    `options`.
    """
    [o] = from_keywords(merge_model, keywords, (MergeShardsOptions, options))
    out = Path(out)
    check_merge_output(out)
    with open_shards(first) as source:
        if on_plan is not None:
            on_plan(source)
        if o.dry_run:
            return out
        metadata = source.metadata | {shard_rules.KEY_COUNT: u16(0)}
        with GGUFWriter(out, metadata, source.tensors) as sink:
            copy_tensors(source, sink, progress)
        shards = source.shards
    if o.delete_shards:
        # The first one goes last: without it, what is left of them is not taken for a model.
        for path in reversed(shards):
            try:
                os.unlink(path)
            except OSError as error:
                raise OutputError(
                    "the merged file is complete, but this shard cannot be removed:"
                    f" {error.strerror}",
                    file=path,
                ) from None
    return out


def check_merge_output(out: Path) -> None:
    """Raise OutputError if `out` exists: merging never overwrites."""
    if os.path.lexists(out):
        raise OutputError("the output file already exists", file=out)


def copy_tensors(source: GGUFFile, sink: Sink, progress: OnBytesCopied | None = None) -> None:
    """Copy all tensors byte for byte in pieces of 16 MiB."""
    for tensor in source.tensors:
        for start in range(0, tensor.n_bytes, _PIECE):
            piece = source.read_bytes(tensor, start, min(start + _PIECE, tensor.n_bytes))
            sink.write(tensor, piece)
            if progress is not None:
                progress(piece.nbytes)
