"""Build small Hugging Face checkpoints for tests, so that a clone needs no other files.

Random weights from a fixed seed, a byte-level BPE tokenizer with the split pattern of Llama 3
trained on one paragraph. Row lengths are multiples of 256 by default, so that every type applies.
"""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from iqforge.convert.vocabulary.tiktoken import byte_letters
from iqforge.formats.codecs.codec import encode_float
from safetensors.numpy import save_file

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
PROSE = """A quantized model keeps most of what the original knows in a fraction of its memory. Each row of a matrix is cut into
blocks, each block gets a scale, and each weight of the block becomes a small integer; the error that this makes is weighed by how
strongly the inputs of that column are used. What the file says it is, the reader must be able to check before it believes it:
the number of tensors, their shapes and types, the place of every byte. 1 2 3 12 123 1234 -- def f(x): return x ** 2
"""  # noqa: E501 (the text is training data)


def make_tiny_llama(
    folder: Path,
    *,
    n_layers: int = 2,
    n_embd: int = 256,
    n_ff: int = 512,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_vocab: int = 320,
    tied: bool = False,
    dtype: str = "bf16",
    shards: int = 1,
    config: dict | None = None,
    seed: int = 0,
) -> Path:
    """Write a LlamaForCausalLM checkpoint into `folder`. `dtype` is bf16, f16 or f32; `config`
    entries override config.json (None removes).
    """
    head = head_dim or n_embd // n_heads
    random = _Weights(seed)
    tensors = {"model.embed_tokens.weight": random.matrix(n_vocab, n_embd)}
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}"
        tensors |= random.attention(prefix, n_embd, n_heads * head, n_kv_heads * head)
        tensors |= {
            f"{prefix}.mlp.gate_proj.weight": random.matrix(n_ff, n_embd),
            f"{prefix}.mlp.up_proj.weight": random.matrix(n_ff, n_embd),
            f"{prefix}.mlp.down_proj.weight": random.matrix(n_embd, n_ff),
        }
    tensors["model.norm.weight"] = random.norm(n_embd)
    if not tied:
        tensors["lm_head.weight"] = random.matrix(n_vocab, n_embd)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": n_ff,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **_sizes(n_layers, n_embd, n_heads, n_kv_heads, n_vocab, tied),
    }
    if head_dim:
        settings["head_dim"] = head_dim
    return _write(Path(folder), tensors, settings | (config or {}), dtype, shards)


def make_tiny_qwen3moe(
    folder: Path,
    *,
    n_layers: int = 2,
    n_embd: int = 256,
    n_ff: int = 512,
    n_ff_expert: int = 256,
    n_experts: int = 4,
    n_experts_used: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    n_vocab: int = 320,
    tied: bool = False,
    dtype: str = "bf16",
    shards: int = 1,
    stacked: bool = False,
    config: dict | None = None,
    seed: int = 0,
) -> Path:
    """Write a Qwen3MoeForCausalLM checkpoint. `stacked` writes the experts of a layer as two
    tensors, as transformers 5 does.
    """
    random = _Weights(seed)
    tensors = {"model.embed_tokens.weight": random.matrix(n_vocab, n_embd)}
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}"
        tensors |= random.attention(prefix, n_embd, n_heads * head_dim, n_kv_heads * head_dim)
        tensors |= {
            f"{prefix}.self_attn.q_norm.weight": random.norm(head_dim),
            f"{prefix}.self_attn.k_norm.weight": random.norm(head_dim),
            f"{prefix}.mlp.gate.weight": random.matrix(n_experts, n_embd),
        }
        experts = [
            {
                "gate": random.matrix(n_ff_expert, n_embd),
                "up": random.matrix(n_ff_expert, n_embd),
                "down": random.matrix(n_embd, n_ff_expert),
            }
            for _ in range(n_experts)
        ]
        if stacked:
            tensors[f"{prefix}.mlp.experts.gate_up_proj"] = np.stack(
                [np.concatenate([e["gate"], e["up"]]) for e in experts]
            )
            tensors[f"{prefix}.mlp.experts.down_proj"] = np.stack([e["down"] for e in experts])
        else:
            tensors |= {
                f"{prefix}.mlp.experts.{number}.{part}_proj.weight": values
                for number, expert in enumerate(experts)
                for part, values in expert.items()
            }
    tensors["model.norm.weight"] = random.norm(n_embd)
    if not tied:
        tensors["lm_head.weight"] = random.matrix(n_vocab, n_embd)
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": n_ff,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": n_ff_expert,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "head_dim": head_dim,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        **_sizes(n_layers, n_embd, n_heads, n_kv_heads, n_vocab, tied),
    }
    return _write(Path(folder), tensors, settings | (config or {}), dtype, shards)


class _Weights:
    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return (self._random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.1 * self._random.standard_normal(size)).astype(np.float32)

    def attention(self, prefix: str, n_embd: int, q: int, kv: int) -> dict[str, np.ndarray]:
        return {
            f"{prefix}.input_layernorm.weight": self.norm(n_embd),
            f"{prefix}.post_attention_layernorm.weight": self.norm(n_embd),
            f"{prefix}.self_attn.q_proj.weight": self.matrix(q, n_embd),
            f"{prefix}.self_attn.k_proj.weight": self.matrix(kv, n_embd),
            f"{prefix}.self_attn.v_proj.weight": self.matrix(kv, n_embd),
            f"{prefix}.self_attn.o_proj.weight": self.matrix(n_embd, q),
        }


def _sizes(
    n_layers: int, n_embd: int, n_heads: int, n_kv_heads: int, n_vocab: int, tied: bool
) -> dict:
    return {
        "num_hidden_layers": n_layers,
        "hidden_size": n_embd,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "vocab_size": n_vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _write(
    folder: Path, tensors: dict[str, np.ndarray], config: dict, dtype: str, shards: int
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None}, indent=1)
    )
    write_tokenizer(folder)
    names = list(tensors)
    groups = [
        names[number * len(names) // shards : (number + 1) * len(names) // shards]
        for number in range(shards)
    ]
    owners = {}
    for number, group in enumerate(groups):
        name = (
            "model.safetensors"
            if shards == 1
            else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        )
        write_safetensors(folder / name, {key: tensors[key] for key in group}, dtype)
        owners |= dict.fromkeys(group, name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": owners})
        )
    return folder


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "f32") -> None:
    """Write float32 arrays as a safetensors file of `dtype`. numpy has no bf16, so that is written
    by hand.
    """
    if dtype != "bf16":
        save_file(
            {
                name: values.astype({"f32": np.float32, "f16": np.float16}[dtype])
                for name, values in tensors.items()
            },
            path,
        )
        return
    header, data = {}, bytearray()
    for name, values in tensors.items():
        raw = encode_float("BF16", values.reshape(-1, values.shape[-1])).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """Return the tokenizer.json of a byte-level BPE with 300 tokens that puts BOS in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer.to_str()


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))


def write_ranks(folder: Path, lines: list[str] | None = None, **config) -> list[bytes]:
    """Write tiktoken.model from the tokens of the tiny tokenizer, single bytes first, then in the
    order of its merges.
    """
    model = json.loads(tokenizer_json())["model"]
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens = [bytes([byte]) for byte in range(256)] + [
        bytes(byte_of[letter] for letter in a + b) for a, b in pairs
    ]
    if lines is None:
        lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2"} | config))
    added = {
        str(len(tokens)): {"content": BOS, "special": True},
        str(len(tokens) + 2): {"content": EOS, "special": True},
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "added_tokens_decoder": added})
    )
    return tokens
