"""Case of AFM-4.5B of Arcee."""

from __future__ import annotations

from .tiny_configs import Case, common, yarn

CASES = [
    Case("arcee", "ArceeForCausalLM", "arcee", lambda s: common(s, rope_parameters=yarn())),
]
