"""Case of Apertus."""

from __future__ import annotations

from .tiny_configs import Case, headless

CASES = [Case("apertus", "ApertusForCausalLM", "apertus", headless)]
