"""Measure the speed and peak resident memory of converting a synthetic bf16 checkpoint, compared
with copying its files on the same disk.

    python benchmarks/convert.py --gigabytes 8 --largest 2 --dir /data --outtype bf16

Writes a Llama checkpoint of safetensors shards (random values, an embedding of --largest GB) with a
small vocabulary, then runs `cp` and `iqforge convert` on it, each in a separate process and
followed by a sync, alternately --rounds times. --reference COMMAND runs another converter in the
same rounds; {model}, {out} and {outtype} are filled in.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.types import ggml_type
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

N_EMBD, N_FF, HEADS, N_KV_HEADS = 4096, 14336, 32, 8
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def shapes(total_bytes: int, largest_bytes: int) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Return (tensors, layers, vocabulary) of about total_bytes in bf16, of which the embedding
    takes largest_bytes.
    """
    n_vocab = max(1024, largest_bytes // 2 // N_EMBD)
    kv = N_EMBD // HEADS * N_KV_HEADS
    layer = {
        "input_layernorm": (N_EMBD,),
        "post_attention_layernorm": (N_EMBD,),
        "self_attn.q_proj": (N_EMBD, N_EMBD),
        "self_attn.k_proj": (kv, N_EMBD),
        "self_attn.v_proj": (kv, N_EMBD),
        "self_attn.o_proj": (N_EMBD, N_EMBD),
        "mlp.gate_proj": (N_FF, N_EMBD),
        "mlp.up_proj": (N_FF, N_EMBD),
        "mlp.down_proj": (N_EMBD, N_FF),
    }
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    n_layers = max(1, round((total_bytes - largest_bytes) / layer_bytes))
    tensors = {"model.embed_tokens.weight": (n_vocab, N_EMBD)}
    for number in range(n_layers):
        tensors |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return tensors | {"model.norm.weight": (N_EMBD,)}, n_layers, n_vocab


def write_checkpoint(
    folder: Path, total_bytes: int, largest_bytes: int, shard_bytes: int = 4 << 30
) -> int:
    """Write a checkpoint. Return the bytes of tensor data."""
    tensors, n_layers, n_vocab = shapes(total_bytes, largest_bytes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": N_EMBD,
        "intermediate_size": N_FF,
        "num_hidden_layers": n_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "vocab_size": n_vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in tensors.items():
        if (
            groups[-1]
            and 2 * sum(int(np.prod(s)) for s in [*groups[-1].values(), shape]) > shard_bytes
        ):
            groups.append({})
        groups[-1][name] = shape
    random = np.random.default_rng(1)
    tile = encode_float(
        ggml_type("BF16"),
        random.standard_normal((1024, N_EMBD), dtype=np.float32) * np.float32(0.02),
    ).reshape(-1)
    owners, total = {}, 0
    for number, group in enumerate(groups):
        file = folder / f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        header, position = {}, 0
        for name, shape in group.items():
            size = 2 * int(np.prod(shape))
            header[name] = {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            owners[name], position = file.name, position + size
        text = json.dumps(header).encode()
        with open(file, "wb") as output:
            output.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, position, tile.size):
                output.write(tile[: min(tile.size, position - start)].data)
        total += position
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": owners})
    )
    return total


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE vocabulary without merges: the bytes and two control tokens."""
    bos, eos = "<|begin|>", "<|end|>"
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[bos, eos],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))


def measure(command: list[str], out: Path) -> tuple[float, int, float]:
    """Return (seconds until the output is on the disk, peak resident bytes, CPU seconds) of a
    command that must succeed.
    """
    if out.exists():
        out.unlink()
    os.sync()
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with status {status}")
    with open(out, "rb") as file:
        os.fsync(file.fileno())
    return time.monotonic() - started, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Write the checkpoint, run the commands in turn, and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument(
        "--largest", type=float, default=2, help="bytes of the largest tensor, in GB"
    )
    parser.add_argument("--outtype", nargs="+", default=["bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--reference",
        metavar="COMMAND",
        help="another converter; {model}, {out} and {outtype} are filled in",
    )
    parser.add_argument(
        "--dir", default=None, help="where the files go: twice the size of the model"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name) / "model"
        folder.mkdir()
        size, out = (
            write_checkpoint(folder, int(args.gigabytes * 1e9), int(args.largest * 1e9)),
            Path(name) / "out.gguf",
        )
        shards = shlex.join(map(str, sorted(folder.glob("*.safetensors"))))
        for outtype in args.outtype:
            commands = {
                "copy": ["sh", "-c", f"cat {shards} > {out}"],
                f"iqforge {outtype}": [
                    sys.executable,
                    "-m",
                    "iqforge",
                    "convert",
                    str(folder),
                    "--outfile",
                    str(out),
                    "--outtype",
                    outtype,
                ],
            }
            if args.reference:
                commands[f"reference {outtype}"] = shlex.split(
                    args.reference.format(model=folder, out=out, outtype=outtype)
                )
            rounds = [
                {label: measure(command, out) for label, command in commands.items()}
                for _ in range(args.rounds)
            ]
            for label in commands:
                runs = [results[label] for results in rounds]
                seconds = sorted(run[0] for run in runs)
                median = seconds[len(seconds) // 2]
                print(
                    f"{label:>18}: {size / 1e9:.2f} GB read, median {median:6.2f} s of"
                    f" {', '.join(f'{s:.2f}' for s in seconds)}: {size / median / 1e6:6.0f} MB/s;"
                    f" peak resident {max(run[1] for run in runs) / 1e6:.0f} MB, CPU"
                    f" {min(run[2] for run in runs):.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
