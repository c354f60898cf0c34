"""Plans of attention with keys and values for heads."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...formats.kernel import inlined_function
from ...formats.types import ggml_type
from ..layers.attention import Attention
from ..layers.norm import HeadLayerNorm, RMSNorm
from ..layers.specs import AttentionSpec, Temperature
from ..simd.operations import operation
from ..simd.step import attention as attention_step
from ..simd.step import heads as heads_step
from ..simd.step import norms as norms_step
from ..simd.step.kept_types import STORES
from ..simd.units import UNITS
from ..simd.vectors.core import has_feature, is_arm
from ..state.cache import CacheType
from .memory import Buffer
from .norms import norm_together
from .plan import LANES, UNIT, NotPlanned, Plan

_STORES = {
    "F32": heads_step.store_f32,
    "F16": heads_step.store_f16,
    "BF16": heads_step.store_bf16,
    **STORES,
}


class Stored(NamedTuple):
    """How vectors of a cache type are read and written: bytes before the first of 32 elements, and
    bytes of so many. block: of the Hadamard transform that they are stored after, 0 for none.
    """

    name: str
    header: int
    unit_bytes: int
    block: int

    @classmethod
    def of(cls, type: CacheType, block: int) -> Stored:
        """Return how a cache type is stored, after a transform in blocks of so many elements (0: no
        transform). Raise NotPlanned for types that plans cannot store on this processor.
        """
        if type.name not in _STORES:
            raise NotPlanned(f"a cache in {type.name.lower()}")
        if type.name not in ("F32", "BF16") and not (has_feature("f16c") or is_arm()):
            raise NotPlanned(f"a cache in {type.name.lower()} on this processor")
        plain = ggml_type(type.name)
        units = max(1, UNIT // plain.block_size)
        return cls(type.name, plain.header_bytes, units * plain.block_bytes, block)

    def row_bytes(self, n: int) -> int:
        """Return the bytes of n elements."""
        return self.header + n // UNIT * self.unit_bytes

    def bytes_before(self, n: int) -> int:
        """Return the bytes of a row before element n, without the header."""
        if n * self.unit_bytes % UNIT:
            raise NotPlanned(f"rows that are read from element {n} on")
        return n * self.unit_bytes // UNIT

    @property
    def transform(self) -> tuple[int, float]:
        """The block, and the factor of `simd.step.hadamard`."""
        return self.block, self.block**-0.5 if self.block else 0.0

    @property
    def unit(self) -> Any:
        """The compiled unit that decodes 32 values of a row, see `simd.units`."""
        return inlined_function(UNITS[self.name])

    @property
    def store(self) -> Any:
        """The compiled function that stores n float32 in a row."""
        return inlined_function(_STORES[self.name])


def keeping(keys: Stored, values: Stored, *, warms: bool, norms_last: bool) -> int:
    """Return the operation `rotate_and_keep` for a cache of these types. warms: queries grow with
    their positions. norms_last: norms follow the rotation.
    """
    features = {
        "NORMS_LAST": int(norms_last),
        "WARMS": int(warms),
        "TURNS_KEYS": int(keys.block > 0),
        "TURNS_VALUES": int(values.block > 0),
    }
    return operation(
        heads_step.rotate_and_keep,
        f"rotate_and_keep_{keys.name}_{values.name}".lower() + _named(features),
        **features,
        store_key=keys.store,
        store_value=values.store,
        KEY_HEADER=keys.header,
        KEY_BYTES=keys.unit_bytes // 2,
        VALUE_BYTES=values.unit_bytes // 2,
    )


def attending(
    keys: Stored, values: Stored, *, capped: bool = False, sinks: bool = False, gated: int = 0
) -> int:
    """Return the operation `attend` for a cache of these types, for scores that are capped, with
    sinks, or with gates: 1 for each element of a head, 2 for a head; 3 and 4 for those whose
    softplus counts.
    """
    features = {
        "CAPPED": int(capped),
        "SINKS": int(sinks),
        "GATED": gated,
        "TURNED": int(values.block > 0),
    }
    return operation(
        attention_step.attend,
        f"attend_{keys.name}_{values.name}".lower() + _named(features),
        **features,
        key_unit=keys.unit,
        value_unit=values.unit,
        KEY_HEADER=keys.header,
        KEY_BYTES=keys.unit_bytes,
        VALUE_HEADER=values.header,
        VALUE_BYTES=values.unit_bytes,
    )


def _named(features: dict[str, int]) -> str:
    """Return what tells an operation with these features from others."""
    return "".join(f"_{name}{n if n > 1 else ''}" for name, n in features.items() if n).lower()


def plan_attention(plan: Plan, module: Attention, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    if s.kv_from is not None or s.kv_shared or s.value_norm:
        raise NotPlanned("attention that shares keys and values, or norms values")
    if s.key_length % UNIT or s.value_length % UNIT:
        raise NotPlanned(f"heads of {s.key_length} and {s.value_length} elements")
    if any(
        norm is not None and norm.weight.numel() % LANES for norm in (module.q_norm, module.k_norm)
    ):
        raise NotPlanned("norms of heads that are no vectors")
    gates = None if module.gate is None else plan.product(module.gate, x, "gates")
    q, k, v = _projections(plan, module, x)
    if s.joined_norms:
        if s.own is not None or s.gated_queries:
            raise NotPlanned("norms over heads of several ranks, or over gates")
        if not isinstance(module.q_norm, RMSNorm) or not isinstance(module.k_norm, RMSNorm):
            raise NotPlanned("norms over all heads that are no RMS norms")
        q = norm_together(plan, module.q_norm, q, s.query_rows, "normed q")
        k = norm_together(plan, module.k_norm, k, s.key_rows, "normed k")
        plan.meet()
        head_norms = None, None
    else:
        head_norms = _head_norms(plan, module, q, k)
    keys = Stored.of(plan.settings.k, plan.settings.block_of_keys(s.key_length))
    values = Stored.of(plan.settings.v, plan.settings.block_of_values(s.value_length))
    q_step = s.query_rows // s.heads
    angles, pairs, step, other = rotation(plan, module.rope)
    plan.add(
        keeping(keys, values, warms=s.temperature is not None, norms_last=s.norms_last),
        *(plan.frame_address, plan.layer_offset, q.address, s.heads, 4 * q_step),
        *(k.address, v.address, s.kv_heads, s.key_length, s.value_length),
        *(0 if norm is None else memory.vector(norm.weight) for norm in head_norms),
        *(0.0 if norm is None else float(norm.eps) for norm in head_norms),
        *(angles, pairs, step, other, *temperature_of(s.temperature)),
        *(*keys.transform, *values.transform),
        0 if s.temperature is None else s.temperature.offset,
    )
    mixed = memory.floats("mixed", s.heads * s.value_length)
    key_head, value_head = keys.row_bytes(s.key_length), values.row_bytes(s.value_length)
    decoded = decoded_rows(plan, max(s.key_length, s.value_length))
    plan.add(
        attending(
            keys,
            values,
            capped=bool(s.softcap),
            sinks=module.sinks is not None,
            gated=s.gate * ((2 if s.head_gates else 1) + 2 * s.softplus_gates),
        ),
        *(plan.frame_address, plan.layer_offset, q.address, 4 * q_step),
        *(mixed.address, 4 * s.value_length, s.heads, s.group),
        *(s.key_length // UNIT, s.value_length // UNIT),
        *(s.kv_heads * key_head, key_head, s.kv_heads * value_head, value_head, 0),
        memory.floats("scores", attention_step.BUFFER // 4 * s.heads).address,
        *(float(s.scale), float(s.softcap), -s.window if s.chunked else s.window),
        memory.vector(module.sinks),
        *_gates(s, q, 4 * q_step, gates),
        *(*values.transform, *decoded),
    )
    y = plan.product(module.output, mixed, "delta")
    plan.meet()
    return y


def _gates(s: AttentionSpec, q: Buffer, q_step: int, gates: Buffer | None) -> tuple[int, int]:
    """Return the address of the gates, and the bytes from one to the next; 0 without gates."""
    if gates is not None:
        return gates.address, 4 * s.gate_length
    return (q.at(s.key_length).address, q_step) if s.gate else (0, 0)


def _head_norms(
    plan: Plan, module: Attention, q: Buffer, k: Buffer
) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Return the norms of queries and keys that are applied with the rotation. Others are added
    here.
    """
    s, found = module.spec, []
    for norm, x, heads in ((module.q_norm, q, s.heads), (module.k_norm, k, s.kv_heads)):
        if isinstance(norm, HeadLayerNorm):
            if s.gated_queries or s.norms_last:
                raise NotPlanned("LayerNorms of heads with gates, or after the rotation")
            weight = plan.memory.vector(norm.weight.reshape(-1))
            arguments = x.address, heads, s.key_length, weight, float(norm.eps)
            plan.add(operation(norms_step.head_layer_norms), *arguments)
            norm = None
        found.append(norm)
    return found[0], found[1]


