"""Which stored tensors belong to the text model, and their names in it."""

from __future__ import annotations

# Buffers that old checkpoints store; runtimes compute them.
_DROPPED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")

# Prefixes of tensors that do not belong to the text model of a multimodal checkpoint (one with a
# `text_config`), without a leading `model.`.
_OTHER_MODALITIES = (
    "vision_tower.",
    "vision_model.",
    "vision_encoder.",
    "visual.",
    "vision_embed_tokenizer.",
    "multi_modal_projector.",
    "mm_projector.",
    "patch_merger.",
    "vit_large_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "mm_soft_emb_norm.",
)


def is_dropped(name: str) -> bool:
    """Return whether a tensor of the text model is a buffer that runtimes compute."""
    return name.endswith(_DROPPED_SUFFIXES)


def name_in_text_model(name: str) -> str | None:
    """Return the name without the prefix of the text model in a multimodal checkpoint; None for
    tensors of other modalities.
    """
    if name.removeprefix("model.").startswith(_OTHER_MODALITIES):
        return None
    return name.replace("language_model.", "", 1)
