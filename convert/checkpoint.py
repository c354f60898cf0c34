"""A Hugging Face checkpoint folder: config.json, safetensors shards mapped on first use, tokenizer files.

Nothing but headers is read before tensors are. Rows of tensors are views into the mapped files, and `release` hands their pages
back, so that a checkpoint of any size can be walked through in little memory.
"""

from __future__ import annotations

import mmap
import os
import re
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ..errors import CheckpointError, MalformedFileError, NotFoundError, UnsupportedTypeError, printable
from ..formats.types import TYPES, GGMLType
from .config import Config, read_json
from .safetensors import StoredTensor, read_header

# Stored dtypes that are ggml types as they are.
FLOAT_DTYPES = {"F32": TYPES["F32"], "F16": TYPES["F16"], "BF16": TYPES["BF16"]}

_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_INDEX = "model.safetensors.index.json"


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """Open the checkpoint in `folder`; reads config.json alone. NotFoundError for a missing folder or config, ConfigError."""
    return Checkpoint(Path(folder))


class Checkpoint:
    """A context manager; closing it unmaps the files."""

    def __init__(self, path: Path):
        if not path.is_dir():
            raise NotFoundError("is not a folder; a checkpoint is a folder with config.json and safetensors files", file=path)
        self.path = path
        self._maps: dict[Path, mmap.mmap] = {}
        self.config = Config.read(path / "config.json")

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by name, files in order of their names, tensors in header order. Reads the shard index and all headers once.

        NotFoundError for a missing shard, CheckpointError, MalformedFileError or TruncatedFileError for files that contradict
        themselves or each other.
        """
        return _collect(self.path)

    @cached_property
    def architecture(self) -> str:
        """The model class, `architectures[0]` of config.json."""
        names = self.config.strings("architectures")
        if not names:
            raise CheckpointError("key 'architectures' is empty", file=self.config.file)
        return names[0]

    def json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file `name` of the folder, None if there is no such file."""
        path = self.path / name
        return read_json(path) if path.exists() else None

    def text(self, name: str) -> str | None:
        """The text of the file `name` of the folder, None if there is no such file."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8") if path.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot be read as text: {printable(error)}", file=path) from None

    def type_of(self, tensor: StoredTensor) -> GGMLType:
        """The ggml type of a stored tensor. UnsupportedTypeError for dtypes that are not F32, F16 or BF16."""
        if found := FLOAT_DTYPES.get(tensor.dtype):
            return found
        raise UnsupportedTypeError(f"dtype {tensor.dtype} is not supported yet; F32, F16 and BF16 are", file=tensor.file,
                                   tensor=tensor.name)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """uint8[n_bytes], a read-only view into the mapped file. Touches no page by itself."""
        if tensor.n_bytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._map(tensor.file, tensor.end), np.uint8, tensor.n_bytes, tensor.begin)

    def release(self, tensor: StoredTensor) -> None:
        """Hand the mapped pages of this tensor back to the system; a later read maps them again."""
        if (mapped := self._maps.get(tensor.file)) is None or tensor.n_bytes == 0:
            return
        begin = tensor.begin - tensor.begin % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, begin, tensor.end - begin)

    def _map(self, path: Path, needed: int) -> mmap.mmap:
        if path not in self._maps:
            try:
                with open(path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise NotFoundError(f"cannot be mapped: {error}", file=path) from None
            self._maps[path] = mapped
        if needed > len(self._maps[path]):
            raise MalformedFileError("has become shorter since it was opened", file=path)
        return self._maps[path]

    def close(self) -> None:
        """Unmap all files. Views that are still held keep their file mapped until they are gone."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:  # a view into it is alive
                pass
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _collect(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of all shards, checked against the index where there is one."""
    index_file = folder / _INDEX
    owners = _read_index(index_file) if index_file.exists() else None
    files = sorted(set(owners.values())) if owners is not None else _files_without_index(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise NotFoundError(f"shard '{printable(name)}' is missing" + (f", named by {_INDEX}" if owners else ""), file=folder / name)
        for tensor in read_header(folder / name).values():
            if tensor.name in tensors:
                raise CheckpointError(f"is stored in {tensors[tensor.name].file.name} and in {name}", file=folder / name,
                                      tensor=tensor.name)
            tensors[tensor.name] = tensor
    if owners is not None:
        _check_index(index_file, owners, tensors)
    if not tensors:
        raise CheckpointError("has no tensors", file=folder)
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    """`weight_map` of the shard index: tensor name -> shard, each the name of a file beside the index."""
    index = read_json(file, unique_keys=True)
    owners = index.get("weight_map")
    if not isinstance(owners, dict) or not owners or not all(isinstance(shard, str) for shard in owners.values()):
        raise CheckpointError("'weight_map' must map tensor names to file names", file=file)
    for shard in set(owners.values()):
        if not shard.isprintable() or not PurePosixPath(shard).name == PureWindowsPath(shard).name == shard or shard in ("", ".", ".."):
            raise CheckpointError(f"shard name '{printable(shard)}' must be the plain name of a file in the same folder", file=file)
    return owners


def _check_index(file: Path, owners: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in owners.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f"; it is in {tensors[name].file.name}" if name in tensors else ""
            raise CheckpointError(f"the index places it in {shard}, which does not have it{where}", file=file, tensor=name)
    if len(tensors) != len(owners):
        name = next(name for name in tensors if name not in owners)
        raise CheckpointError(f"is stored in {tensors[name].file.name}, but the index does not name it", file=file, tensor=name)


def _files_without_index(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    shards = {name: match for name in os.listdir(folder) if (match := _SHARD_NAME.fullmatch(name))}
    if not shards:
        other = sorted(name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".pth", ".safetensors")))
        hint = f"; found {', '.join(other[:4])}, which cannot be converted" if other else ""
        raise NotFoundError(f"has neither model.safetensors nor {_INDEX}{hint}", file=folder)
    counts = sorted({match[2] for match in shards.values()})
    if len(counts) > 1:
        raise CheckpointError(f"has shards of several models, with counts {', '.join(counts)}", file=folder)
    # A missing one is named by the caller when it opens them in turn.
    return [f"model-{number:05d}-of-{counts[0]}.safetensors" for number in range(1, int(counts[0]) + 1)]
