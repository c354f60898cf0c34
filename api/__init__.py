"""The public Python API: everything the commands do. The modules `api_*` join the folders, as no single folder may know all the others."""

from __future__ import annotations

from .budget import measure_sensitivity, recipe_for_target
from .convert import convert_lora, convert_model, plan_conversion
from .imatrix import collect_imatrix, compare_imatrices, convert_imatrix, imatrix_coverage, imatrix_statistics, merge_imatrices
from .outputs import Shards
from .quantize import plan_quantization, quantize_model, quantize_models, quantize_stats, repack_model
from .runtime import benchmark_model, decode_torch, generate, load_model, measure_perplexity, random_model
from .source import open_source
from .validate import validate_model
from ..formats.tools.gate_up import merge_gate_up
from ..formats.tools.split import merge_model, split_model
from ..formats.codec import decodable_types, decode, decode_tensor, deinterleave, interleave
from ..formats.tools.hashes import check_hashes, hash_model
from ..formats.tools.summary import inspect_model
from ..quantize.plan.changes import Changes
from ..quantize.encode import encodable_types, encode
from ..quantize.plan.recipe import Recipe
from ..quantize.plan.recipe_file import read_recipe
from ..quantize.plan.saved_plan import load_plan

__all__ = ["convert_model", "quantize_model", "quantize_models", "collect_imatrix", "measure_perplexity", "split_model", "merge_model",
           "load_model", "decode", "decode_tensor", "encode", "interleave", "deinterleave", "decodable_types", "encodable_types",
           "open_source", "inspect_model", "hash_model", "check_hashes", "merge_gate_up", "convert_lora",
           "plan_quantization", "Shards", "plan_conversion", "repack_model", "quantize_stats", "decode_torch", "generate",
           "random_model", "benchmark_model", "validate_model",
           "merge_imatrices", "convert_imatrix", "compare_imatrices", "imatrix_statistics", "imatrix_coverage",
           "Recipe", "Changes", "read_recipe", "load_plan", "recipe_for_target", "measure_sensitivity"]
