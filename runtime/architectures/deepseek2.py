"""deepseek2: DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, GLM-4.7-Flash.

Latent attention, with a latent query in all but V2-Lite. After the dense layers each has experts
and shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from ..decoder import Decoder
from ..latent_parts import LatentParts
from ..layers.block import Block
from ..network import Network
from . import architecture

# Files without `expert_gating_func` are of V2, or early ones of GLM-4.7-Flash.
_FLASH_LAYERS = (47, 48)
# Groups of experts, and how many of them are used, by number of experts, for files without these
# keys (those of ik_llama.cpp's converter): V2 and V3. Other released models have one group.
_GROUPS = {("softmax", 160): (8, 3), ("sigmoid", 256): (8, 4)}


@architecture("deepseek2")
def build(d: Decoder) -> Network:
    parts = LatentParts.read(d)
    router = parts.router("sigmoid" if d.n_layers in _FLASH_LAYERS else "softmax")
    if router is not None:
        # V2 takes the groups with the best expert, later models those with the best two.
        router = replace(router, group_best=1 if router.score == "softmax" else 2)
        if not d.p.has("expert_group_count"):
            groups, used = _GROUPS.get((router.score, router.n_experts), (1, 1))
            router = replace(router, groups=groups, groups_used=used)

    def block(layer: int) -> Block:
        return d.block(layer, parts.attention(layer), parts.ffn(layer, router))

    return d.network(block)
