"""What the fast path takes of a device's memory besides weights and caches, before anything is
loaded: the memory of `Context.buffer` by name, and the copies of weights that executors keep.

Sizes are those that the executors ask for. A buffer has the largest size that any layer asks for,
as layers share it. Those of attention are in `planned_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...cuda_kernels.layouts.table import plain_type
from ...cuda_kernels.packed.matrix import PackedMatrix
from ...cuda_kernels.peer.rows import memory_bytes
from ...cuda_kernels.prompt import few
from ...cuda_kernels.prompt import grouped as prompt_grouped
from ..layers.attention import Attention
from ..layers.block import AttentionAndFFN, AttentionAndStateSpace, Block, Branch
from ..layers.dense_and_experts import DenseAndExperts
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.layer_input import LayerInputs
from ..layers.mla import MLA
from ..layers.moe import Experts, MoE
from ..layers.recurrent.delta_net import DeltaNet
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.recurrent.short_conv import ShortConv
from ..layers.recurrent.state_space import StateSpace
from ..parallel.payload import FEW_ROWS
from ..state.cache import CacheSettings
from ..weights.linear import Linear
from ..weights.stacked_linear import ExpertLinear
from .common.expert_terms import inputs_of
from .planned_attention import FLOAT as _FLOAT
from .planned_attention import HALF as _HALF
from .planned_attention import Sizes, attention_sizes, latent_sizes
from .prompt.common.weights import rows_of_slice
from .prompt.locked import BUFFER_BYTES as COPY_BYTES
from .prompt.together import STREAM_BYTES

_CHUNK = 64  # tokens of a delta net at a time
_SCORED_TOGETHER = 132 * 64  # rows times parts of scores, at most (`plan` of prompt/scores.py)
# Workspaces of cuBLAS for two streams, code of kernels, scratch of attention in steps, buffers of
# few rows, and what the allocator loses to the sizes of its blocks.
LIBRARIES = 256 << 20


def buffer_bytes(
    blocks: Sequence[Block],
    width: int,
    rows: int,
    keys: int,
    settings: CacheSettings,
    device: torch.device,
    others: Iterable[Sizes] = (),
) -> int:
    """Return the bytes of all buffers of passes of `rows` tokens, the last of which sees `keys`.
    others: what `output_sizes` returns, where there are logits of all tokens, and `input_sizes`,
    where layers have inputs.
    """
    most: Sizes = {"stream": rows * width * _FLOAT, "normed": rows * width * _HALF}
    if few.is_used(device):
        most["sums of few tokens"] = few.workspace_bytes(device)
    branches = (branch for block in blocks for branch in block.branches)
    of_branches = (_of_branch(x, width, rows, keys, settings, device) for x in branches)
    for sizes in (*others, *of_branches):
        for name, n_bytes in sizes.items():
            most[name] = max(most.get(name, 0), n_bytes)
    return sum(most.values())


def output_sizes(output: Linear, rows: int) -> Sizes:
    """Return what `PromptOutput` asks for, for logits of `rows` tokens at a time: decoded rows of
    the matrix, and products with them.
    """
    decoded = min(output.rows, rows_of_slice(output.cols, _HALF))
    return {"weights": decoded * output.cols * _HALF, "logits": rows * decoded * _FLOAT}


def input_sizes(inputs: LayerInputs, rows: int) -> Sizes:
    """Return what `PromptLayerInputs` asks for, for `rows` tokens: the decoded projection, products
    with it, what is computed from them in float32, and a copy of the result.
    """
    n, width = inputs.projection.rows, inputs.projection.cols
    return {
        "weights": n * width * _HALF,
        "layer inputs": rows * n * _HALF,
        "inputs of layers": 5 * rows * n * _FLOAT,
        "kept inputs of layers": rows * n * _FLOAT,
    }


def stream_bytes(n_streams: int, width: int, rows: int) -> int:
    """Return the bytes of several streams of `rows` tokens: what a layer reads, predicts and adds,
    and one copy.
    """
    return 0 if n_streams == 1 else 4 * rows * n_streams * width * _FLOAT


def shared_bytes(n_ranks: int, width: int, rows: int) -> int:
    """Return the bytes that a tensor-parallel rank shares with others for sums of prompts."""
    sizes = ((rows, torch.bfloat16), (min(rows, FEW_ROWS), torch.float32))
    return 0 if n_ranks == 1 else memory_bytes(n_ranks, sizes, width)


def kept_bytes(blocks: Iterable[Block], settings: CacheSettings) -> int:
    """Return the bytes of what executors keep besides packed weights and caches: W_k and W_v of
    latent attention in half, routers (in float32 at most), rates of delta nets, the second place of
    recurrent states, which steps use in turns, and two places for experts that are on the CPU, with
    buffers for what is copied there and the residual streams of pieces that share a copy.
    """
    found, largest = 0, 0
    branches = (branch for block in blocks for branch in block.branches)
    for m in (module for branch in branches for module in branch.modules):
        m = m.moe if isinstance(m, DenseAndExperts) else m
        if isinstance(m, MLA):
            s = m.spec
            found += s.heads * s.kv_rank * (s.nope_length + s.value_length) * _HALF
        elif isinstance(m, MoE):
            found += m.spec.n_experts * m.router.linear.cols * _FLOAT
            if m.experts.down.device.type == "cpu" != m.router.linear.device.type:
                largest = max(largest, sum(x.stored_bytes for x in m.experts.linears))
        elif isinstance(m, DeltaNet):
            rates = 2 * m.spec.value_heads * m.output.rows
            found += rates * (_FLOAT + _HALF) + m.state_bytes(0, settings)
        elif isinstance(m, (KimiDelta, ShortConv, StateSpace)):
            found += m.state_bytes(0, settings)
            if isinstance(m, KimiDelta):
                found += m.spec.heads * m.output.rows * _HALF
    return found + 2 * largest + (COPY_BYTES + STREAM_BYTES if largest else 0)


def _of_branch(
    branch: Branch,
    width: int,
    rows: int,
    keys: int,
    settings: CacheSettings,
    device: torch.device,
) -> Sizes:
    m = branch.module
    if isinstance(m, (AttentionAndFFN, AttentionAndStateSpace)):
        dense = isinstance(m, AttentionAndFFN) and not isinstance(m.ffn, MoE)
        second = "delta of ffn" if dense else "delta of attention"
        found: Sizes = {second: rows * width * _HALF}
        for module in branch.modules:
            part = Branch(branch.norm, module)
            for name, n_bytes in _of_branch(part, width, rows, keys, settings, device).items():
                found[name] = max(found.get(name, 0), n_bytes)
        return found
    if isinstance(m, Attention):
        return attention_sizes(m, width, rows, keys, settings, device)
    if isinstance(m, MLA):
        return latent_sizes(m, width, rows, keys, settings, device)
    if isinstance(m, DeltaNet):
        return _delta(m, width, rows)
    if isinstance(m, StateSpace):
        return _state_space(m, width, rows)
    if isinstance(m, KimiDelta):
        return _kimi_delta(m, width, rows)
    if isinstance(m, ShortConv):
        return _short_conv(m, width, rows)
    if isinstance(m, (GatedFFN, PlainFFN)):
        return _dense(m, width, rows)
    if isinstance(m, MoE):
        return _experts(m, width, rows, device)
    if isinstance(m, DenseAndExperts):
        found = {} if m.moe is None else _experts(m.moe, width, rows, device)
        if isinstance(m.dense, (GatedFFN, PlainFFN)):  # a rank may have no part of it
            for name, n_bytes in _dense(m.dense, width, rows).items():
                found[name] = max(found.get(name, 0), n_bytes)
        return found
    return {}


def _delta(m: DeltaNet, width: int, rows: int) -> Sizes:
    s = m.spec
    heads, padded = s.value_heads, -(-rows // _CHUNK) * _CHUNK
    inputs, values = s.channels + heads * s.value_length, heads * s.value_length
    by_key = padded * (heads + 2 * s.key_heads) * s.key_length
    by_value = padded * heads * s.value_length
    return {
        "delta inputs": rows * inputs * _HALF,
        "delta parts": (by_key + padded * heads * _CHUNK) * _HALF + 2 * by_value * _FLOAT,
        "delta states": padded // _CHUNK * heads * s.key_length * s.value_length * _FLOAT,
        "weights": max(inputs, values) * width * _HALF,
        **_recurrent(m, values, width, rows),
    }


def _state_space(m: StateSpace, width: int, rows: int) -> Sizes:
    s = m.spec
    padded = -(-rows // _CHUNK) * _CHUNK
    return {
        "state space inputs": rows * s.inputs * _HALF,
        # Steps of time, with their decays until the end of a chunk, and totals in float64.
        "state space parts": padded * (s.channels * _HALF + s.heads * 4 * _FLOAT),
        "state space states": padded // _CHUNK * s.inner * s.state_length * _FLOAT,
        "state space results": rows * s.inner * _FLOAT,
        "weights": max(s.inputs, s.inner) * width * _HALF,
        **_recurrent(m, s.inner, width, rows),
    }


def _kimi_delta(m: KimiDelta, width: int, rows: int) -> Sizes:
    s, padded = m.spec, -(-rows // _CHUNK) * _CHUNK
    chunks, by_head = padded // _CHUNK, padded * s.heads
    inputs = s.channels + m.decay[0].rows + m.gate[0].rows
    found: Sizes = {
        "kimi delta inputs": rows * inputs * _HALF,
        "kimi delta beta": rows * s.heads * _FLOAT,
        "delta parts": by_head * ((3 * s.length + _CHUNK) * _HALF + 2 * s.length * _FLOAT),
        "delta states": chunks * s.inner * (s.length + 1) * _FLOAT,
        "weights": inputs * width * _HALF,
        **_recurrent(m, s.inner, width, rows),
    }
    for name, products in (("decay", m.decay), ("gate", m.gate)):
        if products[1:]:
            found[f"kimi delta {name}"] = rows * s.inner * _HALF
    return found


def _short_conv(m: ShortConv, width: int, rows: int) -> Sizes:
    channels = m.spec.channels
    return {
        "convolution inputs": rows * 3 * channels * _HALF,
        "weights": 3 * channels * width * _HALF,
        **_recurrent(m, channels, width, rows),
    }


def _recurrent(
    m: DeltaNet | StateSpace | KimiDelta | ShortConv, mixed: int, width: int, rows: int
) -> Sizes:
    taps = m.spec.taps if isinstance(m, ShortConv) else m.spec.convolution
    inputs = (taps - 1) * m.spec.channels * _FLOAT
    return {
        "mixed": rows * mixed * _HALF,
        "delta": rows * width * _HALF,
        "inputs of a sequence": inputs,
        "memory of a sequence": m.state_bytes(0, CacheSettings()) - inputs,
    }


def _dense(m: GatedFFN | PlainFFN, width: int, rows: int) -> Sizes:
    hidden = m.down.cols
    inputs = 2 if isinstance(m, GatedFFN) else 1
    return {
        "gate_up": rows * inputs * hidden * _HALF,
        "gated": rows * hidden * _HALF if inputs == 2 else 0,
        "delta": rows * width * _HALF,
        "weights": inputs * hidden * width * _HALF,
    }


def _reads_packed(e: Experts, device: torch.device) -> bool:
    """Return whether products read packed experts (`PromptMoE.fused`); else all are decoded."""
    if device.type != "cuda":
        return False

    def shape(linear: ExpertLinear) -> PackedMatrix:
        type, n = plain_type(linear.matrices[0].type), len(linear.matrices)
        return PackedMatrix(type, linear.rows, linear.cols, n, torch.empty(0))

    inputs, down = [shape(linear) for linear in inputs_of(e)], shape(e.down)
    return prompt_grouped.gate_up_fits(inputs, device) and prompt_grouped.fits([down], device)


def _experts(m: MoE, width: int, rows: int, device: torch.device) -> Sizes:
    """Those of a norm after experts and a shared one are here, whether there is one or not."""
    s, hidden = m.spec, m.experts.down.cols
    slots = rows * s.n_used
    found = {
        "normed f32": rows * width * _FLOAT,
        "router": rows * s.n_experts * 2 * _FLOAT,
        "router scores": max(rows, _SCORED_TOGETHER) * s.n_experts * _FLOAT,
        "gated": slots * hidden * _HALF,
        "delta": slots * width * _HALF,
    }
    if m.latent is not None:
        length = m.latent.down.rows
        found |= {
            "latent": rows * length * _HALF,
            "latent in order": rows * length * _HALF,
            "latent sum": rows * length * _FLOAT,
            "latent up": rows * width * _HALF,
        }
    reads_packed = _reads_packed(m.experts, device)
    if not reads_packed:
        found["weights"] = s.n_experts * 2 * hidden * width * _HALF
        found["grouped"] = slots * (width + 3 * hidden) * _HALF
    if m.shared is not None:
        of_shared = m.shared.down.cols
        found |= {
            "plain": rows * width * _HALF * reads_packed,
            "shares": rows * _FLOAT * (m.shared_gate is not None),
            "shared gate_up": rows * 2 * of_shared * _HALF,
            "shared gated": rows * of_shared * _HALF,
            "shared delta": rows * width * _HALF,
            "part of a sum": rows * width * _FLOAT,
            "joined": rows * width * _HALF,
        }
        found["weights"] = max(found.get("weights", 0), 2 * of_shared * width * _HALF)
    return found
