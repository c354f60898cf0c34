"""Warn about rules that have no effect, and about pairs of rules that want the same tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from ...errors import UsageError
from ...formats.source import TensorInfo
from .overrides import Rule

log = logging.getLogger(__name__)


def review_rules(
    rules: Sequence[Rule],
    results: Iterable[TensorInfo],
    decided: Mapping[str, Rule],
    strict: bool = False,
) -> None:
    """Log every rule that applies to no tensor, and every pair of rules that want different types
    for one tensor, of which the first counts.

    rules: in order of precedence. results: all tensors with the types they get. decided: the rule
    that gave each tensor its type; other tensors got theirs from elsewhere. A rule that asks for
    the types that its tensors have anyway is not a mistake. strict: rules that apply to no tensor
    are a UsageError that names them all; pairs are logged.
    """
    results = list(results)
    taken, useless = set(decided.values()), []
    for place, rule in enumerate(rules):
        matched = [tensor for tensor in results if rule.pattern.search(tensor.name)]
        if rule not in taken and not (
            matched and all(tensor.type is rule.type for tensor in matched)
        ):
            useless.append(f"{rule} {_why_useless(rule, matched, decided)}")
            continue
        for earlier in rules[:place]:
            both = [t.name for t in matched if decided.get(t.name) is earlier]
            if both and earlier.type is not rule.type:
                more = f" and {len(both) - 1} more tensor(s)" if len(both) > 1 else ""
                log.warning(
                    "%s and %s both want %s%s: the first one counts", earlier, rule, both[0], more
                )
    if strict and useless:
        raise UsageError("; ".join(useless))
    for line in useless:
        log.warning("%s", line)


def _why_useless(rule: Rule, matched: Sequence[TensorInfo], decided: Mapping[str, Rule]) -> str:
    if not matched:
        return "applies to no tensor: no name matches"
    others = [tensor.name for tensor in matched if tensor.name not in decided]
    wide = {tensor.name for tensor in matched if len(tensor.shape) > 1}  # norms are never meant
    if len(others) == len(matched) or wide & {*others}:
        shown = next((name for name in others if name in wide), others[0])
        rest = "others that it" if len(others) < len(matched) else "those it"
        return (
            f"applies to no tensor: {rest} matches, such as {shown}, are kept or get their type"
            " from elsewhere"
        )
    winner = next(decided[tensor.name] for tensor in matched if tensor.name in decided)
    return f"applies to no tensor: earlier rules such as {winner} take all that it matches"
