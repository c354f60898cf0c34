"""Small GGUF models for tests of the runtime, and a forward pass in plain numpy to compare the
runtime with.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from iqforge.formats.codecs import codec
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import Source, TensorInfo
from iqforge.formats.types import ggml_type

# Matrices that products do not read as they are.
_WITHOUT_SCALE = re.compile(
    "token_embd|attn_[kv]_b$|attn_output_a$|_ape$|conv1d|shortconv.conv|ssm_norm"
)


def write_gguf(
    path: Path,
    source: Source,
    type_of=lambda tensor: "F32",
    metadata: dict | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write `source` with floats encoded again as `type_of(tensor)` says, and integers as they are.
    `metadata` replaces keys (None removes), `drop` leaves out tensors.
    """
    merged = {
        key: value
        for key, value in (source.metadata | (metadata or {})).items()
        if value is not None
    }
    kept = [tensor for tensor in source.tensors if tensor.name not in drop]
    targets = [
        tensor if tensor.type.is_integer else tensor.with_type(ggml_type(type_of(tensor)))
        for tensor in kept
    ]
    with GGUFWriter(path, merged, targets) as writer:
        for tensor, target in zip(kept, targets):
            rows = source.read_rows(tensor, 0, tensor.n_rows)
            writer.write(
                target,
                (
                    rows
                    if target.type is tensor.type
                    else encode(target.type, codec.decode(tensor.type, rows, tensor.n_cols))
                ),
            )
    return path


def scaled_gguf(path: Path, source: Source) -> Path:
    """Write `source` in float32 with a scale, a power of two, beside every matrix that can have
    one. Divided by it, the matrix multiplies as before.
    """
    scales: dict[str, np.ndarray] = {}
    names = {t.name for t in source.tensors}
    for number, t in enumerate(source.tensors):
        name = t.name.removesuffix(".weight")
        is_matrix = len(t.shape) > 1 and name != t.name and not t.type.is_integer
        if is_matrix and f"{name}.scale" not in names and not _WITHOUT_SCALE.search(name):
            exponents = (np.arange(t.shape[0] if len(t.shape) == 3 else 1) + number) % 5 - 2
            scales[name] = np.exp2(exponents).astype(np.float32)
    targets = [t if t.type.is_integer else t.with_type(ggml_type("F32")) for t in source.tensors]
    targets += [TensorInfo(f"{n}.scale", x.shape, ggml_type("F32")) for n, x in scales.items()]
    with GGUFWriter(path, dict(source.metadata), targets) as writer:
        for t, target in zip(source.tensors, targets, strict=False):
            rows = source.read_rows(t, 0, t.n_rows)
            if t.type.is_integer:
                writer.write(target, rows)
                continue
            x = codec.decode(t.type, rows, t.n_cols)
            scale = scales.get(t.name.removesuffix(".weight"))
            if scale is not None:
                x = (x.reshape(len(scale), -1) / scale[:, None]).reshape(x.shape)
            writer.write(target, encode(target.type, x))
        for target, x in zip(targets[len(source.tensors) :], scales.values(), strict=True):
            writer.write(target, encode(target.type, x[None]))
    return path


def one_tensor_per_expert(path: Path, source: Source) -> Path:
    """Write `source` as old files are: `ffn_up.3.weight` is the fourth matrix of
    `ffn_up_exps.weight`.
    """
    pieces = []
    for t in source.tensors:
        data = source.read_rows(t, 0, t.n_rows)
        if t.n_matrices == 1:
            pieces.append((t, data))
            continue
        for expert, part in enumerate(np.split(data, t.n_matrices)):
            name = t.name.replace("_exps", f".{expert}")
            pieces.append((TensorInfo(name, t.shape[1:], t.type), part))
    with GGUFWriter(path, source.metadata, [t for t, _ in pieces]) as writer:
        for t, data in pieces:
            writer.write(t, data)
    return path


