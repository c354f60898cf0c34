"""Replace what a decode step needs of a GPU: its kernels as plain torch on the CPU, and graphs that
record and repeat them.

Kernels are in a module for each subject, `step_*_on_cpu`. Its `REPLACED` says where the product
finds each of them: module, name there, and what it finds instead.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.matvec import operands
from iqforge.cuda_kernels.matvec.plan import DeviceLimits
from iqforge.cuda_kernels.packed import decode as packed_decode
from iqforge.runtime.cuda.step import sampling as step_sampling
from iqforge.runtime.weights.resident import Resident, ResidentMatrix
from iqforge.runtime.weights.store import TensorStore
from torch.utils.weak import WeakTensorKeyDictionary

from . import (
    step_attention_on_cpu,
    step_experts_on_cpu,
    step_products_on_cpu,
    step_recurrent_on_cpu,
    step_rows_on_cpu,
)
from .step_graphs_on_cpu import CPU, Graph, kernel

SUBJECTS = (
    step_rows_on_cpu,
    step_products_on_cpu,
    step_experts_on_cpu,
    step_attention_on_cpu,
    step_recurrent_on_cpu,
)


class Sampler:
    """Choose the most probable token, whatever the settings."""

    def __init__(self, n_vocab, device):
        pass

    def __call__(self, logits, *arguments):
        kernel(self.run)(logits, *arguments[-3:])

    def run(self, logits, tokens, positions, history):
        tokens[0] = logits.argmax()
        positions[0] += 1
        history[positions[0]] = int(tokens[0])


def in_pieces(steps, tokens: torch.Tensor, state) -> torch.Tensor:
    """Append tokens in pieces of several sizes, then one by one: logits float32[n, vocab]."""
    pieces = tokens.split([8, 1, 1, 3, *[1] * (len(tokens) - 13)])
    return torch.cat([steps.extend(piece, state, all_logits=True) for piece in pieces])


def install(monkeypatch, attention: int = 232448, products: int = 232448) -> SimpleNamespace:
    """Install a device that is the CPU, with this many bytes of shared memory for blocks of
    attention and of products. `emptied` counts calls of torch.cuda.empty_cache.
    """
    seen = SimpleNamespace(emptied=0)
    Graph.alive, Graph.replays, Graph.recording = weakref.WeakSet(), 0, None

    @contextmanager
    def capture(graph, **options):
        Graph.recording = graph
        try:
            yield
        finally:
            Graph.recording = None

    def empty_cache():
        seen.emptied += 1

    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        record_event=lambda event=None: SimpleNamespace(synchronize=lambda: None),
    )
    zeros, limits = torch.zeros, DeviceLimits(132, products, products // 2, products // 2)
    facts = SimpleNamespace(shared_memory_per_block_optin=attention, multi_processor_count=132)
    for owner, name, value in (
        *(row for subject in SUBJECTS for row in subject.REPLACED),
        (torch.cuda, "Stream", lambda device: stream),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "Event", lambda blocking=False: None),
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", capture),
        (torch.cuda, "empty_cache", empty_cache),
        (torch.cuda, "get_device_properties", lambda device: facts),
        (torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)),
        (operands, "device_index", lambda device: 0),
        (operands, "limits", lambda index: limits),
        (step_sampling, "GreedySampler", Sampler),
        (step_sampling, "DrawSampler", Sampler),
        (TensorStore, "matrices", _resident),
        (packed_decode, "_decode", _decoder()),
    ):
        monkeypatch.setattr(owner, name, value)
    return seen


def _decoder():
    """Return a decoder of packed matrices. It decodes each matrix once, as that takes long on the
    CPU.
    """
    real, known = packed_decode._decode, WeakTensorKeyDictionary()

    def decode(m, dtype, ids, first, n_rows, out):
        if m.data not in known:
            known[m.data] = real(replace(m, scale=1.0), torch.float32, None, 0, m.total_rows, None)
        rows = slice(first, first + n_rows) if ids is None else ids
        found = known[m.data][rows]
        if m.scale != 1:
            found = found * m.scale
        return found if out is None else out.copy_(found.view(out.shape))

    return decode


def _resident(store: TensorStore, tensors, n):
    resident = store._resident.setdefault(tensors[0].name, Resident(store.source, tensors, n, CPU))
    return [ResidentMatrix(resident, index) for index in range(n)]
