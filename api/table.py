"""The public names, each with the module that defines it, relative to the package `iqforge`.

`iqforge` and `iqforge.api` both offer exactly these names and import a module when one of its names
is first used, so that `import iqforge` stays instant.
"""

from __future__ import annotations

import importlib
from typing import Any

PUBLIC = {
    # Make
    "convert_model": "api.convert",
    "convert_lora": "api.convert",
    "plan_conversion": "api.convert",
    "plan_lora": "api.convert",
    "quantize_model": "api.quantize",
    "quantize_models": "api.quantize",
    "plan_quantization": "api.plan",
    "repack_model": "api.repack",
    "auto_model": "proof.auto_model",
    "plan_auto": "proof.auto_model",
    "recipe_for_target": "api.budget",
    "read_recipe": "quantize.plan.recipe_file",
    "load_plan": "quantize.plan.saved_plan",
    "Recipe": "quantize.plan.recipe",
    "Changes": "quantize.plan.changes",
    "Shards": "quantize.options",
    "collect_imatrix": "api.imatrix.collect",
    "load_imatrix": "api.imatrix.files",
    "merge_imatrices": "api.imatrix.files",
    "convert_imatrix": "api.imatrix.files",
    "collect_hessian": "api.imatrix.hessian",
    "load_hessian": "api.imatrix.hessian",
    "export_lora": "api.lora",
    "merge_gate_up": "formats.tools.gate_up",
    "split_model": "formats.tools.split",
    "merge_model": "formats.tools.split",
    # Measure
    "measure_perplexity": "api.evaluation",
    "measure_tasks": "api.evaluation",
    "compare_models": "api.compare",
    "measure_sensitivity": "api.sensitivity",
    "quantize_stats": "api.searches",
    "benchmark_types": "api.searches",
    "validate_model": "api.validate",
    "compare_imatrices": "api.imatrix.files",
    "imatrix_coverage": "api.imatrix.files",
    "imatrix_statistics": "api.imatrix.files",
    # Run
    "load_model": "api.models",
    "load_tokenizer": "api.models",
    "chat": "api.conversation",
    "open_chat": "api.conversation",
    "load_chat_template": "api.conversation",
    "embed": "api.embedding",
    "random_model": "api.bench",
    "random_source": "api.bench",
    "write_random_model": "api.bench",
    "generate": "api.generation",
    "plan_generation": "api.generation",
    "benchmark_model": "api.bench",
    "sweep_model": "api.bench",
    "profile_model": "api.bench",
    "plan_split": "api.split",
    # Inspect
    "open_source": "api.source",
    "inspect_model": "formats.tools.summary",
    "hash_model": "formats.tools.hashes",
    "check_hashes": "formats.tools.hashes",
    "kernel_specs": "api.kernels",
    "build_kernels": "api.kernels",
    "clear_kernels": "api.kernels",
    # Rows of tensors
    "decode": "formats.codecs.codec",
    "decode_tensor": "formats.codecs.codec",
    "decode_torch": "formats.codecs.torch_decode",
    "decode_tensor_torch": "formats.codecs.torch_decode",
    "decodable_types": "formats.codecs.codec",
    "encode": "quantize.encode",
    "encodable_types": "quantize.searches",
    "warm_up": "api.searches",
    "interleave": "formats.codecs.codec",
    "deinterleave": "formats.codecs.codec",
    # Errors
    "IqforgeError": "errors",
}


def resolve(name: str, package: str) -> Any:
    """Return the public object `name`. Raise AttributeError, as for an attribute of `package`, for
    an unknown name.
    """
    if name not in PUBLIC:
        hint = ""
        if not name.startswith("_"):
            from ..formats.options import did_you_mean

            hint = did_you_mean(name, PUBLIC)
        raise AttributeError(f"module '{package}' has no attribute '{name}'{hint}")
    root = __name__.removesuffix(".api.table")
    return getattr(importlib.import_module(f"{root}.{PUBLIC[name]}"), name)
