"""Perplexity of converted checkpoints, and transformers' on the same chunks of the same text.

    python benchmarks/architectures.py --text wiki.test.txt [--chunks 60] [--transformers] \\
        MODEL_DIR [MODEL_DIR ...]
    python benchmarks/architectures.py --logits FOLDER [FOLDER ...]

Every checkpoint is converted to --outtype (bf16) and evaluated on the CPU in float32, over --chunks
chunks of 512 tokens of which the second half is scored, as `iqforge perplexity` does. With
--transformers, its model class gets the same token ids, in float32 with eager attention and without
a cache. With --logits, every FOLDER has a checkpoint in `hf` and `logits.npz` (input_ids, logits);
the checkpoint is converted to f32, and the largest difference of logits is printed, for the whole
text at once and token by token. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import iqforge
import numpy as np
import torch
from iqforge.runtime.evaluate.chunks import Chunks
from iqforge.runtime.state.cache import CacheSettings
from torch.nn.functional import cross_entropy

N_CTX = 512


@torch.no_grad()
def transformers_perplexity(checkpoint: Path, chunks: Chunks) -> float:
    """Return what the checkpoint's own class predicts for the scored half of every chunk."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loss = 0.0
    for chunk in range(len(chunks)):
        logits = model(input_ids=chunks.inputs(chunk, chunk + 1), use_cache=False).logits[0]
        targets = torch.from_numpy(chunks.targets(chunk))
        loss += float(cross_entropy(logits[chunks.first : -1].float(), targets, reduction="sum"))
    return math.exp(loss / (len(chunks) * chunks.n_scored))


def compare_logits(folders: list[Path], work: Path) -> None:
    """Print how far converted checkpoints are from stored logits."""
    print("| checkpoint | architecture | at once | token by token |")
    print("|---|---|---|---|")
    for folder in folders:
        with np.load(folder / "logits.npz") as stored:
            tokens, expected = stored["input_ids"], stored["logits"]
        path = iqforge.convert_model(folder / "hf", work / "model.gguf", "f32")
        with iqforge.load_model(path) as model:
            state = model.new_state(len(tokens), CacheSettings("f32", "f32"))
            steps = np.stack([model.extend([token], state).numpy() for token in tokens])
            at_once = model.forward(tokens).numpy()
            far = [f"{np.abs(logits - expected).max():.1e}" for logits in (at_once, steps)]
            print(f"| {folder.name} | {model.architecture} | {far[0]} | {far[1]} |", flush=True)
        path.unlink()


def main() -> None:
    """Measure each checkpoint and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", metavar="MODEL_DIR", nargs="*", type=Path)
    parser.add_argument("--text", type=Path, help="UTF-8 text to evaluate")
    parser.add_argument("--chunks", type=int, default=60, help="(default: 60)")
    parser.add_argument("--outtype", default="bf16", help="(default: bf16)")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers")
    parser.add_argument("--logits", metavar="FOLDER", nargs="+", type=Path, default=[])
    args = parser.parse_args()
    if args.logits:
        with tempfile.TemporaryDirectory() as folder:
            compare_logits(args.logits, Path(folder))
        return
    if args.text is None or not args.models:
        parser.error("give --text and MODEL_DIR, or --logits")
    text = args.text.read_text(encoding="utf-8")
    print("| checkpoint | architecture | seconds | perplexity | transformers | difference |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in args.models:
            path = iqforge.convert_model(
                checkpoint, Path(folder, f"{checkpoint.name}.gguf"), args.outtype
            )
            with iqforge.load_model(path) as model:
                architecture = model.architecture
                start = time.perf_counter()
                found = iqforge.measure_perplexity(
                    model, args.text, n_ctx=N_CTX, chunks=args.chunks
                ).perplexity
                seconds = time.perf_counter() - start
                chunks = Chunks.of_text(model, text, N_CTX, args.chunks)
            theirs = difference = ""
            if args.transformers:
                expected = transformers_perplexity(checkpoint, chunks)
                theirs, difference = f"{expected:.4f}", f"{found - expected:+.4f}"
            print(
                f"| {checkpoint.name} | {architecture} | {seconds:.0f} | {found:.4f} | {theirs} |"
                f" {difference} |",
                flush=True,
            )
            path.unlink()


if __name__ == "__main__":
    main()
