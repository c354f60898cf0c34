"""Time a fresh process from its start to the first generated token, stage by stage.

    iqforge bench --synthetic llama-8b:IQ4_K --write /dev/shm/model.gguf
    python benchmarks/loading.py /dev/shm/model.gguf

A row for each of --runs processes, in seconds: the interpreter and torch, the runtime, the CUDA
context, opening the file, the weights, executors, and the first token of a prompt. Read the file
once before, so that it is in the page cache, and use the second row and later ones: the first
process may compile kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

STAGES = ("torch", "runtime", "context", "open", "weights", "executors", "token")


def stages(path: str, n_prompt: int, began: float) -> dict[str, float]:
    """Return the seconds of every stage of this process, which began at `began`."""
    marks = [began]
    from iqforge.runtime.driver import start_driver

    start_driver("cuda")  # as the command line does
    import torch

    marks.append(time.time())
    from iqforge.runtime.cuda import engine  # noqa: F401
    from iqforge.runtime.model import load_model

    marks.append(time.time())
    torch.zeros(1, device="cuda")
    marks.append(time.time())
    model = load_model(path, "cuda")
    marks.append(time.time())
    model.load()
    torch.cuda.synchronize()
    marks.append(time.time())
    _ = model.engine
    marks.append(time.time())
    with model:
        state = model.new_state(n_prompt + 16)
        tokens = torch.arange(n_prompt) % min(model.n_vocab, 1000)
        int(model.extend(tokens, state).argmax())
        marks.append(time.time())
    return {
        name: later - earlier
        for name, earlier, later in zip(STAGES, marks, marks[1:], strict=False)
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--runs", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of it (default: 16)")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.began is not None:
        print(json.dumps(stages(args.model, args.prompt, args.began)), flush=True)
        os._exit(0)  # the end of a process is no part of its first token
    print(f"| run | {' | '.join(STAGES)} | all |\n|{'---|' * (len(STAGES) + 2)}")
    command = [sys.executable, __file__, args.model, "--prompt", str(args.prompt), "--began"]
    for run in range(1, args.runs + 1):
        done = subprocess.run(
            [*command, repr(time.time())], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        shown = " | ".join(f"{found[name]:.2f}" for name in STAGES)
        print(f"| {run} | {shown} | {sum(found.values()):.2f} |", flush=True)


if __name__ == "__main__":
    main()
