"""Change a model in other ways than the types of its tensors: remove layers, add a second output
matrix, set metadata keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UsageError, printable
from ...formats.options import Options, option
from ...formats.shared_options import force_option
from ...formats.source import Source, TensorInfo, WrappedSource
from ...formats.tensor_names import EXTRA_OUTPUT, OUTPUT, TOKEN_EMBEDDING, TensorName
from ...formats.values import Value, ValueType, boolean, f32, i32, string, u32
from .plan import PlannedTensor
from .recipe import Recipe

log = logging.getLogger(__name__)

_LONGEST = 127  # bytes of a key or text, as in llama-quantize
_EXPECTED = {
    "int": "a 32-bit integer",
    "float": "a number",
    "bool": "true or false",
    "str": "valid text",
}


def _parts_of_names(flag: str, help: str) -> Any:
    return option((), flag, kind=str, many=True, metavar="PART", help=f"{help}; may be repeated")


@dataclass(frozen=True)
class Changes(Options):
    """Changes to a model besides types.

    prune_layers: layers to remove; the others are renumbered. extra_output: the type of a second
    copy of the output matrix (or of the embedding that serves as one), named output_extra.weight.
    override_kv: `KEY=TYPE:VALUE`; mixes see these keys too. include_weights, exclude_weights: parts
    of the names of importance matrix entries that are used, or not used (not both). hide_imatrix:
    the file records that there was an importance matrix, but not which. force_imatrix: use the
    entries that fit even if the importance matrix seems to belong to another model.
    """

    prune_layers: Sequence[int] = option(
        (),
        "--prune-layers",
        kind=int,
        many=True,
        commas=True,
        metavar="N,..",
        help="leave these layers out and renumber the others",
    )
    extra_output: str | None = option(
        None,
        "--extra-output-tensor",
        metavar="T",
        help="also write the output matrix as output_extra.weight, in type T",
    )
    override_kv: Sequence[str] = option(
        (),
        "--override-kv",
        kind=str,
        many=True,
        metavar="KEY=TYPE:VALUE",
        help="set a metadata key, before the mixes read it; TYPE is int, float, bool or str; may be"
        " repeated",
    )
    include_weights: Sequence[str] = _parts_of_names(
        "--include-weights", "use only entries with PART in their names"
    )
    exclude_weights: Sequence[str] = _parts_of_names(
        "--exclude-weights", "do not use entries with PART in their names"
    )
    hide_imatrix: bool = option(
        False,
        "--hide-imatrix",
        help="do not store the name of the importance matrix in the file",
    )
    force_imatrix: bool = force_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.include_weights and self.exclude_weights:
            raise UsageError("--include-weights and --exclude-weights cannot be used together")

    def uses_entry(self, name: str) -> bool:
        """Return whether an entry of an importance matrix is used."""
        if self.include_weights:
            return any(part in name for part in self.include_weights)
        return not any(part in name for part in self.exclude_weights)

    def review_parts(self, entries: Iterable[str] | None) -> None:
        """Log parts of --include-weights that are in no entry of the importance matrix, and both
        flags where there is none (None). What is to be excluded may be missing.
        """
        flags = {
            "--include-weights": self.include_weights,
            "--exclude-weights": self.exclude_weights,
        }
        if entries is None:
            for flag in (flag for flag, parts in flags.items() if parts):
                log.warning("%s changes nothing without an importance matrix", flag)
            return
        names = list(entries)
        for part in self.include_weights:
            if not any(part in name for name in names):
                log.warning(
                    "--include-weights %s: no entry of the importance matrix has that in its name",
                    printable(part, 80),
                )

    def name_after(self, name: str) -> str | None:
        """Return the name of a tensor after layers were removed; None if it was in one of them."""
        parsed = TensorName.parse(name)
        if parsed.layer is None:
            return name
        if parsed.layer in self.prune_layers:
            return None
        left_out = sum(layer < parsed.layer for layer in set(self.prune_layers))
        return parsed.in_layer(parsed.layer - left_out)

    def names_before(self, model: Source) -> dict[str | None, str]:
        """Return the names of the tensors of `model` by those after layers were removed."""
        return {self.name_after(tensor.name): tensor.name for tensor in model.tensors}

    def apply(self, source: Source, rules: str = "ik") -> Source:
        """Return the source with these changes.

        rules: decides how integers are written, see `override`. Raise UsageError for wrong layers,
        keys and values.
        """
        overrides = self.overrides(rules)
        if not (self.prune_layers or self.extra_output or overrides):
            return source
        tensors = []
        for stored in source.tensors:
            if (name := self.name_after(stored.name)) is not None:
                tensors.append((replace(stored, name=name), stored))
        if self.extra_output:
            names = [tensor.name for tensor, _ in tensors]
            if EXTRA_OUTPUT in names:
                raise UsageError("already exists", tensor=EXTRA_OUTPUT, file=source.path)
            original = next((name for name in (OUTPUT, TOKEN_EMBEDDING) if name in names), None)
            if original is None:
                raise UsageError(
                    "the model has neither an output matrix nor a token embedding to copy",
                    tensor=EXTRA_OUTPUT,
                    file=source.path,
                )
            place = names.index(original)
            tensors.insert(
                place + 1, (replace(tensors[place][0], name=EXTRA_OUTPUT), tensors[place][1])
            )
        metadata = (
            pruned_metadata(source.metadata, self.prune_layers)
            if self.prune_layers
            else source.metadata
        )
        return ChangedSource(source, tensors, metadata | overrides)

    def overrides(self, rules: str = "ik") -> dict[str, Value]:
        """Return the keys of `override_kv`."""
        return dict(override(text, rules) for text in self.override_kv)

    def metadata(self, before: Source, after: Source) -> dict[str, Value]:
        """Return the keys of the changed source without those that `override_kv` adds, which come
        at another place of the file.
        """
        new = {text.partition("=")[0] for text in self.override_kv} - before.metadata.keys()
        return {key: value for key, value in after.metadata.items() if key not in new}

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the type of the second output matrix."""
        if not self.extra_output:
            return recipe
        return replace(
            recipe, tensor_types={**recipe.tensor_types, EXTRA_OUTPUT: self.extra_output}
        )

    def check(self, planned: Sequence[PlannedTensor]) -> None:
        """Raise UsageError for a second output matrix that is not smaller than the first."""
        targets = {plan.target.name: plan.target for plan in planned}
        if self.extra_output and (extra := targets.get(EXTRA_OUTPUT)):
            first = targets.get(OUTPUT) or targets[TOKEN_EMBEDDING]
            if extra.n_bytes >= first.n_bytes:
                raise UsageError(
                    f"is not smaller in {extra.type} than {first.name} in {first.type}",
                    tensor=EXTRA_OUTPUT,
                )


