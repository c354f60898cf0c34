"""The calibration text that comes with the package; `calibration/SOURCES.md` says what it is."""

from __future__ import annotations

import lzma
from pathlib import Path

DEFAULT = "default"  # in place of the name of a text
KINDS = ("prose", "technical", "code", "structured", "varied")
_FOLDER = Path(__file__).parent / "calibration"


def default_texts() -> list[tuple[str, str]]:
    """Return (content, name) of every kind of text."""
    return [
        (lzma.decompress((_FOLDER / f"{kind}.txt.xz").read_bytes()).decode(), f"{DEFAULT}/{kind}")
        for kind in KINDS
    ]
