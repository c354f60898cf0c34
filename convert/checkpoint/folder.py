"""A Hugging Face checkpoint folder: config.json, safetensors or PyTorch shards, tokenizer files.

Opening a checkpoint reads config.json, and the first access to `tensors` reads the headers of the
shards. Data is read only in the requested ranges, so that a checkpoint of any size is converted in
little memory.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, NotFoundError, printable
from ...formats.types import GGMLType
from ..tensors.decoded import ggml_type_of
from ..tensors.stored import StoredTensor
from .config import Config, read_json
from .shards import collect_tensors, find_weight_files
from .storage import LocalFiles, TensorStorage

_CONFIG = "config.json"


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """Open the checkpoint in `folder`, reading only config.json. Raise NotFoundError for a missing
    folder or config.json, ConfigError for a malformed one.
    """
    return Checkpoint(Path(folder))


class Checkpoint:
    """A context manager that closes its files."""

    parallel_reads = 0
    """The number of concurrent readers for full speed; 0 for local files."""

    def __init__(self, path: Path):
        if not path.is_dir():
            raise NotFoundError(
                "is not a folder; a checkpoint is a folder with config.json and safetensors files",
                file=path,
            )
        if not (path / _CONFIG).exists():
            raise NotFoundError(f"has no {_CONFIG}{_instead(path)}", file=path)
        self.path = path
        self._storage: TensorStorage = LocalFiles()
        self.config = Config.read(path / _CONFIG)

    @property
    def default_output(self) -> Path | None:
        """The file to convert to, without type and suffix; None for a file in `path` that is named
        after the model.
        """
        return None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by name: files in the order of their names, tensors in header order. The first
        access reads the shard index and all headers.

        Raise NotFoundError for a missing shard, CheckpointError, MalformedFileError or
        TruncatedFileError for files that contradict themselves or each other.
        """
        names = {entry.name for entry in os.scandir(self.path) if entry.is_file()}
        layout = find_weight_files(names, self.path)
        return collect_tensors(
            self.path,
            names,
            layout,
            lambda files: (layout.read_header(self.path / name) for name in files),
        )

    @cached_property
    def architecture(self) -> str:
        """The model class, `architectures[0]` of config.json, or that of a Mamba model as its first
        code stores it. Raise CheckpointError if neither is there.
        """
        mamba = None if "architectures" in self.config else self.config.section("ssm_cfg")
        if mamba is not None:
            return mamba.string("layer", default="Mamba1") + "ForCausalLM"
        names = self.config.strings("architectures")
        if not names:
            raise CheckpointError("key 'architectures' is empty", file=self.config.file)
        return names[0]

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in the file `name` of the folder; None if there is no
        such file.
        """
        path = self.path / name
        return read_json(path) if path.exists() else None

    def text(self, name: str) -> str | None:
        """Return the text of the file `name` of the folder; None if there is no such file. Raise
        CheckpointError if it cannot be read as text.
        """
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8") if path.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"cannot be read as text: {printable(error)}", file=path
            ) from None

    def type_of(self, tensor: StoredTensor) -> GGMLType:
        """Return `ggml_type_of(tensor)`."""
        return ggml_type_of(tensor)

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Return bytes `start` to `stop` of the tensor's elements in row order, as stored:
        uint8[stop - start]. Raise TruncatedFileError if the file has become too short.
        """
        return self._storage.read(tensor, start, stop)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """Return all bytes of the tensor, uint8[n_bytes]."""
        return self.read(tensor, 0, tensor.n_bytes)

    def release(self, tensor: StoredTensor) -> None:
        """Release the memory held for this tensor. It can be read again later."""
        self._storage.release(tensor)

    def close(self) -> None:
        """Close all files. Arrays that were read stay valid."""
        self._storage.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _instead(path: Path) -> str:
    """Return what the folder contains instead, or where the checkpoint may be, for the error about
    config.json.
    """
    names = sorted(entry.name for entry in os.scandir(path))
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "adapter_config.json" in names:
        return "; it is a LoRA adapter, which iqforge convert-lora converts"
    if ggufs:
        return (
            f"; it has {printable(ggufs[0])}, which is converted already: name that file instead of"
            " the folder to quantize or run it"
        )
    inner = [
        found.parent.relative_to(path)
        for pattern in (f"*/{_CONFIG}", f"snapshots/*/{_CONFIG}")
        for found in sorted(path.glob(pattern))
    ]
    if inner:
        return f"; {printable(inner[0])} inside it has one"
    if any(name.endswith((".safetensors", ".bin", ".pth", ".pt")) for name in names):
        return ", which says how to read its weights; download it from where the weights are from"
    return "; a checkpoint is a folder with config.json and safetensors files"
