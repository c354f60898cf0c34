"""Builders of experts from the tensors of a block, and how tokens choose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import ConfigError
from ..layers.absent import AbsentRows
from ..layers.layer_input import TokenMoE
from ..layers.moe import Experts, Latent, MoE, Router
from ..layers.specs import FFNSpec, RouterSpec
from .decoder import Decoder

_NO_LIMIT = 1e-6  # llama.cpp takes limits that are not above it for none
_SCORES = {1: "softmax", 2: "sigmoid", 3: "selected", 4: "sqrt_softplus"}


def router_spec(
    d: Decoder, score: str = "softmax", *, norm: bool = True, **spec: Any
) -> RouterSpec:
    """Read how tokens choose experts. score, norm: what a file without these keys has. spec: other
    fields of `RouterSpec`, which the keys replace. Raise ConfigError for numbers of experts or
    groups that are not possible.
    """
    p = d.p
    n_experts = p.integer("expert_count")
    function = p.integer("expert_gating_func", 0, least=0, most=max(_SCORES))
    groups = p.integer("expert_group_count", 0, least=0, most=n_experts) or 1
    groups_used = p.integer("expert_group_used_count", 0, least=0, most=n_experts)
    if groups == 1:
        groups_used = groups_used or 1
    if n_experts % groups or not 1 <= groups_used <= groups:
        raise ConfigError(
            f"{n_experts} experts cannot be in {groups} groups of which {groups_used} are used",
            file=p.file,
        )
    n_used = p.integer("expert_used_count", most=n_experts)
    if n_used > n_experts // groups * groups_used:
        raise ConfigError(
            f"{n_used} of {n_experts} experts cannot be in {groups_used} of {groups} groups",
            file=p.file,
        )
    fields = {"groups": groups, "groups_used": groups_used} if groups > 1 else {}
    return RouterSpec(
        n_experts,
        n_used,
        _SCORES.get(function, score),
        norm=p.flag("expert_weights_norm", norm),
        scale=p.number("expert_weights_scale", 1.0) or 1.0,
        **{**spec, **fields},
    )


def moe(
    d: Decoder,
    layer: int,
    hidden: int,
    router: RouterSpec,
    *,
    ffn: FFNSpec = FFNSpec(),
    shared: int = 0,
    shared_ffn: FFNSpec | None = None,
    shared_factor: float = 1.0,
    scaled_router: bool = True,
    latent: int = 0,
    table: torch.Tensor | None = None,
) -> MoE | AbsentRows:
    """Router and experts of a block, or nothing where this rank has none of them. hidden: their
    hidden size. shared: that of the expert that works on every token (0: none), which
    `ffn_gate_inp_shexp` gates if the file has it. shared_ffn: what it does, where that is not
    `ffn`. shared_factor: multiplies what it gives. scaled_router: see `Weights.linear`. latent:
    length of what experts read and write, between `ffn_latent_down` and `ffn_latent_up` (0: the
    width). table: the experts of every token, where it chooses them.
    """
    at, w = f"blk.{layer}", d.w
    gate = f"{at}.ffn_gate_inp_shexp"
    if w.share is not None and not w.share.layer(layer).n_experts:
        return AbsentRows()
    always = shared and (w.share is None or w.share.has_ffn(layer, shared=True))
    parts = (
        _router(d, layer, router, scaled=scaled_router),
        _experts(d, layer, router.n_experts, hidden, ffn, latent or d.width),
        d.ffn(layer, shared, shared_ffn or ffn, "_shexp", shared_factor) if always else None,
        w.linear(gate, d.width, 1, role="ffn_gate_inp_shexp", split="replicated")
        if always and w.has(f"{gate}.weight")
        else None,
        None if w.share is None else w.share.owned(layer),
        _latent(d, layer, latent) if latent else None,
    )
    return MoE(*parts) if table is None else TokenMoE(table, *parts)


def dense_then_experts(d: Decoder, router: RouterSpec) -> Callable[[int], Any]:
    """Return what builds the feed-forward of a layer where leading layers are dense and the others
    have experts, with shared ones. Raise ConfigError for keys that are not possible.
    """
    n_dense = d.p.integer("leading_dense_block_count", 0, least=0)
    hidden = d.p.per_layer("feed_forward_length", d.n_layers) if n_dense else ()
    of_expert = d.p.integer("expert_feed_forward_length")
    shared = d.p.integer("expert_shared_count", 0, least=0) * of_expert

    def feed_forward(layer: int) -> Any:
        if layer < n_dense:
            return d.ffn(layer, hidden[layer])
        return moe(d, layer, of_expert, router, shared=shared)

    return feed_forward


def limited(d: Decoder, activation: str) -> Callable[[int], dict[str, FFNSpec]]:
    """Return what gives, by the number of a layer, the arguments `ffn` and `shared_ffn` of `moe`:
    silu, or where the file limits what experts multiply, `activation` with that limit. Raise
    ConfigError for keys that are not possible.
    """
    n_blocks = d.p.integer("block_count")  # arrays may be for blocks that are not run, too
    limits, shared = (
        d.p.numbers(f"swiglu_clamp_{name}", d.n_layers, 0.0, n_blocks=n_blocks)
        for name in ("exp", "shexp")
    )

    def spec(limit: float) -> FFNSpec:
        return FFNSpec(activation, limit=limit) if limit > _NO_LIMIT else FFNSpec()

    return lambda layer: {"ffn": spec(limits[layer]), "shared_ffn": spec(shared[layer])}


def _router(d: Decoder, layer: int, spec: RouterSpec, *, scaled: bool) -> Router:
    """`ffn_gate_inp` of a block, and `exp_probs_b` if the file has it. In files of Hunyuan 3 the
    latter has no suffix.
    """
    at, w = f"blk.{layer}", d.w
    linear = w.linear(
        f"{at}.ffn_gate_inp",
        d.width,
        spec.n_experts,
        role="ffn_gate_inp",
        split="replicated",
        scaled=scaled,
    )
    name = f"{at}.exp_probs_b"
    name = name if w.has(name) else f"{name}.bias"
    bias = w.optional_vector(name, spec.n_experts, masks=True)
    return Router(linear, spec, bias, w.switches.ser)


def _latent(d: Decoder, layer: int, n: int) -> Latent:
    """`ffn_latent_down` and `ffn_latent_up` of a block."""
    down, up = (
        d.w.linear(f"blk.{layer}.{name}", n_in, n_out, role=name, split="replicated")
        for name, n_in, n_out in (
            ("ffn_latent_down", d.width, n),
            ("ffn_latent_up", n, d.width),
        )
    )
    return Latent(down, up)


def _experts(d: Decoder, layer: int, n: int, hidden: int, spec: FFNSpec, width: int) -> Experts:
    """The expert tensors of a block, with gate and up split or merged, or without a gate. width: of
    what they read and write.
    """
    at, w = f"blk.{layer}", d.w
    down = w.experts(f"{at}.ffn_down", n, hidden, width, role="ffn_down_exps", split="row")
    if not spec.gated:
        up = w.experts(f"{at}.ffn_up", n, width, hidden, role="ffn_up_exps", split="column")
        return Experts(down, up=up, spec=spec)
    merged = {"role": "ffn_gate_up_exps", "split": "gate_up"}
    if w.has(f"{at}.ffn_gate_up_exps.weight"):
        gate_up = w.experts(f"{at}.ffn_gate_up", n, width, 2 * hidden, **merged)
        return Experts(down, gate_up=gate_up, spec=spec)
    names = f"{at}.ffn_gate", f"{at}.ffn_up"
    if w.switches.merge_gate_up and w.can_merge(*names):
        gate_up = w.merged_experts(f"{at}.ffn_gate_up", names, n, width, hidden, **merged)
        return Experts(down, gate_up=gate_up, spec=spec)
    gate, up = (
        w.experts(f"{at}.ffn_{x}", n, width, hidden, role=f"ffn_{x}_exps", split="column")
        for x in ("gate", "up")
    )
    return Experts(down, gate, up, spec=spec)
