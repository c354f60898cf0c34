"""Solar Open: experts with a shared one in every layer, as in GLM-4.5, and Llama's attention."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value
from ..checkpoint.folder import Checkpoint
from .glm4moe import Glm4Moe
from .implied import check_number
from .layout_options import LayoutOptions
from .registry import register

_GROUPS = ("n_group", "topk_group")


@register("SolarOpenForCausalLM")
class SolarOpen(Glm4Moe):
    """Solar-Open-100B; GGUF `glm4moe`."""

    has_mtp = False
    ff_is_optional = True  # no layer is dense
    pre_names: ClassVar[dict[str, str]] = {"qwen2": "solar-open"}
    special_tokens: ClassVar[dict[str, str]] = {
        "bos_token_id": "<|startoftext|>",
        "eos_token_id": "<|endoftext|>",
        "eot_token_id": "<|endoftext|>",
        "unknown_token_id": "<unk>",
    }
    names_win = False
    # Published configs lack the number of groups, and those that transformers 5 saves the others.
    class_defaults: ClassVar[dict[str, object]] = {
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        **dict.fromkeys(_GROUPS, 1),
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_number(self.config, "form of Solar Open", "first_k_dense_replace", 0)

    def expert_keys(self) -> dict[str, Value]:
        keys, stated = super().expert_keys(), self.checkpoint.config.of_text()
        if not any(key in stated for key in _GROUPS):  # one group, which runtimes imply
            keys.pop("expert_group_count")
            keys.pop("expert_group_used_count")
        return keys
