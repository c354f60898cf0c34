"""Compare what `bench --write` writes with llama.cpp: log-probabilities of the whole vocabulary.

    python -m venv llama && llama/bin/pip install xllamacpp
    python benchmarks/written_shapes.py --python llama/bin/python mixtral-8x7b:Q8_0,layers=2

Writes each model of random weights to a temporary file (--folder), and evaluates the same eight
random tokens here, on the CPU in float32, and in llama.cpp, with a cache in float32. Prints
Markdown: whether the most probable token is one of the most probable ones here (random rows of an
output matrix repeat), and the differences of all log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import zlib
from pathlib import Path

import iqforge
import numpy as np
import torch

N_TOKENS = 8
# Runs in an environment with xllamacpp: FILE, the token ids as JSON, the size of the vocabulary.
LLAMA = """
import json, sys
import xllamacpp as x
p, n = x.CommonParams(), int(sys.argv[3])
p.model.path = sys.argv[1]
p.n_gpu_layers, p.n_parallel, p.warmup, p.fit_params, p.cache_ram_mib = 0, 1, False, False, 0
p.n_ctx = p.n_batch = p.n_ubatch = 512
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.no_extra_bufts = True
asked = {"prompt": json.loads(sys.argv[2]), "max_tokens": 1, "n_probs": n, "logprobs": n}
found = x.Server(p).handle_completions({**asked, "temperature": 0, "cache_prompt": False})
if "choices" not in found:
    sys.exit(json.dumps(found))
[first] = found["choices"][0]["logprobs"]["content"]
print("RESULT", json.dumps([[one["id"], one["logprob"]] for one in first["top_logprobs"]]))
"""


def of_llama(python: str, path: Path, ids: list[int], n_vocab: int) -> torch.Tensor:
    """Return log-probabilities float32[n_vocab], and raise RuntimeError with what was said."""
    words = [python, "-c", LLAMA, str(path), json.dumps(ids), str(n_vocab)]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"llama.cpp: {(done.stderr or done.stdout)[-2000:]}")
    found = torch.full((n_vocab,), float("nan"))
    for number, value in json.loads(lines[-1].removeprefix("RESULT ")):
        found[number] = value
    return found


def compared(spec: str, folder: Path, python: str) -> str:
    """Return a row of the table."""
    path = folder / "model.gguf"
    iqforge.write_random_model(spec, path)
    with iqforge.load_model(path, "cpu", precision="f32") as model:
        n = model.n_vocab
        ids = np.random.default_rng(zlib.crc32(spec.encode())).integers(300, n, N_TOKENS).tolist()
        own = model.forward(ids)[-1].float().log_softmax(-1)
    other = of_llama(python, path, ids, n)
    path.unlink()
    off, gap = other - own, float(own.max() - own[other.argmax()])
    same = "yes" if gap < 1e-6 else f"no, by {gap:.4f}"
    return f"| {spec} | {same} | {off.square().mean().sqrt():.4f} | {off.abs().max():.4f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--python", required=True, help="of an environment with xllamacpp")
    parser.add_argument("--folder", type=Path, help="for the files (default: temporary files)")
    args = parser.parse_args()
    print("| model | same most probable token | rms | most |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for spec in args.specs:
            print(compared(spec, Path(folder), args.python), flush=True)


if __name__ == "__main__":
    main()
