"""The texts of `iqforge auto`: what it calibrates with, and what it measures on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..imatrix.default_texts import DEFAULT, default_texts
from ..runtime.evaluate.chunks import read_text

_HELD_OUT = 5  # one part of so many of every text is measured, and not calibrated with


@dataclass(frozen=True)
class AutoTexts:
    """Texts by name. held_out: those that are measured were cut from those for calibration."""

    calibration: dict[str, str]
    tests: dict[str, str]
    held_out: bool

    @classmethod
    def read(
        cls, texts: Iterable[str | os.PathLike], tests: Iterable[str | os.PathLike]
    ) -> AutoTexts:
        """Read calibration texts (`default`: those that come with iqforge) and texts to measure on;
        without these, the last fifth of every calibration text is held out. UsageError for a text
        that is too short for that.
        """
        given: dict[str, str] = {}
        for path in texts:
            if path == DEFAULT:
                given |= {name.replace("/", "-"): text for text, name in default_texts()}
            else:
                given[_unique(path, given)] = read_text(path)
        measured: dict[str, str] = {}
        for path in tests:
            measured[_unique(path, measured)] = read_text(path)
        if measured:
            return cls(given, measured, False)
        calibration = {}
        for name, text in given.items():
            cut = text.rfind("\n", 0, len(text) * (_HELD_OUT - 1) // _HELD_OUT) + 1
            if not text[:cut].strip() or not text[cut:].strip():
                raise UsageError(
                    f"text '{name}' has too few lines to hold out a fifth of it: give a text to"
                    " measure on (--test)"
                )
            calibration[name], measured[name] = text[:cut], text[cut:]
        return cls(calibration, measured, True)


def sample(texts: Iterable[str], n_bytes: int) -> str:
    """Return the beginnings of all texts, about `n_bytes` together."""
    own = list(texts)
    share = max(1, n_bytes // max(1, len(own)))
    return "".join(text.encode()[:share].decode("utf-8", "ignore") + "\n" for text in own)


def _unique(path: str | os.PathLike, taken: dict[str, str]) -> str:
    name = Path(path).stem
    number, found = 2, name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found
