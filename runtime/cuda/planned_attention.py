"""What attention over many rows takes of a device's memory, by the name of a buffer (`planned.py`).

It depends on the types of the cache, and on what multiplies queries and keys: kernels of our own,
torch's flash attention, or products with scores in memory.
"""

from __future__ import annotations

import torch

from ...cuda_kernels.prompt import flash_plan
from ..layers.attention import Attention
from ..layers.mla import MLA
from ..state.cache import CacheSettings
from .prompt.mixers.index import SCORE_BYTES as INDEX_BYTES
from .prompt.mixers.latent_absorbed import CHOSEN_ROWS, MOST_QUERIES, buffers_of_rows, is_absorbed
from .prompt.mixers.mla import BUFFER_BYTES
from .prompt.mixers.scores import SCORE_BYTES, has_flash

HALF, FLOAT = 2, 4
Sizes = dict[str, int]


def attention_sizes(
    m: Attention,
    width: int,
    rows: int,
    keys: int,
    settings: CacheSettings,
    device: torch.device,
) -> Sizes:
    s = m.spec
    q, kv = s.heads * s.key_length, s.kv_heads * (s.key_length + s.value_length)
    of_products = s.query_rows + s.key_rows + s.value_rows
    of_result = rows * s.heads * s.value_length * HALF
    whole = {settings.k.dtype, settings.v.dtype} <= {torch.float16, torch.bfloat16}
    found = {
        "qkv": rows * of_products * HALF,
        "factors of norms": rows * 2 * FLOAT * s.joined_norms,
        "gates": rows * -(-s.heads * s.gate_length // 8) * 8 * HALF * s.gate_apart,
        "queries": rows * q * (HALF if whole else FLOAT),  # other caches get float32
        "mixed": of_result,
        "delta": rows * width * HALF,
        "weights": max(of_products, q) * width * HALF,
        "attention": of_result + rows * s.heads * FLOAT,  # what torch's flash attention returns
        "keys": rows * s.kv_heads * s.key_length * HALF,
        "values": rows * s.kv_heads * s.value_length * HALF,
    }
    own = flash_plan.fits(s.key_length, s.value_length, device)
    if own:
        queries = (1, rows, s.heads, s.key_length)
        found["attention"] = flash_plan.partial_bytes(
            queries, (1, keys, s.kv_heads, s.value_length), device
        )
        if settings.k.is_quantized or settings.v.is_quantized:
            found["attention"] += of_result + 2 * of_result * s.gate
    if s.gate:
        found["attention"] += 2 * of_result * (not own)
    if s.key_length != s.value_length and not own:  # torch's reads and returns one length
        longest = max(s.key_length, s.value_length)
        found["attention"] += (rows * s.heads + 2 * keys * s.kv_heads) * longest * HALF
        found["attention"] += rows * s.heads * (longest - s.value_length) * HALF
    if not has_flash(s, device):
        found["attention"] += 2 * min(SCORE_BYTES, rows * s.heads * keys * FLOAT)
    if settings.k.is_quantized or settings.v.is_quantized:  # written in float32, read in float16
        found["decoded"] = keys * kv * HALF
        found["attention"] += rows * kv * FLOAT
    elif has_flash(s, device):
        found["attention in graphs"] = found["attention"]
    return found


def latent_sizes(
    m: MLA, width: int, rows: int, keys: int, settings: CacheSettings, device: torch.device
) -> Sizes:
    s = m.spec
    q, of_first = s.heads * s.key_length, m.q if m.q_a is None else m.q_a
    of_q, most = rows * q * HALF, BUFFER_BYTES // 2
    found = {
        "latent q and kv": rows * (of_first.rows + s.cache_width) * HALF,
        "queries": of_q,
        "mixed": rows * s.heads * s.value_length * HALF,
        "delta": rows * width * HALF,
        "weights": max((of_first.rows + s.cache_width) * width, q * m.q.cols) * HALF,
        "head keys": s.heads * s.kv_rank * s.nope_length * HALF,
        "head values": s.heads * s.kv_rank * s.value_length * HALF,
        "keys": min(most, keys * q * HALF),
        "values": min(most, keys * q * HALF),
        "attention": of_q + rows * s.heads * FLOAT,  # what torch's flash attention returns
    }
    if flash_plan.fits(s.key_length, s.value_length, device):
        queries, values = (1, rows, s.heads, s.key_length), (1, keys, s.heads, s.value_length)
        found["attention"] = flash_plan.partial_bytes(queries, values, device)
    if m.gate is not None:
        found["gates"] = rows * -(-s.heads // 8) * 8 * HALF
    if m.q_a is not None:
        found |= {"queries of latent": of_q, "query latent": rows * m.q.cols * HALF}
    if settings.k.is_quantized and settings.hadamard_k:  # read in float32, and turned back
        found["attention"] += keys * s.cache_width * (2 * FLOAT + HALF)
    elif settings.k.is_quantized:
        found["decoded"] = keys * s.cache_width * HALF
    else:  # of a pass that reads its own: where positions are chosen, it has no more than those
        own = min(rows, m.top_k) if m.top_k else rows
        found["latents"] = own * s.cache_width * HALF
        found["attention in graphs"] = found["attention"]
    if m.top_k and keys > m.top_k:
        part = min(rows, CHOSEN_ROWS)
        tiles = part * -(-s.heads // 16)
        found["chosen positions"] = rows * m.top_k * FLOAT
        found["partial"] = tiles * 16 * (s.kv_rank + 2) * FLOAT
        found["two parts of queries"] = part * s.heads * 2 * s.cache_width * HALF
        found["absorbed"] = part * s.heads * s.cache_width * (3 * FLOAT + HALF)
    elif not m.top_k and is_absorbed(1, keys, s.heads):
        found |= buffers_of_rows(s)
        found["absorbed"] = MOST_QUERIES * s.heads * s.cache_width * (FLOAT + 2 * HALF)
        found["absorbed"] += found["head values"]  # contiguous
    if m.indexer is not None:
        i = m.indexer.spec
        of_index = i.heads * i.key_length
        found["index keys"] = rows * i.key_length * FLOAT
        found["index q"] = rows * of_index * (HALF + 3 * FLOAT)
        found["index dots"] = INDEX_BYTES if keys > m.top_k else 0
        found["weights"] = max(found["weights"], of_index * m.q.cols * HALF)
    return found
