"""A PEFT LoRA adapter on disk: its settings, and its matrices paired by the weight that they
change.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...errors import CheckpointError, ConfigError, NotFoundError, printable
from ..tensors.stored import StoredTensor
from ..torch.header import read_torch_header
from .config import Config
from .folder import Checkpoint
from .safetensors import read_header
from .storage import LocalFiles

_FILES = {"adapter_model.safetensors": read_header, "adapter_model.bin": read_torch_header}
_PREFIX = "base_model.model."
# ending of a name -> (which half, whether it belongs to an embedding)
_HALVES = {
    ".lora_A.weight": ("A", False),
    ".lora_B.weight": ("B", False),
    ".lora_embedding_A": ("A", True),
    ".lora_embedding_B": ("B", True),
}


@dataclass(frozen=True)
class Pair:
    """The two factors of a change to a weight W, scaled by alpha / r: B A is added to a matrix
    [n_out, n_in], (B A)^T to an embedding [n_vocab, n_embd].

    Shapes: A [r, n_in] or [r, n_vocab], B [n_out, r] or [n_embd, r].
    """

    a: StoredTensor
    b: StoredTensor
    embedding: bool

    @property
    def rank(self) -> int:
        """r, the rows of A."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of W."""
        return (
            (self.a.shape[1], self.b.shape[0])
            if self.embedding
            else (self.b.shape[0], self.a.shape[1])
        )


class AdapterCheckpoint(Checkpoint):
    """An adapter in the form of a checkpoint of its base model, with only the weights that the
    adapter changes or contains.

    `tensors` have the names and shapes of the base model. Those in `pairs` have no data; `rebased`
    rows tell what a conversion does to their rows. `settings` is adapter_config.json, `config` the
    base model's config.json.
    """

    def __init__(self, path: str | os.PathLike, base: str | os.PathLike | None = None):
        self.path = Path(path)
        if not self.path.is_dir():
            raise NotFoundError(
                "is not a folder; an adapter is a folder with adapter_config.json and"
                " adapter_model.safetensors",
                file=path,
            )
        if not (self.path / "adapter_config.json").exists():
            raise NotFoundError(f"has no adapter_config.json{_instead(self.path)}", file=path)
        self._storage = LocalFiles()
        self.settings = Config.read(self.path / "adapter_config.json")
        _check_settings(self.settings)
        config = Config.read(self._base_folder(base) / "config.json")
        # The adapter's weights are not packed, even if the base model's are.
        plain = {
            key: value
            for key, value in config.values.items()
            if key not in ("quantization_config", "compression_config")
        }
        self.config = Config(plain, config.file)

    def _base_folder(self, base: str | os.PathLike | None) -> Path:
        if base is not None:
            return Path(base)
        named = self.settings.string("base_model_name_or_path", default="")
        if named and Path(named).is_dir():
            return Path(named)
        raise NotFoundError(
            f"the base model '{printable(named)}' is not a folder here; give the one with its"
            " config.json with --base",
            file=self.settings.file,
        )

    @cached_property
    def _found(self) -> tuple[dict[str, Pair], dict[str, StoredTensor]]:
        file = next((self.path / name for name in _FILES if (self.path / name).is_file()), None)
        if file is None:
            raise NotFoundError(f"has none of {', '.join(_FILES)}", file=self.path)
        return _paired(_FILES[file.name](file), file)

    @property
    def pairs(self) -> dict[str, Pair]:
        """The pairs by the names of the weights in the base model
        (`model.layers.0.self_attn.q_proj.weight`).
        """
        return self._found[0]

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        pairs, others = self._found
        stand_ins = {
            name: StoredTensor(
                name, pair.b.dtype, pair.shape, pair.b.file, pair.b.begin, pair.b.end
            )
            for name, pair in pairs.items()
        }
        return stand_ins | others

    def alpha(self) -> float:
        """Return the number that GGUF runtimes divide by the rank to get the scale. Rank-stabilized
        adapters are scaled by alpha / sqrt(r) instead. Raise CheckpointError for a rank-stabilized
        adapter of several ranks, which has no common one.
        """
        alpha, rank = self.settings.number("lora_alpha"), self.settings.integer("r")
        if not self.settings.boolean("use_rslora", default=False):
            return alpha
        if other := next((name for name, pair in self.pairs.items() if pair.rank != rank), None):
            raise CheckpointError(
                f"has rank {self.pairs[other].rank}, adapter_config.json has r {rank}; a"
                " rank-stabilized adapter of several ranks has no common alpha",
                file=self.path,
                tensor=other,
            )
        return alpha * math.sqrt(rank)


def _instead(path: Path) -> str:
    """Return what the folder contains instead, for the error about adapter_config.json."""
    if (path / "config.json").exists():
        return "; it is a checkpoint, which iqforge convert converts"
    return "; an adapter is a folder with adapter_config.json and adapter_model.safetensors"


def _check_settings(settings: Config) -> None:
    """Raise ConfigError for settings that GGUF cannot express."""
    if (kind := settings.string("peft_type")) != "LORA":
        raise ConfigError(
            f"peft_type is '{printable(kind)}'; only LORA adapters exist in GGUF",
            file=settings.file,
        )
    for key, what in (
        ("use_dora", "DoRA, which also rescales columns,"),
        ("fan_in_fan_out", "an adapter of transposed weights"),
    ):
        if settings.boolean(key, default=False):
            raise ConfigError(
                f"key '{key}' is set: GGUF has no counterpart of {what}", file=settings.file
            )
    if settings.values.get("alpha_pattern"):
        raise ConfigError(
            "key 'alpha_pattern' gives weights different alphas; a GGUF adapter has one for all",
            file=settings.file,
        )


def _paired(
    stored: Mapping[str, StoredTensor], file: Path
) -> tuple[dict[str, Pair], dict[str, StoredTensor]]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    embeddings: dict[str, bool] = {}
    others: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        plain = name.removeprefix(_PREFIX)
        ending = next((ending for ending in _HALVES if plain.endswith(ending)), None)
        if ending is None:
            others[plain] = StoredTensor(
                plain,
                tensor.dtype,
                tensor.shape,
                tensor.file,
                tensor.begin,
                tensor.end,
                tensor.strides,
            )
            continue
        half, embedding = _HALVES[ending]
        weight = plain.removesuffix(ending) + ".weight"
        if embeddings.setdefault(weight, embedding) != embedding or half in halves.setdefault(
            weight, {}
        ):
            raise CheckpointError("has a second half of this kind", file=file, tensor=name)
        if len(tensor.shape) != 2 or not tensor.n_elements:
            raise CheckpointError(
                f"has shape {list(tensor.shape)}; halves of an adapter are matrices",
                file=file,
                tensor=name,
            )
        halves[weight][half] = tensor
    pairs = {}
    for weight, found in halves.items():
        if missing := {"A", "B"} - found.keys():
            raise CheckpointError(f"its lora_{missing.pop()} is missing", file=file, tensor=weight)
        pair = Pair(found["A"], found["B"], embeddings[weight])
        if pair.a.shape[0] != pair.b.shape[1]:
            raise CheckpointError(
                f"lora_A has rank {pair.a.shape[0]}, lora_B {pair.b.shape[1]}",
                file=file,
                tensor=weight,
            )
        pairs[weight] = pair
    if not pairs:
        raise CheckpointError("has no pair of lora_A and lora_B", file=file)
    return pairs, others
