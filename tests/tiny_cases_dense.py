"""Cases of dense models, one each: Seed-OSS, SmolLM3, StarCoder2."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, common, headed


def _smollm3(s: Sizes) -> dict[str, Any]:
    # The fourth layer is the one without rotation, and there is one after it.
    return common(s, num_hidden_layers=5, tie_word_embeddings=True)


def _starcoder2(s: Sizes) -> dict[str, Any]:
    config = common(s, norm_epsilon=1e-5, use_bias=True, sliding_window=None)
    del config["rms_norm_eps"]
    return config


CASES = [
    Case("seed_oss", "SeedOssForCausalLM", "seed_oss", headed),
    Case("smollm3", "SmolLM3ForCausalLM", "smollm3", _smollm3),
    Case("starcoder2", "Starcoder2ForCausalLM", "starcoder2", _starcoder2),
]
