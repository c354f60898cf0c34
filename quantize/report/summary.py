"""Summarize a run: the tensors of each role, and the tensors with the largest errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ...errors import printable
from ...formats.tensor_names import TensorName
from ..run.report import RunReport, TensorReport
from .printing import MIB

_UNWEIGHTED = "the importance matrix has no entry, all columns counted alike"
_WORST = 5
_LONGEST_ROLE = 28


def summary_lines(report: RunReport) -> list[str]:
    """Return a table with a line per role and type, the worst tensors, and the notes of the plan.

    The error of several tensors is the root mean square of their errors, weighted by elements.
    """
    measured = [tensor for tensor in report.tensors if tensor.rmse is not None]
    weighted = any(tensor.weighted for tensor in measured)
    return [
        *_table(report.tensors, bool(measured), weighted),
        *_worst(measured, weighted),
        *_notes(report.tensors),
    ]


def _table(tensors: Sequence[TensorReport], measured: bool, weighted: bool) -> list[str]:
    groups: dict[str, dict[str, list[TensorReport]]] = defaultdict(lambda: defaultdict(list))
    for tensor in tensors:
        target = tensor.planned.target
        groups[TensorName.parse(target.name).role][target.type.type_name].append(tensor)
    heading = f"{'role':<{_LONGEST_ROLE}} {'count':>6}  {'type':<10} {'MiB':>10} {'bits':>6}"
    heading += f" {'rel. rmse':>9}" * measured + f" {'weighted':>9}" * weighted
    lines = [heading]
    for role, types in groups.items():
        name = printable(role, _LONGEST_ROLE)
        for type, group in sorted(types.items(), key=lambda item: -len(item[1])):
            n_bytes = sum(tensor.planned.target.n_bytes for tensor in group)
            n_elements = sum(tensor.planned.target.n_elements for tensor in group)
            line = (
                f"{name:<{_LONGEST_ROLE}} {len(group):>6}  {type:<10} {n_bytes / MIB:>10.2f}"
                f" {8 * n_bytes / max(1, n_elements):>6.2f}"
            )
            line += f" {_error(group, False):>9}" * measured
            lines.append((line + f" {_error(group, True):>9}" * weighted).rstrip())
            name = ""
    return lines


def _error(group: Sequence[TensorReport], weighted: bool) -> str:
    errors = [
        (tensor.planned.target.n_elements, tensor.weighted_rmse if weighted else tensor.rmse)
        for tensor in group
        if tensor.weighted or not weighted
    ]
    known = [(n, error) for n, error in errors if error is not None]
    n_elements = sum(n for n, _ in known)
    if not n_elements:
        return ""
    return f"{math.sqrt(sum(n * error**2 for n, error in known) / n_elements):.5f}"


def _worst(measured: Sequence[TensorReport], weighted: bool) -> list[str]:
    def error(tensor: TensorReport) -> float:
        found = tensor.weighted_rmse if weighted and tensor.weighted else tensor.rmse
        return found or 0.0

    worst = sorted(measured, key=error, reverse=True)[:_WORST]
    if len(measured) <= _WORST:
        return []
    lines = ["", "largest errors:"]
    for tensor in worst:
        target = tensor.planned.target
        line = f"  {printable(target.name):<36} {target.type.type_name:<10} {tensor.rmse:.5f}"
        lines.append(line + (f"  weighted {tensor.weighted_rmse:.5f}" if tensor.weighted else ""))
    return lines


def _notes(tensors: Sequence[TensorReport]) -> list[str]:
    named: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.planned.note:
            named.setdefault(tensor.planned.note, []).append(tensor.planned.target.name)
    if any(tensor.weighted for tensor in tensors):
        unweighted = [t for t in tensors if t.rmse is not None and not t.weighted]
        if unweighted:
            named[_UNWEIGHTED] = [tensor.planned.target.name for tensor in unweighted]
    lines = [
        f"{printable(names[0]) if len(names) == 1 else f'{len(names)} tensors'}: {note}"
        for note, names in named.items()
    ]
    return ["", *lines] if lines else []
