"""Plans of latent attention, in its absorbed form."""

from __future__ import annotations

import numpy as np
import torch

from ...formats.types import ggml_type
from ..layers.latent import Joined, PerHead
from ..layers.mla import MLA, has_more
from ..simd.operations import operation
from ..simd.products import Rows
from ..simd.step import attention as attention_step
from ..simd.step import hadamard as hadamard_step
from ..simd.step import latent as latent_step
from ..state.latent import settings_of
from .attention import Stored, attending, decoded_rows, rotation, temperature_of
from .memory import Buffer
from .norms import norm_of
from .plan import LANES, UNIT, NotPlanned, Plan


def plan_latent(plan: Plan, module: MLA, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    if module.indexer is not None or module.top_k:
        raise NotPlanned("attention that chooses positions")
    if has_more(module):
        raise NotPlanned("sinks, or gates of elements, of latent attention")
    width = s.cache_width
    if width % UNIT or s.rope_length % LANES or s.kv_rank % UNIT or s.nope_length % UNIT:
        raise NotPlanned(f"latent vectors of {s.kv_rank} and keys of {s.rope_length} elements")
    settings = settings_of(plan.settings)[0]
    stored = Stored.of(settings.k, settings.block_of_keys(width))
    if stored.block and s.rope_length % stored.block:
        raise NotPlanned("blocks of a Hadamard transform with rotated and other elements")
    q_latent = None if module.q_a is None else plan.product(module.q_a, x, "latent query")
    latent = plan.product(module.kv_a, x, "latent row")
    gates = None if module.gate is None else plan.product(module.gate, x, "gates")
    if q_latent is not None:
        plan.meet()
        if module.q_norm is not None:
            q_latent = norm_of(plan, module.q_norm, q_latent, s.q_rank, "normed latent query")
    q = plan.product(module.q, x if q_latent is None else q_latent, "q")
    plan.meet()
    absorbed = memory.floats("absorbed queries", s.heads * width)
    plan.add(
        operation(
            latent_step.rotate_and_keep_latent,
            f"rotate_and_keep_latent_{stored.name}".lower() + ("_turned" if stored.block else ""),
            TURNS=int(stored.block > 0),
            store_key=stored.store,
            KEY_HEADER=stored.header,
            KEY_BYTES=stored.unit_bytes // 2,
        ),
        *(plan.frame_address, plan.layer_offset, q.address, s.heads, s.key_length, s.nope_length),
        *(absorbed.address, width, latent.address, s.kv_rank, s.rope_length),
        memory.floats("row of the cache", width).address,
        *(memory.vector(module.kv_norm.weight), float(module.kv_norm.eps)),
        *rotation(plan, module.rope),
        *(*temperature_of(s.temperature), *stored.transform),
        meet=s.temperature is not None,  # absorbed queries are computed from q
    )
    heads = Buffer(memory.array(np.arange(s.heads, dtype=np.int64)))
    queries = absorbed.at(s.rope_length)
    mixed = memory.floats("mixed latent vectors", s.heads * s.kv_rank)
    values = memory.floats("mixed", s.heads * s.value_length)
    if isinstance(module.up, PerHead):
        plan.products(module.up.k_b, q, s.key_length, queries, width, heads, s.heads)
        plan.meet()
        _attend(plan, module, stored, absorbed, mixed)
        plan.products(module.up.v_b, mixed, s.kv_rank, values, s.value_length, heads, s.heads)
    elif isinstance(module.up, Joined):
        both = module.up.kv_b.decoded().view(s.heads, -1, s.kv_rank)
        w_k = _rows(plan, both[:, : s.nope_length].transpose(1, 2))
        plan.multiply_each(w_k, s.kv_rank, q, s.key_length, queries, width, heads, s.heads)
        plan.meet()
        _attend(plan, module, stored, absorbed, mixed)
        w_v = _rows(plan, both[:, s.nope_length :])
        plan.multiply_each(
            w_v, s.value_length, mixed, s.kv_rank, values, s.value_length, heads, s.heads
        )
    else:
        raise NotPlanned("an up-projection that is not known")
    plan.meet()
    if gates is not None:
        if s.value_length % LANES:
            raise NotPlanned(f"gates of heads of {s.value_length} elements")
        plan.add(
            operation(latent_step.gate_heads),
            *(values.address, s.heads, s.value_length, gates.address),
        )
    y = plan.product(module.output, values, "delta")
    plan.meet()
    return y


def _rows(plan: Plan, matrices: torch.Tensor) -> Rows:
    """Return float32[heads, rows, columns] as rows of a new matrix."""
    flat = matrices.contiguous().flatten(0, 1).numpy()
    plan.memory.array(flat)
    return Rows(ggml_type("F32"), flat.view(np.uint8), flat.shape[1])


def _attend(plan: Plan, module: MLA, stored: Stored, queries: Buffer, mixed: Buffer) -> None:
    """Add attention to the rows of the cache, as keys and as values after the rotated elements."""
    s = module.spec
    row = stored.row_bytes(s.cache_width)
    if stored.block:
        plan.add(
            operation(hadamard_step.transform),
            *(queries.address, s.cache_width, s.heads, *stored.transform),
        )
    plan.add(
        attending(stored, stored),
        *(plan.frame_address, plan.layer_offset, queries.address, 4 * s.cache_width),
        *(mixed.address, 4 * s.kv_rank, s.heads, s.heads, s.cache_width // UNIT, s.kv_rank // UNIT),
        *(row, row, row, row, stored.bytes_before(s.rope_length)),
        plan.memory.floats("scores", attention_step.BUFFER // 4 * s.heads).address,
        *(float(s.scale), 0.0, 0, 0, 0, 0, *stored.transform),
        *decoded_rows(plan, s.cache_width),
    )
