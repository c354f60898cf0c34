"""The size that a result may have, and how users write it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ...errors import UsageError


@dataclass(frozen=True)
class SizeTarget:
    """The size that the result may have: bits per weight of all tensor data (`bpw`), or bytes of
    the file (`size`).

    types: names of the allowed types, by default `budget.DEFAULT_TYPES`. damage: a file of measured
    sensitivities (`sensitivity.save_probes`); without it sensitivities are estimated from roles.
    """

    bpw: float | None = None
    size: int | None = None
    types: tuple[str, ...] = ()
    damage: str | None = None

    def __post_init__(self) -> None:
        if (self.bpw is None) == (self.size is None):
            raise UsageError(
                "the target is either bits per weight (--target-bpw) or a size (--target-size):"
                " give one of them"
            )
        asked = self.bpw if self.bpw is not None else self.size
        if asked is None or not asked > 0 or asked == math.inf:
            raise UsageError(f"the target must be positive, not {asked}")


def parse_size(text: str | int) -> int:
    """Return the bytes of `12G` (10^9 each), `11.5GiB` (2^30), `700M`, `700MiB` or a plain number.
    Raise UsageError for anything else.
    """
    if isinstance(text, int):
        return text
    units = {
        "": 1,
        "K": 10**3,
        "M": 10**6,
        "G": 10**9,
        "T": 10**12,
        "KI": 2**10,
        "MI": 2**20,
        "GI": 2**30,
        "TI": 2**40,
    }
    match = re.fullmatch(r"(\d{1,15})(?:\.(\d{1,9}))?([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[3] not in units:
        raise UsageError(
            f"invalid size '{text}': expected a number with a unit, such as 12G (10^9 bytes),"
            " 11.5GiB (2^30), 700M or 700MiB"
        )
    whole, fraction, unit = int(match[1]), match[2] or "", units[match[3]]
    return whole * unit + int(fraction or 0) * unit // 10 ** len(fraction)
