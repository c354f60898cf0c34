"""Improve what an importance matrix says about experts that saw few tokens, or none.

The mean squares of an expert that saw n tokens are mixed with a prior m worth K tokens (the
posterior mean for a conjugate prior of K pseudo-observations):

    mean' = (S + K m) / (n + K)

for every expert with n < `least`; the others keep their values. The prior is

- for gate and up, which see hidden states of the layer: the mean over all tokens of all experts
  (`prior`), or of the NEIGHBOURS experts whose router rows, less their common mean, are nearest by
  cosine to that of the cold expert (`neighbours`): the router sends to them what it nearly would
  have sent to this one;
- for down, whose columns are neurons of the expert and unrelated to those of other experts: the
  same value for every column, the mean over all columns and tokens (of all experts, or of the
  neighbours).

Counts do not change, except that they are at least 1: merged files are weighted by what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..errors import UsageError
from ..formats.arguments import number, whole_number
from ..formats.tensor_names import ROUTER, TensorName
from .data import Entry, Imatrix
from .experts import with_experts
from .options import DEFAULT_LEAST, DEFAULT_PRIOR_TOKENS, METHODS
from .stored import ComputedEntries

NEIGHBOURS = 4


def fill_cold_experts(
    imatrix: Imatrix,
    method: str = "prior",
    *,
    least: int = DEFAULT_LEAST,
    prior_tokens: float = DEFAULT_PRIOR_TOKENS,
    routers: Mapping[str, np.ndarray] | None = None,
) -> Imatrix:
    """Return `imatrix` with `prior` or `neighbours` applied to experts that saw fewer than `least`
    tokens; `imatrix` itself for other METHODS.

    If counts are calls (`.dat` files), only experts that saw nothing are known, and count as cold.
    routers: for `neighbours`, float[n_experts, width] of each layer, by the name of the router's
    tensor. A tensor of which no expert saw anything is left as it is. Raise UsageError for an
    unknown method, a prior that is not worth a positive number of tokens, or `neighbours` without
    the router of a layer.
    """
    if method not in METHODS:
        raise UsageError(
            f"cold experts: '{method}' is not known, expected one of {', '.join(METHODS)}"
        )
    whole_number("the number of tokens below which experts are cold", least, 0)
    if not number("the prior of cold experts", prior_tokens) > 0:
        raise UsageError(
            f"the prior of cold experts is worth {prior_tokens:g} tokens, expected a positive"
            " number"
        )
    if method not in ("prior", "neighbours"):
        return imatrix
    if imatrix.counts_calls:
        imatrix, least = with_experts(imatrix), 1
    cold = {
        name
        for name, entry in imatrix.entries.items()
        if TensorName.parse(name).is_stacked and entry.counts.any() and (entry.counts < least).any()
    }
    near = {}
    for name in cold if method == "neighbours" else ():
        router = TensorName.parse(name).sibling(ROUTER)
        if routers is None or router not in routers:
            raise UsageError(
                f"cold experts: their neighbours are found with the router {router}, which the"
                " model lacks"
            )
        near[name] = cosines(routers[router])

    def entry(name: str) -> Entry:
        seen = imatrix.entries[name]
        return (
            _filled(
                seen,
                least,
                prior_tokens,
                near.get(name),
                TensorName.parse(name).role == "ffn_down_exps",
            )
            if name in cold
            else seen
        )

    return replace(imatrix, entries=ComputedEntries(imatrix.entries, entry))


def cosines(router: np.ndarray) -> np.ndarray:
    """Return float64[n_experts, n_experts]: cosines between rows of a router less their mean, which
    shifts all logits alike.
    """
    rows = router.astype(np.float64) - router.mean(axis=0, dtype=np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return rows @ rows.T


def _filled(
    entry: Entry, least: int, prior_tokens: float, near: np.ndarray | None, uniform: bool
) -> Entry:
    seen, counts = entry.sums, np.maximum(entry.counts, 1)
    sums, of_all = seen.copy(), seen.sum(axis=0) / entry.counts.sum()
    for expert in np.flatnonzero(entry.counts < least).tolist():
        prior = of_all
        if near is not None:
            others = _neighbours(entry.counts, near[expert], expert)
            prior = seen[others].sum(axis=0) / entry.counts[others].sum()
        if uniform:
            prior = prior.mean()
        sums[expert] = (
            (seen[expert] + prior_tokens * prior)
            / (entry.counts[expert] + prior_tokens)
            * counts[expert]
        )
    return Entry(sums, counts, entry.calls)


def _neighbours(counts: np.ndarray, near: np.ndarray, expert: int) -> np.ndarray:
    """Return the nearest experts that saw anything."""
    order = [
        other for other in np.argsort(-near, kind="stable") if other != expert and counts[other] > 0
    ]
    return np.array(order[:NEIGHBOURS] or [expert])
