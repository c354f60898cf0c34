"""Names of tensors: the one place that takes them apart.

    blk.3.attn_q.weight            layer 3, role attn_q, suffix weight
    blk.3.ffn_gate_exps.weight     layer 3, role ffn_gate_exps: the gates of all experts, stacked
    blk.3.ffn_gate.7.weight        layer 3, role ffn_gate, expert 7 (very old files)
    output.weight                  no layer, role output

Presets and overrides do not ask for roles. They test a name for parts, as their originals do.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

TOKEN_EMBEDDING = "token_embd.weight"
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
OUTPUT = "output.weight"
ROUTER = "ffn_gate_inp.weight"

_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(ffn_(?:up|down|gate))\.(\d+)")
_ALL_EXPERTS = re.compile(r"ffn_(up|down|gate|gate_up)(_ch)?_?exps?")


@dataclass(frozen=True, slots=True)
class TensorName:
    """The parts of a tensor's name. `TensorName.parse` makes it.

    layer: None outside the layers. prefix: what comes before the role, `blk.3` in layer 3.
    local: the name without its layer. stem: `local` without the suffix. suffix: the last word, ""
    where there is one word only. role: the stem without the number of an expert; outside the layers
    its last word. expert: that number, or None.
    """

    layer: int | None
    prefix: str
    local: str
    stem: str
    suffix: str
    role: str
    expert: int | None

    @staticmethod
    def parse(name: str) -> TensorName:
        """Take a name apart. Every text is a name; one without `blk.<number>.` has no layer."""
        return _parsed(name)

    @property
    def is_stacked(self) -> bool:
        """Return whether the tensor has one matrix, or one row of biases, per expert."""
        return self.role.endswith("_exps")

    @property
    def is_norm(self) -> bool:
        """Whether the tensor is the weight of a norm."""
        return self.suffix == "weight" and self.stem.endswith("_norm")

    @property
    def is_mtp(self) -> bool:
        """Whether only a layer that predicts further tokens has such a tensor."""
        return self.layer is not None and self.local.startswith("nextn.")

    @property
    def expert_layer(self) -> int | None:
        """The layer of a tensor of routed experts, stacked or not; None for other tensors."""
        routed = self.expert is not None or _ALL_EXPERTS.fullmatch(self.role)
        return self.layer if routed else None

    def sibling(self, local: str) -> str:
        """Return the name of the tensor called `local` in the same layer."""
        return f"{self.prefix}.{local}" if self.prefix else local

    def in_layer(self, layer: int) -> str:
        """Return the name of the same tensor in another layer."""
        return f"blk.{layer}.{self.local}"


@functools.lru_cache(maxsize=1 << 14)
def _parsed(name: str) -> TensorName:
    found = _IN_LAYER.fullmatch(name)
    local = name if found is None else found[2]
    stem, dot, suffix = local.rpartition(".")
    if not dot:
        stem, suffix = local, ""
    if found is None:
        prefix, _, role = stem.rpartition(".")
        return TensorName(None, prefix, local, stem, suffix, role, None)
    layer, prefix = int(found[1]), name[: found.start(2) - 1]
    single = _ONE_EXPERT.fullmatch(stem)
    role, expert = (stem, None) if single is None else (single[1], int(single[2]))
    return TensorName(layer, prefix, local, stem, suffix, role, expert)