def _projections(plan: Plan, module: Attention, x: Buffer) -> tuple[Buffer, Buffer, Buffer]:
    s = module.spec
    if module.qkv is not None:
        q = plan.product(module.qkv, x, "qkv")
        k = q.at(s.query_rows)
        v = k.at(s.key_rows)
    elif module.q is None or module.k is None or module.v is None:
        raise NotPlanned("attention without a projection of its own for queries, keys or values")
    else:
        k, q, v = (
            plan.product(linear, x, name)
            for linear, name in ((module.k, "k"), (module.q, "q"), (module.v, "v"))
        )
    plan.meet()
    return q, k, v


def decoded_rows(plan: Plan, length: int) -> Buffer:
    """Return each thread's buffer for keys or values of so many elements."""
    return plan.memory.own_floats("decoded rows", attention_step.PIECE * length)


def rotation(plan: Plan, rope: Any) -> tuple[int, int, int, int]:
    """Return the address of angles, the number of pairs, and where the elements of a pair are, see
    `simd.step.heads.rotate`.
    """
    if rope is None:
        return 0, 0, 0, 0
    pairs = rope.n_rot // 2
    step, other = (8, 4) if rope.style == "norm" else (4, 4 * pairs)
    return plan.angles(rope).address, pairs, step, other


def temperature_of(t: Temperature | None) -> tuple[float, int]:
    """Return `scale` and `original` of `simd.step.heads.warm`."""
    return (0.0, 0) if t is None else (float(t.scale), t.original_context)
