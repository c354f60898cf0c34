"""deepseek2: DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, GLM-4.7-Flash.

Latent attention, with a latent query in all but V2-Lite. After the dense layers each has experts
and shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from ..layers.block import Block
from ..layers.specs import RouterSpec
from ..network.decoder import Decoder
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture

# Files without `expert_gating_func` are of V2, or early ones of GLM-4.7-Flash.
_FLASH_LAYERS = (47, 48)
# Groups of experts, and how many of them are used, by number of experts, for files without these
# keys (those of ik_llama.cpp's converter): V2 and V3. Other released models have one group.
_GROUPS = {("softmax", 160): (8, 3), ("sigmoid", 256): (8, 4)}


@architecture("deepseek2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts = LatentParts.read(d)
    router = parts.router("sigmoid" if d.n_layers in _FLASH_LAYERS else "softmax")
    if router is not None:
        router = with_groups(router, d.p.has("expert_group_count"))

    def block(layer: int) -> Block:
        return d.block(layer, parts.attention(layer), parts.ffn(layer, router))

    return d.network(block)


def with_groups(router: RouterSpec, known: bool) -> RouterSpec:
    """Return the router with the groups of released models, unless they are `known`. V2 takes the
    groups with the best expert, later models those with the best two.
    """
    best = 1 if router.score == "softmax" else 2
    if known:
        return replace(router, group_best=best)
    groups, used = _GROUPS.get((router.score, router.n_experts), (1, 1))
    return replace(router, groups=groups, groups_used=used, group_best=best)
