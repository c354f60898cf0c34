"""Facts that a choice of types depends on: figures of the model from its metadata, and which
tensors may be quantized.

Rules search names for parts: `attn_k` is also in `attn_kv_b`, `ffn_down` also in `ffn_down_exps`.
The rules decide which parts are searched in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT, PER_LAYER_EMBEDDING, TOKEN_EMBEDDING, TensorName
from ...formats.values import Value
from .mix_rules import RuleSet
from .presets import IK

# Looked up row by row, so never interleaved.
NEVER_INTERLEAVED = (TOKEN_EMBEDDING, PER_LAYER_EMBEDDING)

# Kept where the architecture has them; elsewhere the name means nothing.
_PROTECTED_IN = {
    "position_embd.weight": (
        "bert",
        "codeshell",
        "gpt2",
        "mpt",
        "nomic-bert",
        "nomic-bert-moe",
        "starcoder",
    ),
    "token_types.weight": ("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe"),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts that rules need about a model. Numbers that its metadata lacks are 0.

    heads_per_kv: query heads for each key and value head, in layer 0. tied: there is no output
    matrix, and the embedding serves as one.
    """

    architecture: str = ""
    n_layers: int = 0
    n_experts: int = 0
    heads_per_kv: int = 0
    size_class: str = ""
    big_vocabulary: bool = False
    tied: bool = False
    n_values: int = 0  # tensors that hold value projections

    @classmethod
    def of(
        cls,
        metadata: Mapping[str, Value],
        tensors: Sequence[TensorInfo],
        value_parts: Sequence[str] = (),
    ) -> ModelFacts:
        """Collect the facts of a model with this metadata (GGUF keys) and these tensors, of
        which those with one of value_parts in their names hold value projections.
        """
        architecture = (
            metadata["general.architecture"].data if "general.architecture" in metadata else ""
        )

        def number(key: str, otherwise: int = 0) -> int:
            found = metadata.get(f"{architecture}.{key}")
            first = (
                None
                if found is None
                else (
                    (found.data[0] if found.data else None)
                    if isinstance(found.data, list)
                    else found.data
                )
            )
            return int(first) if isinstance(first, (int, float)) else otherwise

        layers, heads = number("block_count"), number("attention.head_count")
        kv_heads = number("attention.head_count_kv", heads)
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocabulary = (
            len(tokens.data)
            if tokens is not None and isinstance(tokens.data, list)
            else number("vocab_size")
        )
        size = _size_class(
            architecture, layers, vocabulary, heads != kv_heads, number("embedding_length")
        )
        names = [tensor.name for tensor in tensors]
        return cls(
            architecture,
            layers,
            number("expert_count"),
            heads // kv_heads if kv_heads else 0,
            size,
            vocabulary >= 127999 and size in ("8B", "70B"),
            OUTPUT not in names,
            sum(any(part in name for part in value_parts) for name in names),
        )


def _size_class(architecture: str, layers: int, vocabulary: int, grouped: bool, width: int) -> str:
    """Return "8B", "70B" or "": the size classes of ik_llama.cpp's rules, detected as it does."""
    if layers == 80 and (
        architecture in ("qwen2", "deci", "olmo") or (architecture == "llama" and grouped)
    ):
        return "70B"
    eight = {
        "llama": layers == 36 or (layers == 32 and vocabulary >= 40000 and vocabulary != 49152),
        "qwen3": layers == 36 and width != 2560,
        "qwen3vl": layers == 36 and width != 2560,
        "cohere2": layers == 32,
        "mistral3": layers == 34,
    }
    return "8B" if eight.get(architecture) else ""


def is_candidate(
    tensor: TensorInfo, architecture: str = "", routers: bool = False, rules: RuleSet = IK
) -> bool:
    """Return whether a quantization run may change the type of this tensor. routers: also of expert
    routers.

    Protected tensors are tiny, and everything after them depends on their exact values.
    """
    dims = sum(
        1 for i, n in enumerate(tensor.shape) if n > 1 or any(m > 1 for m in tensor.shape[:i])
    )
    return (
        tensor.name.endswith("weight")
        and dims >= 2
        and not tensor.type.is_integer
        and not any(
            part in tensor.name
            for part in (*rules.protected, *rules.protected_in.get(architecture, ()))
        )
        and (routers or not TensorName.parse(tensor.name).is_router)
        and architecture not in _PROTECTED_IN.get(tensor.name, ())
    )


def layer_of(name: str, n_layers: int) -> int:
    """Return the layer in a tensor's name. Raise UsageError if there is none, or the model lacks
    it.
    """
    layer = TensorName.parse(name).layer
    if layer is None:
        raise UsageError(
            "the preset's rules need a layer number, and the name has none", tensor=name
        )
    if layer >= n_layers:
        raise UsageError(
            f"is of layer {layer}, but the model's metadata says {n_layers} layers", tensor=name
        )
    return layer
