"""Which samplers run, in which order, and their values. Imports nothing heavy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ...formats.flags import Flag, Range, check_value
from ...formats.options import did_you_mean

if TYPE_CHECKING:
    from ..network.sampling import Sampling

# In the default order, with the letters of --sampling-seq.
SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
}
DEFAULT_ORDER = tuple(SAMPLERS)
BREAKERS = ("\n", ":", '"', "*")
_OTHER_NAMES = {
    "typical": "typ_p",
    "typical_p": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
    "temp": "temperature",
    "top_nsigma": "top_n_sigma",
}
# What numbers are accepted, as `Flag` has it; others may be any finite number.
RANGES: dict[str, Range] = {
    "temperature": {"least": 0},
    "top_k": {"least": 0},
    "top_p": {"above": 0, "most": 1},
    "min_p": {"least": 0, "most": 1},
    "seed": {"least": 0, "most": 2**64 - 1},
    "typical_p": {"least": 0, "most": 1},
    "xtc_probability": {"least": 0, "most": 1},
    "xtc_threshold": {"least": 0, "most": 1},
    "dynatemp_range": {"least": 0},
    "repeat_last_n": {"least": -1},
    "repeat_penalty": {"above": 0},
    "dry_multiplier": {"least": 0},
    "dry_allowed_length": {"least": 0},
    "dry_penalty_last_n": {"least": -1},
    "mirostat": {"least": 0, "most": 2},
    "mirostat_ent": {"least": 0},
}
_PLAIN = ("top_k", "top_p", "min_p", "temperature")  # what kernels compute, in their order


@dataclass(frozen=True)
class SamplerSettings:
    """Values of all samplers, with the names and defaults of llama-cli. Those that are neutral do
    nothing.

    temperature 0 always takes the most probable of the tokens that are left. UsageError for values
    outside of their range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: tuple[str, ...] = BREAKERS
    mirostat: int = 0
    mirostat_lr: float = 0.1
    mirostat_ent: float = 5.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    order: tuple[str, ...] = DEFAULT_ORDER

    def __post_init__(self):
        for one in fields(self):
            if isinstance(one.default, tuple):
                continue
            value = getattr(self, one.name)
            check_value(one.name, Flag((), "", float, **RANGES.get(one.name, Range())), value, None)
        if any(math.isnan(bias) for _, bias in self.logit_bias):
            raise UsageError("a logit bias is not a number")

    def plain(self) -> Sampling | None:
        """Return the settings of the draw that a GPU's kernels make, if nothing else has an effect;
        None if the samplers have to run on the host.
        """
        from ..network.sampling import Sampling

        if self.mirostat or self.logit_bias or self.dynatemp_range > 0:
            return None
        used = [name for name in self.order if self.has_effect(name)]
        places = [_PLAIN.index(name) if name in _PLAIN else -1 for name in used]
        if -1 in places or places != sorted(set(places)):
            return None
        return Sampling(
            self.temperature if "temperature" in self.order else 1.0,
            self.top_k if "top_k" in used else 0,
            self.top_p if "top_p" in used else 1.0,
            self.min_p if "min_p" in used else 0.0,
            self.seed,
        )

    def has_effect(self, name: str) -> bool:
        """Return whether a sampler can change anything with these values."""
        return {
            "penalties": self.repeat_last_n != 0
            and (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0),
            "dry": self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": True,
        }[name]


def sampler_order(names: str) -> tuple[str, ...]:
    """Return the samplers of a text such as "top_k;temperature", in that order. Raise UsageError
    for an unknown name.
    """
    found = []
    for word in names.split(";"):
        name = re.sub(r"[-\s]", "_", word.strip().lower())
        name = _OTHER_NAMES.get(name, name)
        if not name:
            continue
        if name not in SAMPLERS:
            hint = did_you_mean(name, SAMPLERS) or f"; samplers are {', '.join(SAMPLERS)}"
            raise UsageError(f"'{printable(word, 40)}' is not a sampler{hint}")
        found.append(name)
    return tuple(found)


def sampler_sequence(letters: str) -> tuple[str, ...]:
    """Return the samplers of letters such as "kt", in that order. Raise UsageError for an unknown
    letter.
    """
    by_letter = {letter: name for name, letter in SAMPLERS.items()}
    for letter in letters:
        if letter not in by_letter:
            known = ", ".join(f"{letter} {name}" for name, letter in SAMPLERS.items())
            raise UsageError(f"'{printable(letter, 4)}' is not a sampler; letters are {known}")
    return tuple(by_letter[letter] for letter in letters)


def read_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) of texts such as "15043+1" and "29871-inf". Biases of one token add up.
    Raise UsageError for other text.
    """
    found: dict[int, float] = {}
    for text in texts:
        parts = re.fullmatch(r"(\d+)([+-].+)", text.strip())
        try:
            if parts is None:
                raise ValueError
            token, bias = int(parts[1]), float(parts[2])
        except ValueError:
            raise UsageError(
                f"logit bias '{printable(text, 60)}': expected a token id and a bias, such as"
                " 15043+1 or 15043-inf"
            ) from None
        if math.isnan(bias) or bias == math.inf:
            raise UsageError(f"logit bias '{printable(text, 60)}': expected a number or -inf")
        found[token] = found.get(token, 0.0) + bias
    return tuple(found.items())