class ChangedSource(WrappedSource):
    """A source with some tensors of another one, under other names."""

    def __init__(
        self,
        inner: Source,
        tensors: Iterable[tuple[TensorInfo, TensorInfo]],
        metadata: dict[str, Value],
    ):
        """tensors: pairs of a tensor and the tensor of `inner` that it is read from."""
        super().__init__(inner)
        self.metadata = metadata
        self._stored = {tensor.name: stored for tensor, stored in tensors}
        self.tensors = tuple(replace(stored, name=name) for name, stored in self._stored.items())

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return self._stored[tensor.name]


def pruned_metadata(metadata: dict[str, Value], layers: Sequence[int]) -> dict[str, Value]:
    """Return the metadata of a model without these layers: the number of layers, lists with an item
    per layer, and the numbers of leading and trailing layers of a kind.

    Raise UsageError for layers that do not exist, or if none is left.
    """
    architecture = (
        metadata["general.architecture"].data if "general.architecture" in metadata else ""
    )
    stated = metadata.get(f"{architecture}.block_count")
    if stated is None:
        raise UsageError(
            "cannot remove layers: the metadata lacks the number of layers"
            f" ({architecture}.block_count)"
        )
    n, gone = stated.data, set(layers)
    if wrong := sorted(layer for layer in gone if not 0 <= layer < n):
        raise UsageError(f"there is no layer {wrong[0]}: the model has layers 0 to {n - 1}")
    if len(gone) == n:
        raise UsageError("no layer would be left")
    keys = dict(metadata)
    for key, value in metadata.items():
        if (
            key.startswith(f"{architecture}.")
            and value.type is ValueType.ARRAY
            and len(value.data) == n
        ):
            keys[key] = replace(
                value, data=[item for layer, item in enumerate(value.data) if layer not in gone]
            )
    keys[f"{architecture}.block_count"] = u32(n - len(gone))
    for key, lost in (
        ("leading_dense_block_count", lambda count: sum(layer < count for layer in gone)),
        ("nextn_predict_layers", lambda count: sum(layer >= n - count for layer in gone)),
    ):
        if (found := keys.get(f"{architecture}.{key}")) is not None:
            keys[f"{architecture}.{key}"] = replace(found, data=found.data - lost(found.data))
    return keys


def override(text: str, rules: str = "ik") -> tuple[str, Value]:
    """Parse `KEY=TYPE:VALUE` with TYPE int, float, bool or str. Raise UsageError for anything else.

    Integers are written as llama-quantize of ik_llama.cpp does, signed (INT32), or for `mainline`
    as llama.cpp does: unsigned (UINT32).
    """
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and equals and colon and kind in ("int", "float", "bool", "str")):
        raise UsageError(f"'{text}': expected KEY=TYPE:VALUE with TYPE int, float, bool or str")
    if len(key.encode()) > _LONGEST or (kind == "str" and len(value.encode()) > _LONGEST):
        raise UsageError(f"'{text}': key and text may have at most {_LONGEST} bytes")
    try:
        match kind:
            case "int":
                number = int(value)
                return key, (
                    u32(_within(abs(number), 1 << 32))
                    if rules == "mainline"
                    else i32(_within(number, 1 << 31))
                )
            case "float":
                return key, f32(float(value))
            case "bool":
                return key, boolean({"true": True, "false": False}[value])
            case _:
                return key, string(value)
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"'{text}': '{value}' is not {_EXPECTED[kind]}") from None


def _within(number: int, limit: int) -> int:
    if not -limit <= number < limit:
        raise ValueError
    return number
