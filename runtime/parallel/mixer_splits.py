"""How mixers are split: softmax attention by groups of query heads, latent and Kimi delta attention
by heads, delta nets by key heads with their value heads, state-space layers by groups of heads,
short convolutions by channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..layers.attention import Attention
from ..layers.compressed.attention import CompressedAttention
from ..layers.latent import Joined, PerHead
from ..layers.mla import MLA
from ..layers.norm import HeadLayerNorm
from ..layers.recurrent.delta_net import DeltaNet
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.recurrent.selective import Selective
from ..layers.recurrent.short_conv import ShortConv
from ..layers.recurrent.state_space import StateSpace
from ..weights.split_plan import NOTHING, LayerShare, Range
from .apportion import ranges
from .tensor_splits import TensorSplits, fitting, least_common, multiple, scaled, stem

_LATENT_HEADS = 4  # the unit of heads of latent attention that kernels like
Parts = tuple[LayerShare, ...]


def plan_attention(
    module: Attention, splits: TensorSplits, parts: Parts, source: Parts | None = None
) -> Parts:
    """Split softmax attention. source: the parts of the layer whose keys and values it uses.

    The unit is a key/value head with its query heads, or more where a block of the output's columns
    is longer. With fewer key/value heads than ranks they are copied, and query heads are split.
    Where norms are over all heads together, every rank computes the queries and keys of all.
    """
    s, n_active = module.spec, _active(splits)
    copied = s.kv_heads < n_active
    unit = 1 if copied else s.group
    query = s.query_rows // s.heads
    output = stem(module.output.name)
    values = multiple(s.value_length, splits.column_unit(module.output.name))
    unit = least_common(unit, values)
    sizes = (query, s.key_length, s.value_length)
    products = [module.qkv] * 3 if module.qkv is not None else [module.q, module.k, module.v]
    whole = (s.joined_norms, s.joined_norms, False)
    kinds = zip(products, sizes, (True, False, False), whole, strict=True)
    for product, size, is_query, is_whole in kinds:
        if product is None or is_whole:
            continue
        group = multiple(size, splits.row_unit(product.name))
        if is_query:
            unit = least_common(unit, group)
        elif not copied:
            unit = least_common(unit, group * s.group)
        elif group > 1:
            unit = s.heads
    if module.gate is not None:
        unit = least_common(unit, multiple(s.gate_length, splits.row_unit(module.gate.name)))
    unit = fitting(unit, s.heads)
    if source is not None:
        heads = [part.heads for part in source]
        kv_heads = [part.kv_heads for part in source]
    else:
        heads = ranges(splits.apportion.units(s.heads // unit, "heads"), unit)
        kv_heads = [_kv_heads(held, s.group) for held in heads]
    q_rows = [[scaled(held, query)] for held in heads]
    k_rows = [[scaled((h, h + 1), s.key_length) for h in held] for held in kv_heads]
    v_rows = [[scaled((h, h + 1), s.value_length) for h in held] for held in kv_heads]
    if s.joined_norms:
        q_rows, k_rows = (
            [[(0, rows)] if held != NOTHING else [] for held in heads]
            for rows in (s.query_rows, s.key_rows)
        )
    if module.qkv is not None:
        after_q, after_k = s.query_rows, s.query_rows + s.key_rows
        joined = [
            [*q, *_moved(k, after_q), *_moved(v, after_k)]
            for q, k, v in zip(q_rows, k_rows, v_rows, strict=True)
        ]
        splits.rows(stem(module.qkv.name), joined)
    if module.gate is not None:
        splits.rows(stem(module.gate.name), [[scaled(held, s.gate_length)] for held in heads])
    for product, rows in ((module.q, q_rows), (module.k, k_rows), (module.v, v_rows)):
        if product is not None:
            splits.rows(stem(product.name), rows)
    of_queries = [[held] for held in heads]
    of_keys = [[(h, h + 1) for h in held] for held in kv_heads]
    for norm, held in ((module.q_norm, of_queries), (module.k_norm, of_keys)):
        if isinstance(norm, HeadLayerNorm):
            splits.rows(norm.name, held)
        elif norm is not None:
            splits.copy(f"{norm.name}.weight")
    if module.sinks is not None:
        splits.vector(f"{output.rpartition('.')[0]}.attn_sinks.weight", [[held] for held in heads])
    splits.columns(output, [[scaled(held, s.value_length)] for held in heads])
    return tuple(
        replace(part, heads=held, kv_heads=tuple(kv))
        for part, held, kv in zip(parts, heads, kv_heads, strict=True)
    )


def plan_latent(module: MLA, splits: TensorSplits, parts: Parts) -> Parts:
    """Split latent attention by heads. All layers are split alike, as choices of an indexer are
    used by later layers.
    """
    s, up = module.spec, module.up
    output = stem(module.output.name)
    unit = least_common(
        multiple(s.key_length, splits.row_unit(module.q.name)),
        multiple(s.value_length, splits.column_unit(module.output.name)),
    )
    if module.gate is not None:
        unit = least_common(unit, multiple(s.gate_length, splits.row_unit(module.gate.name)))
    if isinstance(up, Joined):
        rows = s.nope_length + s.value_length
        unit = least_common(unit, multiple(rows, splits.row_unit(up.kv_b.name)))
    liked = least_common(unit, _LATENT_HEADS)
    if s.heads % liked == 0 and s.heads // liked >= _active(splits):
        unit = liked
    unit = fitting(unit, s.heads)
    heads = ranges(splits.apportion.units(s.heads // unit, ""), unit)
    for product in (module.q_a, module.kv_a):
        if product is not None:
            splits.copy(product.name)
    for norm in (module.q_norm, module.kv_norm):
        if norm is not None:
            splits.copy(f"{norm.name}.weight")
    splits.rows(stem(module.q.name), [[scaled(held, s.key_length)] for held in heads])
    if module.gate is not None:
        splits.rows(stem(module.gate.name), [[scaled(held, s.gate_length)] for held in heads])
    if module.sinks is not None:
        name = f"{output.rpartition('.')[0]}.attn_sinks.weight"
        splits.vector(name, [[held] for held in heads])
    if isinstance(up, Joined):
        splits.rows(stem(up.kv_b.name), [[scaled(held, rows)] for held in heads])
    elif isinstance(up, PerHead):
        for product, n_out in ((up.k_b, s.kv_rank), (up.v_b, s.value_length)):
            if len(splits.tensors[product.name].shape) == 2:  # heads one after the other
                splits.rows(stem(product.name), [[scaled(held, n_out)] for held in heads])
            else:
                splits.experts(stem(product.name), [[held] for held in heads], sum_after=False)
    splits.columns(output, [[scaled(held, s.value_length)] for held in heads])
    return tuple(replace(part, heads=held) for part, held in zip(parts, heads, strict=True))


def plan_compressed(
    module: CompressedAttention, layer: int, splits: TensorSplits, parts: Parts
) -> Parts:
    """Split attention to near positions and entries by groups of heads. Every rank has keys,
    compressors and indexers as a whole.
    """
    s, at, output = module.spec, f"blk.{layer}", stem(module.output_b.name)
    of_group = s.heads // s.groups
    unit = least_common(
        multiple(of_group * s.key_length, splits.row_unit(module.q.name)),
        multiple(s.out_rank, splits.row_unit(module.output_a.name)),
        multiple(s.out_rank, splits.column_unit(module.output_b.name)),
    )
    unit = fitting(unit, s.groups)
    groups = ranges(splits.apportion.units(s.groups // unit, ""), unit)
    heads = [scaled(held, of_group) for held in groups]
    copied = [module.q_a, module.kv]
    norms = [module.q_norm, module.kv_norm]
    for name, compressor in zip(
        ("attn_compressor", "indexer_compressor"), module.compressors, strict=False
    ):
        copied += [compressor.kv, compressor.gate]
        norms.append(compressor.norm)
        splits.copy(f"{at}.{name}_ape.weight")
    if module.indexer is not None:
        copied += [module.indexer.q, module.indexer.weights]
    for product in copied:
        splits.copy(product.name)
    for norm in norms:
        splits.copy(norm.tensor)
    splits.rows(stem(module.q.name), [[scaled(held, s.key_length)] for held in heads])
    splits.vector(f"{at}.attn_sinks.weight", [[held] for held in heads])
    outputs = [[scaled(held, s.out_rank)] for held in groups]
    splits.rows(stem(module.output_a.name), outputs)
    splits.columns(output, outputs)
    return tuple(replace(part, heads=held) for part, held in zip(parts, heads, strict=True))


def plan_delta_net(module: DeltaNet, layer: int, splits: TensorSplits, parts: Parts) -> Parts:
    """Split a delta net by key heads. In `tiled` files the value heads of a key head are as many
    heads apart as there are key heads, so that a rank holds several ranges of them.
    """
    s, at = module.spec, f"blk.{layer}"
    group, n = s.value_heads // s.key_heads, s.key_heads
    heads_of_unit = 1 if s.tiled else group  # value heads side by side for each key head
    unit = multiple(heads_of_unit * s.value_length, splits.column_unit(module.output.name))
    for product, size in (
        (module.qkv, s.key_length),
        (module.qkv, heads_of_unit * s.value_length),
        (module.gate, heads_of_unit * s.value_length),
        (module.beta, heads_of_unit),
        (module.alpha, heads_of_unit),
        (module.ba, 2 * group),
        (module.qkvz, 2 * s.key_length + 2 * group * s.value_length),
    ):
        if product is not None:
            unit = least_common(unit, multiple(size, splits.row_unit(product.name)))
    unit = fitting(unit, n)
    key_heads = ranges(splits.apportion.units(n // unit, "key_heads"), unit)
    value_heads = [_value_heads(held, n, group, s.tiled) for held in key_heads]
    keys = n * s.key_length
    values = [[scaled(held, s.value_length) for held in all] for all in value_heads]
    channels = [
        [
            scaled(held, s.key_length),
            scaled(held, s.key_length, keys),
            *_moved(value, 2 * keys),
        ]
        for held, value in zip(key_heads, values, strict=True)
    ]
    for product, rows in (
        (module.qkv, channels),
        (module.gate, values),
        (module.beta, value_heads),
        (module.alpha, value_heads),
        (module.ba, [[scaled(held, 2 * group)] for held in key_heads]),
        (
            module.qkvz,
            [[scaled(held, 2 * s.key_length + 2 * group * s.value_length)] for held in key_heads],
        ),
    ):
        if product is not None:
            splits.rows(stem(product.name), rows)
    splits.rows(f"{at}.ssm_conv1d", channels)
    for name in (f"{at}.ssm_dt.bias", f"{at}.ssm_a"):
        splits.vector(name, value_heads)
    splits.copy(f"{module.norm.name}.weight")
    splits.columns(stem(module.output.name), values)
    return tuple(replace(part, key_heads=held) for part, held in zip(parts, key_heads, strict=True))


def plan_kimi_delta(module: KimiDelta, layer: int, splits: TensorSplits, parts: Parts) -> Parts:
    """Split Kimi delta attention by heads. Every rank has the first of two products."""
    s, at, output = module.spec, f"blk.{layer}", stem(module.output.name)
    by_element = [*module.qkv, module.decay[-1], module.gate[-1]]
    unit = multiple(s.length, splits.column_unit(module.output.name))
    for product in by_element:
        unit = least_common(unit, multiple(s.length, splits.row_unit(product.name)))
    unit = fitting(least_common(unit, splits.row_unit(module.beta.name)), s.heads)
    heads = ranges(splits.apportion.units(s.heads // unit, "key_heads"), unit)
    own_heads = [[held] for held in heads]
    elements = [[scaled(held, s.length)] for held in heads]
    for product in by_element:
        splits.rows(stem(product.name), elements)
    for product in (*module.decay[:-1], *module.gate[:-1]):
        splits.copy(product.name)
    splits.rows(stem(module.beta.name), own_heads)
    splits.vector(f"{at}.ssm_dt.bias", elements)
    splits.whole_rows(f"{at}.ssm_a", own_heads)
    for part in "qkv":
        splits.whole_rows(f"{at}.ssm_conv1d_{part}.weight", elements)
    splits.copy(module.norm.tensor)
    splits.columns(output, elements)
    return tuple(replace(part, key_heads=held) for part, held in zip(parts, heads, strict=True))


def plan_state_space(module: StateSpace, layer: int, splits: TensorSplits, parts: Parts) -> Parts:
    """Split a state-space layer by groups of heads, which share vectors, and a norm if any."""
    s, at = module.spec, f"blk.{layer}"
    heads, output = s.heads // s.groups, stem(module.output.name)
    of_group = heads * s.head_length
    unit = multiple(of_group, splits.column_unit(module.output.name))
    row_unit = splits.row_unit(module.input.name)
    for size in (of_group, s.state_length, heads):
        unit = least_common(unit, multiple(size, row_unit))
    unit = fitting(unit, s.groups)
    groups = ranges(splits.apportion.units(s.groups // unit, "key_heads"), unit)
    own_heads = [[scaled(held, heads)] for held in groups]
    values = [[scaled(held, of_group)] for held in groups]
    vectors = s.groups * s.state_length
    channels = [
        [
            *value,
            scaled(held, s.state_length, s.inner),
            scaled(held, s.state_length, s.inner + vectors),
        ]
        for held, value in zip(groups, values, strict=True)
    ]
    inputs = [
        [*z, *_moved(of_channels, s.inner), *_moved(steps, s.inner + s.channels)]
        for z, of_channels, steps in zip(values, channels, own_heads, strict=True)
    ]
    splits.rows(stem(module.input.name), inputs)
    splits.rows(f"{at}.ssm_conv1d", channels)
    splits.vector(f"{at}.ssm_dt.bias", own_heads)
    for name in ("ssm_a", "ssm_d"):
        splits.whole_rows(f"{at}.{name}", own_heads)
    if module.norm is not None:
        splits.whole_rows(f"{at}.ssm_norm.weight", [[held] for held in groups])
    splits.columns(output, values)
    return tuple(replace(part, key_heads=held) for part, held in zip(parts, groups, strict=True))


def plan_selective(module: Selective, layer: int, splits: TensorSplits, parts: Parts) -> Parts:
    """Give a selective state space to one rank: its channels choose steps and vectors together."""
    s, at = module.spec, f"blk.{layer}"
    owner = ranges(splits.apportion.units(1, "key_heads"), 1)
    channels = [[scaled(held, s.channels)] for held in owner]
    splits.rows(stem(module.input.name), [[scaled(held, 2 * s.channels)] for held in owner])
    splits.rows(f"{at}.ssm_conv1d", channels)
    chosen = s.rank + 2 * s.state_length
    splits.rows(stem(module.vectors.name), [[scaled(held, chosen)] for held in owner])
    splits.rows(stem(module.steps.name), channels)
    splits.whole_rows(f"{at}.ssm_a", channels)
    splits.vector(f"{at}.ssm_d", channels)
    for part in ("dt", "b", "c"):
        splits.copy(f"{at}.ssm_{part}_norm.weight")
    splits.columns(stem(module.output.name), channels)
    return tuple(replace(part, key_heads=held) for part, held in zip(parts, owner, strict=True))


def plan_short_conv(module: ShortConv, splits: TensorSplits, parts: Parts) -> Parts:
    """Split a short convolution by channels, each with its rows in all parts of the inputs."""
    n, inputs, output = module.spec.channels, module.inputs.name, module.output.name
    unit = least_common(splits.column_unit(output), splits.row_unit(inputs))
    liked = next((x for x in splits.column_steps if x % unit == 0 and n % x == 0), unit)
    if n // liked >= _active(splits):
        unit = liked
    unit = fitting(unit, n)
    channels = ranges(splits.apportion.units(n // unit, "channels"), unit)
    splits.rows(
        stem(inputs), [[scaled(held, 1, part * n) for part in range(3)] for held in channels]
    )
    splits.rows(stem(module.name), [[held] for held in channels])
    splits.columns(stem(output), [[held] for held in channels])
    return tuple(replace(part, channels=held) for part, held in zip(parts, channels, strict=True))


def _active(splits: TensorSplits) -> int:
    """Return the number of ranks that have a share."""
    return sum(share > 0 for share in splits.apportion.shares)


def _kv_heads(heads: Range, group: int) -> list[int]:
    """Return the key/value head of every local group of query heads: as few groups as possible of
    the same size, none of which reads two heads.
    """
    if heads == NOTHING:
        return []
    counts: dict[int, int] = {}
    for head in range(*heads):
        counts[head // group] = counts.get(head // group, 0) + 1
    size = math.gcd(*counts.values())
    return [kv for kv, count in counts.items() for _ in range(count // size)]


def _value_heads(key_heads: Range, n_keys: int, group: int, tiled: bool) -> list[Range]:
    if key_heads == NOTHING:
        return []
    if not tiled:
        return [scaled(key_heads, group)]
    return [(j * n_keys + key_heads[0], j * n_keys + key_heads[1]) for j in range(group)]


def _moved(ranges: Sequence[Range], offset: int) -> list[Range]:
    return [(start + offset, stop + offset) for start, stop in ranges if start != stop]
