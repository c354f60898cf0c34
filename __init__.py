"""iqforge: GGUF quantization and conversion with a reference runtime.

The functions of `iqforge.api` are available here; they are imported when first used, so that
`import iqforge` is instant.
"""

from __future__ import annotations

from .version import __version__

_API = (
    "convert_model",
    "quantize_model",
    "quantize_models",
    "collect_imatrix",
    "measure_perplexity",
    "split_model",
    "merge_model",
    "load_model",
    "decode",
    "decode_tensor",
    "encode",
    "interleave",
    "deinterleave",
    "repack_model",
    "quantize_stats",
    "inspect_model",
    "hash_model",
    "check_hashes",
    "merge_gate_up",
    "convert_lora",
    "decode_torch",
    "generate",
    "random_model",
    "benchmark_model",
    "validate_model",
    "merge_imatrices",
    "convert_imatrix",
    "compare_imatrices",
    "imatrix_statistics",
    "imatrix_coverage",
    "Recipe",
    "Changes",
    "Shards",
    "read_recipe",
    "load_plan",
    "recipe_for_target",
    "measure_sensitivity",
)
__all__ = [*_API, "IqforgeError", "__version__"]


def __getattr__(name: str):
    if name in _API:
        from . import api

        return getattr(api, name)
    if name == "IqforgeError":
        from .errors import IqforgeError

        return IqforgeError
    raise AttributeError(f"module 'iqforge' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
