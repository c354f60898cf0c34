"""Save plans as JSON files with one line per tensor: what it becomes and why. They can be edited
and carried out again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import IqforgeError, MalformedFileError, NotFoundError, UnknownTypeError, UsageError
from ...formats.options import checks_keywords
from ...formats.output import PartFile
from ...formats.source import TensorInfo
from ...formats.types import ggml_type
from ...formats.values import Value
from .plan import PlannedTensor
from .recipe import Recipe

FORMAT = "iqforge plan 1"
_SWITCHES = ("allow_requantize", "ignore_imatrix_rules", "symmetric_q40")


@dataclass(frozen=True)
class SavedPlan(Recipe):
    """A recipe that names the type of every tensor.

    stored: the tensors of the model that it was made for; other models are refused. reasons: the
    planned type of each tensor and what decided it. path: the file that it was read from.
    """

    stored: tuple[TensorInfo, ...] = ()
    reasons: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    path: str = ""

    def check_source(self, tensors: Sequence[TensorInfo]) -> None:
        """Raise UsageError naming the first tensor that differs from the model of the plan."""
        if (difference := first_difference(self.stored, tensors)) is not None:
            raise UsageError(f"the plan is for another model: {difference}", file=self.path)

    def plan(
        self,
        tensors: Sequence[TensorInfo],
        metadata: Mapping[str, Value],
        *,
        imatrix: bool = False,
        allow_requantize: bool = False,
    ) -> list[PlannedTensor]:
        planned = super().plan(
            tensors, metadata, imatrix=imatrix, allow_requantize=allow_requantize
        )
        wanted = {name: ggml_type(kind) for name, kind in self.tensor_types.items()}
        if changed := next(
            (plan for plan in planned if plan.target.type is not wanted[plan.source.name]), None
        ):
            raise UsageError(
                f"{self.type} keeps this tensor, but the plan says {wanted[changed.source.name]}",
                file=self.path,
                tensor=changed.source.name,
            )
        return [replace(plan, why=self._why(plan)) for plan in planned]

    def _why(self, plan: PlannedTensor) -> str:
        kind, why = self.reasons[plan.source.name]
        return why if kind == plan.target.type.name else f"edited, was {kind}"


def first_difference(wanted: Sequence[TensorInfo], found: Sequence[TensorInfo]) -> str | None:
    """Describe the first difference between two lists of tensors, None if there is none. The order
    does not matter.
    """
    there = {tensor.name: tensor for tensor in found}
    for tensor in wanted:
        if (other := there.get(tensor.name)) is None:
            return f"it has no {tensor.name}"
        if other.shape != tensor.shape:
            return f"{tensor.name} has shape {_dims(other)}, in the plan {_dims(tensor)}"
        if other.type is not tensor.type:
            return f"{tensor.name} has type {other.type}, in the plan {tensor.type}"
    known = {tensor.name for tensor in wanted}
    more = next((tensor.name for tensor in found if tensor.name not in known), None)
    return None if more is None else f"it has {more}, which is not in the plan"


def _dims(tensor: TensorInfo) -> str:
    return " x ".join(map(str, reversed(tensor.shape)))


def plan_text(recipe: Recipe, planned: Sequence[PlannedTensor], version: str) -> str:
    """Return the JSON of a plan. Each tensor has its name, its dimensions with the row length
    first, its type before and after, and the reason.

    `planned` is the type that the recipe chose: users edit `type`, and the difference stays
    visible.
    """
    said = {
        "format": FORMAT,
        "version": version,
        "preset": recipe.type,
        "rules": recipe.rules,
        **{name: getattr(recipe, name) for name in _SWITCHES},
    }
    lines = [
        json.dumps(
            {
                "name": plan.source.name,
                "dims": list(reversed(plan.source.shape)),
                "source": plan.source.type.name,
                "type": plan.target.type.name,
                "planned": plan.target.type.name,
                "why": _reason(plan),
            },
            ensure_ascii=False,
        )
        for plan in planned
    ]
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in said.items())
    return f'{{\n{head},\n "tensors": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _reason(plan: PlannedTensor) -> str:
    return ", ".join(filter(None, (plan.why, plan.note)))


def save_plan(
    path: str | os.PathLike, recipe: Recipe, planned: Sequence[PlannedTensor], version: str
) -> None:
    """Write a plan for `load_plan`. An existing file is replaced."""
    with PartFile(path) as out:
        out.write(plan_text(recipe, planned, version).encode())


@checks_keywords
def load_plan(path: str | os.PathLike) -> SavedPlan:
    """Read a saved plan. Raise NotFoundError, MalformedFileError if the file is not a plan, and
    UnknownTypeError.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except FileNotFoundError:
        raise NotFoundError("plan file not found", file=path) from None
    except OSError as error:
        raise IqforgeError(f"cannot be read: {error.strerror}", file=path) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise MalformedFileError(f"is not JSON: {error}", file=path) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise MalformedFileError(f"is not a plan: its format is not '{FORMAT}'", file=path)
    fields: dict[str, Any] = {
        "rules": _field(document, "rules", str, path),
        "type": _field(document, "preset", str, path),
    }
    for name in _SWITCHES:
        fields[name] = _field(document, name, bool, path)
    stored, types, reasons = [], {}, {}
    for number, entry in enumerate(_field(document, "tensors", list, path)):
        if not isinstance(entry, dict):
            raise MalformedFileError(f"entry {number} of 'tensors' is not a mapping", file=path)
        name, dims = (
            _field(entry, "name", str, path, number),
            _field(entry, "dims", list, path, number),
        )
        if not dims or not all(type(size) is int and size > 0 for size in dims):
            raise MalformedFileError(
                f"sizes {dims} are not positive numbers", file=path, tensor=name
            )
        if name in types:
            raise MalformedFileError("duplicate tensor", file=path, tensor=name)
        try:
            source, target = (
                ggml_type(_field(entry, key, str, path, number)) for key in ("source", "type")
            )
        except UnknownTypeError as error:
            raise UnknownTypeError(error.message, file=path, tensor=name) from None
        stored.append(TensorInfo(name, tuple(reversed(dims)), source))
        types[name] = target.name
        reasons[name] = str(entry.get("planned", target.name)), str(entry.get("why", ""))
    return SavedPlan(
        **fields, tensor_types=types, stored=tuple(stored), reasons=reasons, path=os.fspath(path)
    )


def _field(
    entry: dict, key: str, kind: type, path: str | os.PathLike, number: int | None = None
) -> Any:
    value = entry.get(key)
    if not isinstance(value, kind):
        where = "" if number is None else f"entry {number} of 'tensors': "
        raise MalformedFileError(
            f"{where}'{key}' is missing or not of type {kind.__name__}", file=path
        )
    return value
