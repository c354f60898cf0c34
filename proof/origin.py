"""What a model is made of: facts about a source that are known before its weights are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api.plan import plan_quantization
from ..convert.source import CheckpointSource
from ..errors import UsageError
from ..formats.source import Source
from ..quantize.plan.budget import DRAFT, allowed_types
from ..quantize.plan.recipe import Recipe
from ..quantize.plan.size_range import SizeRange, size_range
from ..quantize.report.probe import probe_groups
from ..quantize.run.compile_task import CompileTask
from ..quantize.searches import encodable_types
from . import auto_plan
from .auto_compiling import tasks_of_choice, tasks_of_probes
from .card import LICENSE_KEYS


@dataclass(frozen=True)
class Origin:
    """A source. address: what opens it, pinned to a commit if it is remote. provenance: its name,
    and what distinguishes it. n_probes: measurements of sensitivities, layer by layer. active:
    weights that a token is multiplied with. choose_share: how long errors of types take, compared
    with quantizing everything once. sizes: what results can have. quantized: types of a GGUF file
    that are not floats. choice_tasks, probe_tasks: what the CPU compiles to choose types, and to
    measure sensitivities.
    """

    address: str
    provenance: dict[str, Any]
    n_parameters: int
    n_bytes: int
    n_vocab: int
    n_probes: int
    active: float
    choose_share: float
    license: dict[str, str]
    sizes: SizeRange
    quantized: tuple[str, ...]
    choice_tasks: tuple[CompileTask, ...]
    probe_tasks: tuple[CompileTask, ...]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.provenance["name"]

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file and not a checkpoint."""
        return os.path.isfile(self.address)

    @property
    def is_remote(self) -> bool:
        """Whether it is on the Hub."""
        return self.address.startswith("hf://")

    @classmethod
    def of(cls, address: str, opened: Source, types: Sequence[str]) -> Origin:
        """Return the facts of an open source. types: see `recipe_for_target`."""
        address, provenance = _identify(address, opened)
        recipe = Recipe(DRAFT, allow_requantize=True, ignore_imatrix_rules=True)
        draft = plan_quantization(opened, recipe, None)
        allowed = allowed_types(types, encodable_types())
        return cls(
            address,
            provenance,
            sum(tensor.n_elements for tensor in opened.tensors),
            sum(tensor.n_bytes for tensor in opened.tensors),
            _vocabulary(opened),
            len(probe_groups(opened.tensors, str(opened.metadata["general.architecture"].data))),
            auto_plan.active_parameters(opened),
            auto_plan.choose_seconds(opened, types, 1.0),
            {
                key: str(opened.metadata[f"general.{stored}"].data)
                for key, stored in LICENSE_KEYS.items()
                if f"general.{stored}" in opened.metadata
            },
            size_range(draft, allowed, bool(types), opened.metadata),
            tuple(sorted({t.type.name for t in opened.tensors if t.type.is_quantized}))
            if os.path.isfile(address)
            else (),
            tuple(tasks_of_choice(draft, allowed, bool(types))),
            tuple(tasks_of_probes(opened)),
        )


def _identify(address: str, opened: Source) -> tuple[str, dict[str, Any]]:
    origin = opened.origin
    if address.startswith("hf://") and isinstance(origin, CheckpointSource):
        from ..convert.hub.checkpoint import RemoteCheckpoint  # needs packages for HTTP

        if isinstance(origin.checkpoint, RemoteCheckpoint):
            repository = origin.checkpoint.repository
            return f"hf://{repository.name}@{repository.commit}", {
                "name": repository.name.rsplit("/", 1)[-1],
                "repository": repository.name,
                "commit": repository.commit,
            }
    files = [[file, *stat_of(file)] for file in sorted(map(str, opened.files))]
    name = os.path.basename(os.path.abspath(address)).removesuffix(".gguf")
    return address, {"name": name, "files": files}


def _vocabulary(source: Source) -> int:
    tokens = source.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise UsageError("has no vocabulary, which an importance matrix needs", file=source.path)
    return len(tokens.data)


def stat_of(path: str | os.PathLike) -> list[int]:
    """Return what changes when a file is written: its size and time."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]
