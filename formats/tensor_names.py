"""Parse names of tensors. No other module does.

    blk.3.attn_q.weight            layer 3, role attn_q, suffix weight
    blk.3.ffn_gate_exps.weight     layer 3, role ffn_gate_exps: the gates of all experts, stacked
    blk.3.ffn_gate.7.weight        layer 3, role ffn_gate, expert 7 (very old files)
    output.weight                  no layer, role output

Presets, overrides and flags that take a part of a name do not use roles. They search the name for
that part, as llama.cpp and ik_llama.cpp do.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

TOKEN_EMBEDDING = "token_embd.weight"
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
OUTPUT = "output.weight"
EXTRA_OUTPUT = "output_extra.weight"  # a second output matrix in another type, for ik_llama.cpp
ROUTER = "ffn_gate_inp.weight"
EXPERTS_OF_TOKENS = "ffn_gate_tid2eid"  # the role of the table in which a token has experts

_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(ffn_(?:up|down|gate))\.(\d+)")
_ALL_EXPERTS = re.compile(r"ffn_(up|down|gate|gate_up)(_ch)?_?exps?")
_AFTER_KEYS = re.compile(r"attn_q|attn_output|ffn_\w+")
_OTHER_MODALITIES = ("v.", "a.", "mm.")
_LATENT = ("attn_k_b", "attn_v_b", "attn_kv_b")
# attn_qkv is tested before attn_q, which is also in it.
_PRODUCTS = (
    "attn_qkv",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
# Small but sensitive matrices: routers, position and type embeddings, short convolutions, and what
# mixes streams.
_SENSITIVE = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "ssm_conv1d_q",
    "ssm_conv1d_k",
    "ssm_conv1d_v",
    "shortconv.conv",
    "indexer.proj",
    "altup_correct_coef",
    "altup_predict_coef",
    "attn_compressor_ape",
    "indexer_compressor_ape",
    "hc_attn_fn",
    "hc_ffn_fn",
    "output_hc_fn",
)


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
        """Parse a name. Every text is a name; one without `blk.<number>.` has no layer."""
        return _parsed(name)

    @property
    def is_stacked(self) -> bool:
        """Return whether the tensor has one matrix, or one row of biases, per expert."""
        return self.role.endswith("_exps")

    @property
    def expert_part(self) -> str:
        """Return what the matrix of an expert is called in tables: `gate` for ffn_gate_exps."""
        return self.role.removeprefix("ffn_").removesuffix("_exps")

    @property
    def is_weight(self) -> bool:
        """Return whether the tensor is a weight: not a bias, and not a scale next to one."""
        return self.suffix == "weight"

    @property
    def is_norm(self) -> bool:
        """Return whether the tensor is the weight of a norm."""
        return self.is_weight and self.stem.endswith("_norm")

    @property
    def is_router(self) -> bool:
        """Return whether the tensor chooses experts."""
        return self.is_weight and self.role == "ffn_gate_inp"

    @property
    def is_sensitive(self) -> bool:
        """Return whether the tensor is a small matrix that converters never store in 16 bits."""
        return self.is_weight and self.role in _SENSITIVE

    @property
    def is_latent(self) -> bool:
        """Return whether the tensor expands the latent vectors of attention to keys or values."""
        return self.is_weight and self.role in _LATENT

    @property
    def is_mtp(self) -> bool:
        """Return whether only a layer that predicts further tokens has such a tensor."""
        return self.layer is not None and self.local.startswith("nextn.")

    @property
    def is_of_other_modality(self) -> bool:
        """Return whether the tensor belongs to an encoder of images or sound."""
        return self.layer is None and self.local.startswith(_OTHER_MODALITIES)

    @property
    def is_after_keys(self) -> bool:
        """Return whether the tensor works on what comes after the keys and values of its layer. In
        the last layer only tokens with logits need such a tensor.
        """
        return self.layer is not None and _AFTER_KEYS.fullmatch(self.role) is not None

    @property
    def product(self) -> str:
        """The product that the tensor takes part in, such as `attn_k` for attn_kv_b and `ffn_up`
        for ffn_up_exps; "" for other tensors.
        """
        return next((product for product in _PRODUCTS if product in self.local), "")

    @property
    def expert_layer(self) -> int | None:
        """Return the layer of a tensor of routed experts, stacked or not; None for others."""
        routed = self.expert is not None or _ALL_EXPERTS.fullmatch(self.role)
        return self.layer if routed else None

    def sibling(self, local: str) -> str:
        """Return the name of the tensor called `local` in the same layer."""
        return f"{self.prefix}.{local}" if self.prefix else local

    def with_suffix(self, suffix: str) -> str:
        """Return the name with another last word, as of a bias or a scale next to a weight."""
        other = f"{self.stem}.{suffix}"
        return other if self.layer is None else f"{self.prefix}.{other}"

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
