"""One line of a benchmark: the fields of ik_llama.cpp's llama-bench in its order, then ours."""

from __future__ import annotations

import os
import time
from typing import Any

from ...formats.source import Source
from ..cuda.common.device_facts import DeviceFacts
from ..describe import model_type
from .bench import Result, deviation, mean


def record(
    source: Source,
    result: Result,
    setting: dict[str, Any],
    *,
    device: str,
    facts: DeviceFacts | None,
    version: str,
    limits: DeviceFacts | None = None,
) -> dict[str, Any]:
    """Fields of one test. Those of backends and switches that do not exist here say so: false, 0 or
    empty. `facts`: of the GPU; `limits`: the same, if speeds are to be compared with what it could
    do.
    """
    test, cuda, split = result.test, facts is not None, setting["split"]
    samples = [float(ns) for ns in result.samples_ns]
    read, computed = result.bytes_per_second, result.flop_per_second
    return {
        "build_commit": f"iqforge-{version}",
        "build_number": 0,
        "cuda": cuda,
        "vulkan": False,
        "metal": False,
        "sycl": False,
        "rpc": False,
        "gpu_blas": cuda,
        "blas": True,
        "cpu_info": cpu_name(),
        "gpu_info": "" if facts is None else facts.name,
        "model_filename": source.path,
        "model_type": model_type(source),
        "model_size": sum(t.n_bytes for t in source.tensors),
        "model_n_params": sum(t.n_elements for t in source.tensors),
        "n_batch": setting["n_batch"],
        "n_ubatch": setting["n_ubatch"],
        "n_threads": setting["n_threads"],
        "type_k": setting["type_k"],
        "type_v": setting["type_v"],
        "n_gpu_layers": setting["n_gpu_layers"] if cuda else 0,
        "split_mode": split.split_mode or "none",
        "main_gpu": split.main_gpu or 0,
        "no_kv_offload": setting["no_kv_offload"],
        "flash_attn": setting["flash_attn"],
        "mla_attn": setting["mla_attn"],
        "attn_max_batch": setting["attn_max_batch"],
        "ser": setting["ser"],
        "reuse": setting["reuse"],
        "tensor_split": split.tensor_split or "",
        "use_mmap": setting["use_mmap"],
        "embeddings": setting["embeddings"],
        "repack": setting["repack"],
        "mqkv": setting["mqkv"],
        "muge": setting["muge"],
        "defer_experts": False,
        "fused_moe": setting["fused_moe"],
        "grouped_er": setting["grouped_er"],
        "no_fused_up_gate": False,
        "use_thp": setting["use_thp"],
        "no_ooae": False,
        "rcache": False,
        "sas": False,
        "max_gpu": split.max_gpu or 0,
        "cuda_params": "",
        "override_tensor": setting["override_tensor"],
        "n_prompt": test.n_prompt or test.before,
        "n_gen": test.n_gen,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.finished)),
        "avg_ns": round(mean(samples)),
        "stddev_ns": round(deviation(samples)),
        "avg_ts": result.avg_ts,
        "stddev_ts": deviation(result.samples_ts),
        "test": test.label,
        "n_depth": test.depth,
        "device": device,
        "precision": setting["precision"],
        "n_cpu_moe": setting["n_cpu_moe"],
        "k_cache_hadamard": setting["k_cache_hadamard"],
        "v_cache_hadamard": setting["v_cache_hadamard"],
        "dsa": setting["dsa"],
        "swa_full": setting["swa_full"],
        "cache_size": setting["cache_size"],
        "gbytes_per_s": _in(read, 1e9),
        "share_of_bandwidth": _in(read, limits.bandwidth if limits else None),
        "tflop_per_s": _in(computed, 1e12),
        "share_of_flop_rate": _in(
            computed, limits.bf16_rate if limits and setting["precision"] != "f32" else None
        ),
    }


def cpu_name() -> str:
    """Return the name that the kernel gives the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine


def _in(value: float | None, unit: float | None) -> float | None:
    return None if value is None or not unit else value / unit
