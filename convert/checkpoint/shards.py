"""Find the weight files of a checkpoint, and check them against the index that names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ...errors import CheckpointError, NotFoundError, printable
from ..tensors.stored import StoredTensor
from ..torch.header import read_torch_header
from .config import read_json
from .safetensors import read_header


@dataclass(frozen=True)
class WeightFiles:
    """A pattern of names of weight files: `<stem><suffix>`, or `<stem>-00001-of-00002<suffix>` with
    an index.
    """

    stem: str
    suffix: str
    read_header: Callable[[Path], dict[str, StoredTensor]]

    @property
    def single(self) -> str:
        """The name of the file if there is only one."""
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        """The name of the checkpoint shard index."""
        return f"{self.stem}{self.suffix}.index.json"

    def shards(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that look like shards, with the number of shards that each claims."""
        pattern = re.compile(re.escape(self.stem) + r"-\d{5}-of-(\d{5})" + re.escape(self.suffix))
        return {name: match[1] for name in names if (match := pattern.fullmatch(name))}


SAFETENSORS = WeightFiles("model", ".safetensors", read_header)
TORCH = WeightFiles("pytorch_model", ".bin", read_torch_header)
LAYOUTS = (SAFETENSORS, TORCH)  # the first that a checkpoint has is used


def find_weight_files(names: Collection[str], folder: Path) -> WeightFiles:
    """Return the pattern that the weight files among the files `names` follow. Raise NotFoundError
    with what the folder has instead.
    """
    for layout in LAYOUTS:
        if layout.index in names or layout.single in names or layout.shards(names):
            return layout
    other = sorted(
        name for name in names if name.endswith((".bin", ".pt", ".pth", ".safetensors", ".gguf"))
    )
    hint = (
        f"; found {', '.join(map(printable, other[:4]))}, which cannot be converted"
        if other
        else ""
    )
    raise NotFoundError(
        f"has neither {SAFETENSORS.single} nor {SAFETENSORS.index} nor {TORCH.single}{hint}",
        file=folder,
    )


def collect_tensors(
    folder: Path,
    names: Collection[str],
    layout: WeightFiles,
    headers: Callable[[list[str]], Iterable[dict[str, StoredTensor]]],
) -> dict[str, StoredTensor]:
    """Return the tensors of all shards by name: files in the order of their names, tensors in
    header order.

    `folder` has the index, if there is one. `headers` returns the tensors of each file that it is
    given. Raise NotFoundError for a missing shard, CheckpointError for an index that names files
    outside the folder or contradicts the shards, and for a tensor that is stored twice.
    """
    index_file = folder / layout.index
    owners = _read_index(index_file) if layout.index in names else None
    files = (
        sorted(set(owners.values()))
        if owners is not None
        else _files_without_index(folder, names, layout)
    )
    for name in files:
        if name not in names:
            hint = f", named by {layout.index}" if owners else ""
            raise NotFoundError(f"shard '{printable(name)}' is missing{hint}", file=folder / name)
    tensors: dict[str, StoredTensor] = {}
    for name, found in zip(files, headers(files)):
        for tensor in found.values():
            if tensor.name in tensors:
                raise CheckpointError(
                    f"is stored in {tensors[tensor.name].file.name} and in {name}",
                    file=folder / name,
                    tensor=tensor.name,
                )
            tensors[tensor.name] = tensor
    if owners is not None:
        _check_index(index_file, owners, tensors)
    if not tensors:
        raise CheckpointError("has no tensors", file=folder)
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    """Return `weight_map` of the shard index: tensor name -> shard, the name of a file next to the
    index.
    """
    index = read_json(file, unique_keys=True)
    owners = index.get("weight_map")
    if (
        not isinstance(owners, dict)
        or not owners
        or not all(isinstance(shard, str) for shard in owners.values())
    ):
        raise CheckpointError("'weight_map' must map tensor names to file names", file=file)
    for shard in set(owners.values()):
        if (
            not shard.isprintable()
            or not PurePosixPath(shard).name == PureWindowsPath(shard).name == shard
            or shard in ("", ".", "..")
        ):
            raise CheckpointError(
                f"shard name '{printable(shard)}' must be the plain name of a file in the same"
                " folder",
                file=file,
            )
    return owners


def _check_index(file: Path, owners: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in owners.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f"; it is in {tensors[name].file.name}" if name in tensors else ""
            raise CheckpointError(
                f"the index says that it is in {shard}, which does not have it{where}",
                file=file,
                tensor=name,
            )
    if len(tensors) != len(owners):
        name = next(name for name in tensors if name not in owners)
        raise CheckpointError(
            f"is stored in {tensors[name].file.name}, but the index does not name it",
            file=file,
            tensor=name,
        )


def _files_without_index(folder: Path, names: Collection[str], layout: WeightFiles) -> list[str]:
    if layout.single in names:
        return [layout.single]
    counts = sorted(set(layout.shards(names).values()))
    if len(counts) > 1:
        raise CheckpointError(
            f"has shards of several models, with counts {', '.join(counts)}", file=folder
        )
    # The caller checks each in turn and names a missing one.
    return [
        f"{layout.stem}-{number:05d}-of-{counts[0]}{layout.suffix}"
        for number in range(1, int(counts[0]) + 1)
    ]
