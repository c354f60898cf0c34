"""The switches of the reference's runtime that have an effect here. The others are in
`commands/ignored_flags.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import UsageError, printable

MLA_ABSORBS_BELOW = 128  # new tokens of a sequence


@dataclass(frozen=True)
class Switches:
    """What can be chosen about how a network is evaluated.

    flash_attention: attention without a matrix of scores; without it, values of a cache cannot be
    quantized. attention_buffer: MiB that the scores of attention without flash_attention may take
    at a time (groups of heads one after another), and keys and values of latent attention; 0: no
    bound, and 512. ser: smart expert reduction (K, t):
    the K most probable experts always, of the other selected ones those whose probability is more
    than t times the largest. merge_gate_up: gate and up experts as one matrix. mla: the form of
    latent attention: 1 absorbed; 2 and 3 naive for many new tokens, absorbed for few; 0 naive.
    sparse_attention: layers with an indexer see only the positions it chooses; without, all.
    swa_full: layers with a sliding window keep all positions of a sequence.
    """

    flash_attention: bool = True
    attention_buffer: int = 0
    ser: tuple[int, float] | None = None
    merge_gate_up: bool = False
    mla: int = 3
    sparse_attention: bool = True
    swa_full: bool = False

    @property
    def absorb(self) -> int:
        """Return the number of new tokens below which latent attention is absorbed."""
        return {0: 0, 1: 2**31}.get(self.mla, MLA_ABSORBS_BELOW)

    def __post_init__(self):
        if self.attention_buffer < 0:
            raise UsageError(f"-amb is {self.attention_buffer} MiB, expected 0 (no bound) or more")
        if self.mla not in range(4):
            raise UsageError(f"-mla is {self.mla}, expected 0 to 3")
        if self.ser is not None and not (self.ser[0] >= 1 and 0 <= self.ser[1] <= 1):
            raise UsageError(
                f"-ser is {self.ser[0]},{self.ser[1]}, expected at least one expert and a threshold"
                " of 0 to 1"
            )


def parse_ser(text: str) -> tuple[int, float] | None:
    """`K,t` of -ser; None for what switches it off (`0,0` or a negative K, as in the reference).
    Raise UsageError for other text.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*,\s*(\d*\.?\d+)\s*", text)
    if not found:
        raise UsageError(f"-ser is '{printable(text, 40)}', expected K,t such as 6,0.4")
    k, t = int(found[1]), float(found[2])
    return None if k < 1 else (k, t)


def parse_on_off(name: str, value: object) -> bool:
    """Return the value of a flag such as `-fa`, `-fa on|off|auto|1|0|true|false`, or of its option.
    Raise UsageError for other text.
    """
    known = {
        True: True,
        False: False,
        "on": True,
        "1": True,
        "auto": True,
        "-1": True,
        "enabled": True,
        "true": True,
        "off": False,
        "0": False,
        "disabled": False,
        "false": False,
    }
    if value not in known:
        raise UsageError(f"{name} is '{printable(value, 40)}', expected on, off or auto")
    return known[value]
