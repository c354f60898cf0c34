"""The public Python API: everything the commands do. The modules `api_*` join the folders, as no
single folder may know all the others.
"""

from __future__ import annotations

from ..formats.codec import decodable_types, decode, decode_tensor, deinterleave, interleave
from ..formats.tools.gate_up import merge_gate_up
from ..formats.tools.hashes import check_hashes, hash_model
from ..formats.tools.split import merge_model, split_model
from ..formats.tools.summary import inspect_model
from ..quantize.encode import encodable_types, encode
from ..quantize.plan.changes import Changes
from ..quantize.plan.recipe import Recipe
from ..quantize.plan.recipe_file import read_recipe
from ..quantize.plan.saved_plan import load_plan
from .budget import measure_sensitivity, recipe_for_target
from .convert import convert_lora, convert_model, plan_conversion
from .imatrix import (
    collect_imatrix,
    compare_imatrices,
    convert_imatrix,
    imatrix_coverage,
    imatrix_statistics,
    merge_imatrices,
)
from .kernels import kernel_specs
from .outputs import Shards
from .quantize import (
    plan_quantization,
    quantize_model,
    quantize_models,
    quantize_stats,
    repack_model,
)
from .runtime import (
    benchmark_model,
    decode_torch,
    generate,
    load_model,
    measure_perplexity,
    random_model,
)
from .source import open_source
from .validate import validate_model

__all__ = [
    "Changes",
    "Recipe",
    "Shards",
    "benchmark_model",
    "check_hashes",
    "collect_imatrix",
    "compare_imatrices",
    "convert_imatrix",
    "convert_lora",
    "convert_model",
    "decodable_types",
    "decode",
    "decode_tensor",
    "decode_torch",
    "deinterleave",
    "encodable_types",
    "encode",
    "generate",
    "hash_model",
    "imatrix_coverage",
    "imatrix_statistics",
    "inspect_model",
    "interleave",
    "kernel_specs",
    "load_model",
    "load_plan",
    "measure_perplexity",
    "measure_sensitivity",
    "merge_gate_up",
    "merge_imatrices",
    "merge_model",
    "open_source",
    "plan_conversion",
    "plan_quantization",
    "quantize_model",
    "quantize_models",
    "quantize_stats",
    "random_model",
    "read_recipe",
    "recipe_for_target",
    "repack_model",
    "split_model",
    "validate_model",
]
