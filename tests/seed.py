"""The seed of tests that are random in every run. `IQFORGE_TEST_SEED` repeats a run."""

from __future__ import annotations

import os

VARIABLE = "IQFORGE_TEST_SEED"


def run_seed() -> int:
    """Return the seed of this run. All processes of a run share it through the environment."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(int.from_bytes(os.urandom(4), "little"))
    return int(os.environ[VARIABLE])
