"""Qwen3-VL, text only: Qwen3 without and with experts, whose files say how positions in images turn
heads.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.folder import Checkpoint
from .family_metadata import FamilyMetadata
from .implied import check_flag
from .layout_options import LayoutOptions
from .qwen3 import Qwen3
from .qwen3moe import Qwen3Moe
from .registry import register
from .transposed_experts import TransposedExperts

_SECTIONS = [24, 20, 20]  # the classes' default: pairs rotated by time, height, width


class _ImagePositions(FamilyMetadata):
    """Add the keys of positions in images. In texts all three positions of a token are the same."""

    def rope_keys(self) -> dict[str, Value]:
        section, sizes = self.config.section("rope_parameters", "rope_scaling"), _SECTIONS
        if section is not None:
            sizes = section.integers("mrope_section", default=_SECTIONS)
            check_flag(section, self.gguf_name, "mrope_interleaved", True)
        if len(sizes) != 3 or min(sizes) < 0 or sum(sizes) != self.head_size // 2:
            raise ConfigError(
                f"key 'mrope_section' is {sizes}, expected the numbers of pairs that each of three"
                f" positions turns, of {self.head_size // 2} in a head",
                file=self.config.file,
            )
        return {
            **super().rope_keys(),
            "rope.dimension_sections": array(ValueType.INT32, [*sizes, 0]),
        }

    def family_keys(self) -> dict[str, Value]:
        """Return how many layers take images from inside the vision model, which a file for images
        says, too.
        """
        vision = self.checkpoint.config.section("vision_config")
        layers = [] if vision is None else vision.integers("deepstack_visual_indexes", default=[])
        return {**super().family_keys(), "n_deepstack_layers": u32(len(layers))}


@register("Qwen3VLForConditionalGeneration")
class Qwen3VL(_ImagePositions, Qwen3):
    """Qwen3-VL without experts; GGUF `qwen3vl`."""

    gguf_name = "qwen3vl"
    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 128, "rope_theta": 5e5}


@register("Qwen3VLMoeForConditionalGeneration")
class Qwen3VLMoe(_ImagePositions, TransposedExperts, Qwen3Moe):
    """Qwen3-VL with experts; GGUF `qwen3vlmoe`."""

    gguf_name = "qwen3vlmoe"
    class_defaults: ClassVar[dict[str, object]] = {"rope_theta": 5e5}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        # Published checkpoints have transposed experts, those that transformers 5 saves do not.
        # One of the two tensors of a layer tells, as n_ff and 2 n_ff cannot both be n_embd.
        ff, d = self.n_ff_expert, self.n_embd
        usual = {"down_proj": (d, ff)} if ff != d else {"gate_up_proj": (2 * ff, d)}
        self.are_transposed = not any(
            tensor.shape[1:] == shape
            for part, shape in usual.items()
            for name, tensor in checkpoint.tensors.items()
            if name.endswith(f".experts.{part}")
        )
