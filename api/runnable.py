"""Says that the runtime cannot run a model when it is converted, not only when it is run.

Nothing here imports torch, which would take longer than the conversion of a small model.
"""

from __future__ import annotations

from ..convert.source import CheckpointSource
from ..errors import TokenizerError
from ..runtime.tokenizer import Tokenizer

# The GGUF architectures that the runtime declares; a test compares them.
RUNNABLE = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "bailingmoe2",
        "bailingmoe3",
        "cohere2",
        "cohere2moe",
        "command-r",
        "deepseek",
        "deepseek2",
        "deepseek32",
        "deepseek4",
        "dots1",
        "ernie4_5",
        "ernie4_5-moe",
        "exaone4",
        "exaone-moe",
        "falcon-h1",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "glm-dsa",
        "glm4",
        "glm4moe",
        "glm5-next",
        "gpt-oss",
        "granite",
        "granite_swa",
        "granitehybrid",
        "granitemoe",
        "hunyuan-dense",
        "hunyuan-moe",
        "hy_v3",
        "hy_v4",
        "internlm2",
        "jamba",
        "kimi-linear",
        "laguna",
        "lfm2",
        "lfm2moe",
        "llama",
        "llama4",
        "mamba",
        "mamba2",
        "mellum",
        "mimo2",
        "minicpm",
        "minicpm3",
        "minimax-m2",
        "mistral3",
        "mistral4",
        "nemotron",
        "nemotron_h",
        "nemotron_h_moe",
        "olmo2",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen4exp",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "step35",
    }
)


def why_it_cannot_run(source: CheckpointSource) -> str | None:
    """Return why the runtime cannot run what a checkpoint is converted to, in a line; None if it
    can, or if only the vocabulary is converted.
    """
    if source.options.vocab_only:
        return None
    architecture = source.metadata["general.architecture"].data
    if architecture not in RUNNABLE:
        return f"it has no architecture '{architecture}'"
    if source.options.mtp == "only":
        return "blocks for multi-token prediction need the rest of the model"
    try:
        Tokenizer.from_metadata(source.metadata)
    except TokenizerError as error:
        return f"it has no tokenizer for this vocabulary: {error}"
    return None
