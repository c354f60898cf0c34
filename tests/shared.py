"""Find the folder of reference data that a developer's checkout may have next to it.

`IQFORGE_SHARED` names it, else `../shared` from the project root. Tests that need it are skipped,
with the reason visible in pytest's summary, where it is absent.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("IQFORGE_SHARED", ROOT.parent / "shared"))


def shared(relative: str) -> Path:
    """Return the path of `relative` in the reference data. Skip the calling test if it does not
    exist.
    """
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"reference data not found: {relative} (set IQFORGE_SHARED)")
    return path
