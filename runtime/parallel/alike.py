"""Ranks must be asked for the same. Hosts that were given other files or flags would add up parts
of different models, or wait for each other without end: here they notice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import UsageError, printable
from .ranks import named_ranks

if TYPE_CHECKING:
    import torch

    from ...formats.source import Source
    from ..options import LoadOptions

_DIGEST = "sha256:"
_SAMPLED = 16  # tensors of which a few rows are read
# Options of loading that each host may have for itself: paths, CPU threads, memory, patterns that
# name its GPU, and what counts on the command line of one host only.
_OWN = (
    *("device", "threads", "cache_size", "timeout", "lora", "lora_scaled", "override_tensor"),
    *("fit", "main_gpu", "max_gpu", "split_mode", "tensor_split"),
)


class Exchange(Protocol):
    """Ranks that meet, such as `group.Group`."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        ...


def check_alike(ranks: Exchange, facts: Mapping[str, str]) -> None:
    """Compare `facts` of all ranks: values of flags, and digests (`digest_of`) of other things.
    UsageError on every rank that names the first fact in which ranks differ, and these ranks.
    """
    first, *others = ranks.exchange(dict(facts))
    for name, wanted in first.items():
        differ = {rank: one.get(name) for rank, one in enumerate(others, 1)}
        differ = {rank: value for rank, value in differ.items() if value != wanted}
        if not differ:
            continue
        named = named_ranks(differ)
        if wanted.startswith(_DIGEST):
            said = f"{named} {'has' if len(differ) == 1 else 'have'} another {name} than rank 0"
        else:
            rank, value = next(iter(differ.items()))
            said = f"rank {rank} has {name} {_shown(value)}, and rank 0 {name} {_shown(wanted)}"
        raise UsageError(f"{said}: all ranks need the same")


def _shown(value: str | None) -> str:
    return "unset" if value is None else printable(value, 80)


def load_facts(
    options: LoadOptions, shares: Sequence[float], mode: str, device: torch.device
) -> dict[str, str]:
    """Return what all ranks must have been given alike to load a model, by the flags."""
    facts = {
        "-sm": mode,
        "-ts": ",".join(f"{share:.6g}" for share in shares),
        "--device": device.type,
    }
    for name in options.field_names():
        if name not in _OWN:
            value = getattr(options, name)
            facts[options.flag_of(name).names[0]] = "unset" if value is None else str(value)
    return facts


def model_facts(source: Source) -> dict[str, str]:
    """Return digests of a model: of the metadata that its evaluation depends on, of its tensors,
    and of some rows of its weights. Shards and a whole file of the same model have the same ones.
    """
    named = source.metadata.get("general.architecture")
    read = ("general.architecture", f"{named.data if named else ''}.", "tokenizer.ggml.")
    keys, shapes, rows = (hashlib.sha256() for _ in range(3))
    for key, value in sorted(source.metadata.items()):
        if key.startswith(read):
            keys.update(f"{key}={value!r}\n".encode("utf-8", "surrogatepass"))
    tensors = sorted(source.tensors, key=lambda tensor: tensor.name)
    for tensor in tensors:
        line = f"{tensor.name} {tensor.shape} {tensor.type.name}\n"
        shapes.update(line.encode("utf-8", "surrogatepass"))
    for tensor in tensors[:: max(1, len(tensors) // _SAMPLED)]:
        group = tensor.type.group_rows
        start = tensor.n_rows // 2 // group * group
        start = min(start, max(0, tensor.n_rows - group))
        rows.update(source.read_rows(tensor, start, start + group).tobytes())
        source.release(tensor)
    return {
        "model (its metadata)": _DIGEST + keys.hexdigest(),
        "model (names, shapes and types of its tensors)": _DIGEST + shapes.hexdigest(),
        "model (its weights)": _DIGEST + rows.hexdigest(),
    }


def digest_of(content: bytes) -> str:
    """Return what stands in facts for a content that is not shown."""
    return _DIGEST + hashlib.sha256(content).hexdigest()
