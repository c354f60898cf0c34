"""Cases of tiny models of every class that is converted. `tiny_models` draws their weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .tiny_configs import N_TOKENS, SIZES, SMALL, WIDE, Case, Sizes

__all__ = ["CASES", "FAMILIES", "FAST", "N_TOKENS", "SIZES", "SMALL", "WIDE", "Case", "Sizes"]

# The cases of `llama` are the list `CASES` of `tiny_cases_llama.py`. Tests deal out types and
# numbers of ranks in this order, so that a new family belongs at the end.
FAMILIES = (
    "llama",
    "qwen",
    "deepseek",
    "arcee",
    "glm4",
    "bailing",
    "dots1",
    "exaone4",
    "hunyuan",
    "afmoe",
    "mimo2",
    "llama4",
    "minimax",
    "olmo",
    "lfm2",
    "glm_dsa",
    "gemma",
    "granite",
    "cohere",
    "nemotron",
    "gpt_oss",
    "phi3",
    "ernie4_5",
    "dense",
    "step35",
    "exaone_moe",
    "apertus",
    "internlm2",
    "deepseek_moe",
    "qwen3vl",
    "falcon_h1",
    "mamba2",
    "kimi_linear",
    "solar_open",
    "bailing_hybrid",
    "hy_v3",
    "gemma1",
    "gemma3n",
    "deepseek4",
    "glm5_next",
    "laguna",
    "mellum",
    "mamba",
    "jamba",
    "minicpm",
    "nemotron4",
    "stablelm",
    "phimoe",
    "qwen4exp",
    "hy_v4",
)


def _cases() -> dict[str, Case]:
    files = Path(__file__).parent.glob("tiny_cases_*.py")
    unlisted = {file.stem.removeprefix("tiny_cases_") for file in files} - set(FAMILIES)
    assert not unlisted, f"FAMILIES lacks {sorted(unlisted)}"
    modules = [import_module(f".tiny_cases_{family}", __package__) for family in FAMILIES]
    cases = [case for module in modules for case in module.CASES]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases have the same name"
    return by_name


CASES = _cases()

# Of those that have kernels for every layer, one for each thing that only some models have.
FAST = (
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "ministral3",
    "glm4_moe",
    "gemma2",
    "gemma3",
    "gemma4_moe",
    "gemma4_e",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "mistral4",
    "deepseek_v2_lite",
    "deepseek_v3",
    "phi3",
    "phi3_within",
    "phi3_beyond",
    "smollm3",
    "starcoder2",
    "ernie4_5_moe",
    "glm_moe_dsa",
    "kimi_k25",
    "gpt_oss",
    "bailing_moe_v2",
    "hunyuan_moe",
    "afmoe",
    "mimo2",
    "olmo3",
    "lfm2",
    "cohere2",
    "cohere2_moe",
    "command_a_plus",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "step35",
    "apertus",
    "falcon_h1",
    "mamba2",
    "kimi_linear",
    "bailing_hybrid",
    "laguna",
    "stablelm",
)
