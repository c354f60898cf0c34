"""Measure matrix-vector kernels alone: each product of a layer, repeated over other weights in a
graph, and all layers in a chain.

    python benchmarks/matvec.py --shape llama-8b qwen3-30b-a3b --type IQ4_K Q4_K
    python benchmarks/matvec.py --try _STAGE_STEPS=4 --try _RING=40960
    IQFORGE_PDL=0 python benchmarks/matvec.py

--try sets constants of cuda_kernels/matvec/plan.py and specs.py; IQFORGE_PDL=0 turns off the
overlap of kernels. Prints microseconds and TB/s of weights. The chain has no attention, router or
sampling, and chooses the same few experts in turn.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.matvec import experts as matvec_experts
from iqforge.cuda_kernels.matvec import plan as matvec_plan
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.matvec import specs as matvec_specs
from iqforge.cuda_kernels.matvec.operands import Join
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.cuda_kernels.packed.repeat import repeat_rows
from iqforge.runtime.bench.random_blocks import random_rows
from iqforge.runtime.bench.shapes import SHAPES

EPS, EXPERT_SETS = 1e-5, 16


def matrix(type: str, rows: int, cols: int, n_matrices: int = 1) -> PackedMatrix:
    """Return a packed matrix of random blocks, whose rows repeat every 256."""
    first = pack_matrix(
        type, [random_rows(type, 256, cols, 0.02, np.random.default_rng([rows, cols]))], 256, cols
    )
    return repeat_rows(first, rows, n_matrices)


def zeros(*shape: int) -> torch.Tensor:
    """Return float32 zeros on the GPU."""
    return torch.zeros(*shape, device="cuda")


class Products:
    """The products of one layer, by name: functions of the layer's number, and their bytes of
    weights.
    """

    def __init__(self, shape_name: str, type: str):
        s = self.shape = SHAPES[shape_name]
        q_rows, kv_rows = s.n_heads * s.head, s.n_kv_heads * s.head
        # Layers with separate weights: more than L2 holds.
        n = self.n_layers = s.n_layers if not s.n_experts else 8
        self.h, self.norm = (
            torch.randn(1, s.width, device="cuda"),
            torch.rand(s.width, device="cuda") + 0.5,
        )
        q, k, v = zeros(1, q_rows), zeros(1, kv_rows), zeros(1, kv_rows)
        qkv = [
            [matrix(type, rows, s.width) for rows in (q_rows, kv_rows, kv_rows)] for _ in range(n)
        ]
        output = [matrix(type, s.width, q_rows) for _ in range(n)]
        # With norms after both halves of a block, products that begin one finish the other.
        streams, delta = (self.h, zeros(1, s.width)), torch.randn(1, s.width, device="cuda")
        join, back = (
            (
                Join(delta, self.norm, EPS, streams[1]),
                Join(delta, self.norm, EPS, self.h),
            )
            if s.post_norms
            else (None, None)
        )

        def add(x: torch.Tensor, m: PackedMatrix) -> None:
            if join is None:
                matvec.matvec_add(x, m, self.h)
            else:
                matvec.matvec_set(x, m, delta)

        self.run = {
            "qkv": lambda i: matvec.norm_matvec(
                self.h, self.norm, EPS, qkv[i % n], [q, k, v], join
            ),
            "output": lambda i: add(q, output[i % n]),
        }
        self.bytes = {"qkv": sum(m.nbytes for m in qkv[0]), "output": output[0].nbytes}
        gate, up, down = (
            [matrix(type, *size, max(s.n_experts, 1)) for _ in range(n)]
            for size in ((s.hidden, s.width), (s.hidden, s.width), (s.width, s.hidden))
        )
        used = (s.n_used / s.n_experts) if s.n_experts else 1
        if s.n_experts:
            ids = [
                torch.randperm(s.n_experts, device="cuda")[: s.n_used].int()[None]
                for _ in range(EXPERT_SETS)
            ]
            weights, hidden = (
                torch.full((1, s.n_used), 1 / s.n_used, device="cuda"),
                zeros(1, s.n_used, s.hidden),
            )
            self.run["gate_up"] = lambda i: matvec_experts.expert_gate_up(
                self.h, self.norm, EPS, gate[i % n], up[i % n], ids[i % EXPERT_SETS], hidden
            )
            self.run["down"] = lambda i: matvec_experts.expert_down_add(
                hidden, down[i % n], ids[i % EXPERT_SETS], weights, self.h
            )
        else:
            half = torch.float32 if gate[0].type.is_float else torch.bfloat16
            hidden = zeros(1, s.hidden).to(half)
            h = self.h if join is None else streams[1]
            gating = Gating("gelu" if s.architecture.startswith("gemma") else "silu")
            self.run["gate_up"] = lambda i: matvec.gate_up(
                h, self.norm, EPS, gate[i % n], up[i % n], hidden, back, gating
            )
            self.run["down"] = lambda i: add(hidden, down[i % n])
        self.bytes |= {"gate_up": used * 2 * gate[0].nbytes, "down": used * down[0].nbytes}
        head = matrix("Q8_0" if type == "Q8_0" or s.width % 256 else "Q6_K", s.n_vocab, s.width)
        logits = zeros(1, s.n_vocab)
        self.head, self.head_bytes = (
            lambda i: matvec.norm_matvec(self.h, self.norm, EPS, [head], [logits]),
            head.nbytes,
        )

    def token(self, _: int) -> None:
        """Compute the products of one token."""
        for layer in range(self.shape.n_layers):
            for product in self.run.values():
                product(layer)
        self.head(0)


def microseconds(launch, n: int) -> float:
    """Return the microseconds of one of n launches in a graph: the median of seven replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            launch(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / n)
    return sorted(times)[3]


def main() -> None:
    """Time the products of each shape and type, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["llama-8b"], choices=sorted(SHAPES))
    parser.add_argument("--type", nargs="+", default=["IQ4_K"])
    parser.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="in addition to the plan as it is",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    as_is = {
        (module, name): value
        for module in (matvec_plan, matvec_specs)
        for name, value in vars(module).items()
        if name.startswith("_") and isinstance(value, int)
    }
    for shape in args.shape:
        for type in args.type:
            products = Products(shape, type)
            for words in ("", *args.tries):
                changes = {
                    name: int(value)
                    for name, _, value in (word.partition("=") for word in words.split(",") if word)
                }
                if unknown := changes.keys() - {name for _, name in as_is}:
                    parser.error(f"plans and specs have no {', '.join(unknown)}")
                for (module, name), value in as_is.items():
                    setattr(module, name, changes.get(name, value))
                matvec_plan.plan.cache_clear()
                matvec_specs.product_spec.cache_clear()
                parts = {
                    name: (microseconds(run, 64), products.bytes[name])
                    for name, run in products.run.items()
                }
                parts["head"] = microseconds(products.head, 8), products.head_bytes
                layers = products.shape.n_layers
                whole = sum(b * (1 if name == "head" else layers) for name, (_, b) in parts.items())
                expected = sum(
                    t * (1 if name == "head" else layers) for name, (t, _) in parts.items()
                )
                chain = microseconds(products.token, 1)
                print(
                    f"{shape} {type} {words or 'as it is'}: chain {chain:.0f} us, {1e6 / chain:.0f}"
                    f" tokens/s, {whole / chain * 1e-6:.2f} TB/s; sum of parts {expected:.0f} us; "
                    + ", ".join(
                        f"{name} {t:.2f} us {b / t * 1e-6:.2f} TB/s"
                        for name, (t, b) in parts.items()
                    ),
                    flush=True,
                )
            del products
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