def encode(type, x: np.ndarray) -> np.ndarray:
    if type.is_float:
        return codec.encode_float(type, x)
    from iqforge.quantize.encode import encode as quantize

    return quantize(type, x)


class PlainForward:
    """Llama and Qwen3-MoE in float64 numpy, directly from the definitions, row by row where that is
    simplest.
    """

    def __init__(self, path: Path):
        with open_gguf(path) as source:
            self.arch = source.metadata["general.architecture"].data
            self.keys = {key: value.data for key, value in source.metadata.items()}
            self.w = {
                t.name: (
                    codec.decode(t.type, np.array(source.read_rows(t, 0, t.n_rows)), t.n_cols)
                    .reshape(t.shape)
                    .astype(np.float64)
                )
                for t in source.tensors
            }

    def key(self, name: str):
        return self.keys[f"{self.arch}.{name}"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self.key("attention.layer_norm_rms_epsilon")
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.w[f"{name}.weight"].reshape(-1)
        )

    def rope(self, x: np.ndarray) -> np.ndarray:
        """Rotate [tokens, heads, head size] as complex numbers."""
        head = x.shape[-1]
        angle = np.arange(len(x))[:, None, None] * self.key("rope.freq_base") ** (
            -2 * np.arange(head // 2) / head
        )
        if self.arch == "llama":
            turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
            return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
        turned = (x[..., : head // 2] + 1j * x[..., head // 2 :]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(self, x: np.ndarray, at: str) -> np.ndarray:
        heads, kv = self.key("attention.head_count"), self.key("attention.head_count_kv")
        q, k, v = (x @ self.w[f"{at}.attn_{part}.weight"].T for part in "qkv")
        q, k, v = q.reshape(len(x), heads, -1), k.reshape(len(x), kv, -1), v.reshape(len(x), kv, -1)
        if f"{at}.attn_q_norm.weight" in self.w:
            q, k = self.norm(q, f"{at}.attn_q_norm"), self.norm(k, f"{at}.attn_k_norm")
        q, k = self.rope(q), self.rope(k)
        out = np.zeros((len(x), heads, v.shape[-1]))
        for t in range(len(x)):
            for h in range(heads):
                g = h // (heads // kv)
                s = k[: t + 1, g] @ q[t, h] / np.sqrt(q.shape[-1])
                p = np.exp(s - s.max())
                out[t, h] = p / p.sum() @ v[: t + 1, g]
        return out.reshape(len(x), -1) @ self.w[f"{at}.attn_output.weight"].T

    def moe(self, x: np.ndarray, at: str) -> np.ndarray:
        y = np.zeros_like(x)
        for t, row in enumerate(x):
            logits = self.w[f"{at}.ffn_gate_inp.weight"] @ row
            p = np.exp(logits - logits.max())
            best = np.argsort(-p, kind="stable")[: self.key("expert_used_count")]
            for e in best:
                gate, up = (
                    self.w[f"{at}.ffn_{part}_exps.weight"][e] @ row for part in ("gate", "up")
                )
                y[t] += (
                    p[e]
                    / p[best].sum()
                    * (self.w[f"{at}.ffn_down_exps.weight"][e] @ (gate / (1 + np.exp(-gate)) * up))
                )
        return y

    def __call__(self, tokens: list[int]) -> np.ndarray:
        h = self.w["token_embd.weight"][tokens]
        for layer in range(self.key("block_count")):
            at = f"blk.{layer}"
            h = h + self.attention(self.norm(h, f"{at}.attn_norm"), at)
            x = self.norm(h, f"{at}.ffn_norm")
            if f"{at}.ffn_gate_inp.weight" in self.w:
                h = h + self.moe(x, at)
            else:
                gate, up = (x @ self.w[f"{at}.ffn_{part}.weight"].T for part in ("gate", "up"))
                h = h + gate / (1 + np.exp(-gate)) * up @ self.w[f"{at}.ffn_down.weight"].T
        return (
            self.norm(h, "output_norm") @ self.w.get("output.weight", self.w["token_embd.weight"]).T
        )
