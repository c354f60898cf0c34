"""Compare the KL divergence of types chosen for a size with that of every preset, as Markdown
tables.

    iqforge convert CHECKPOINT --outfile MODEL.gguf --outtype bf16
    iqforge imatrix -m MODEL.gguf -f wiki.valid.txt -o MODEL.dat --chunks 100
    iqforge sensitivity -m MODEL.gguf -f wiki.valid.txt --imatrix MODEL.dat --chunks 16 \\
        -o MODEL.json
    python benchmarks/budget.py MODEL.gguf --imatrix MODEL.dat --damage MODEL.json \\
        --text wiki.test.txt --work FOLDER

Tensors are quantized once per type, kept in FOLDER and put into one loaded model in turn, which
gives the logits of the file that `iqforge quantize` would write (tests/test_budget.py compares the
two). Results are kept there too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import iqforge
import numpy as np
from iqforge.errors import IqforgeError
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.types import ggml_type
from iqforge.imatrix.files.load import load_imatrix
from iqforge.quantize.plan.budget import (
    DEFAULT_TYPES,
    DRAFT,
    SAMPLED_ROWS,
    candidates,
    fit_types,
    is_free,
)
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.plan.roles import ModelFacts
from iqforge.quantize.plan.sensitivity import Sensitivities
from iqforge.quantize.report.probe import encode_tensor
from iqforge.runtime.evaluate.divergence import measure_divergence
from iqforge.runtime.evaluate.perplexity import measure_perplexity

# Types for models that are trained for them.
TERNARY = (
    "TQ1_0",
    "TQ2_0",
    "IQ1_BN",
    "IQ2_BN",
    "Q1_0_G128",
    "Q2_0",
    "NVFP4",
    "MXFP4",
)
BUDGETS = (2.5, 3.0, 3.5, 4.0, 5.0)
Plan = dict[str, str]  # types of the tensors that change


class Laboratory:
    """One model in which plans are tried, with the results so far."""

    def __init__(self, model, imatrix: str, text: str, chunks: int, work: str):
        self.model, self.imatrix, self.work = model, load_imatrix(imatrix), work
        self.tensors = {tensor.name: tensor for tensor in model.source.tensors}
        self.base, self.results = (
            os.path.join(work, f"base-{chunks}.kld"),
            os.path.join(work, f"results-{chunks}.json"),
        )
        self.current: Plan = {}
        if not os.path.exists(self.base):
            with open(text, encoding="utf-8") as file:
                measure_perplexity(
                    model, file.read().removesuffix("\n"), chunks=chunks, save_logits=self.base
                )
        self.known = {}
        if os.path.exists(self.results):
            with open(self.results, encoding="utf-8") as file:
                self.known = json.load(file)

    def size(self, plan: Plan) -> int:
        """Return the number of bytes of all tensors."""
        return sum(
            t.with_type(ggml_type(plan.get(t.name) or t.type.name)).n_bytes
            for t in self.tensors.values()
        )

    @property
    def n_elements(self) -> int:
        """Return the number of elements of all tensors that get a type."""
        return sum(tensor.n_elements for tensor in self.tensors.values())

    def blocks(self, name: str, type: str) -> np.ndarray:
        """Return a tensor in a type, uint8[rows, row bytes], from its file in the work folder."""
        path, tensor, kind = (
            os.path.join(self.work, f"{name}-{type}.npy"),
            self.tensors[name],
            ggml_type(type),
        )
        if not os.path.exists(path):
            out = np.empty((tensor.n_rows, kind.row_bytes(tensor.n_cols)), dtype=np.uint8)
            encode_tensor(
                self.model.source, tensor, kind, self.imatrix.importance(name, tensor.shape), out
            )
            np.save(path, out)
        return np.load(path, mmap_mode="r")

    def kld(self, plan: Plan) -> float:
        """Return the mean KL divergence of the model with the types of a plan."""
        key = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.known:
            for name in self.current.keys() - plan.keys():
                self.model.weights.store.restore(name)
            for name, type in plan.items():
                if self.current.get(name) != type:
                    self.model.weights.store.replace(name, ggml_type(type), self.blocks(name, type))
            self.current = dict(plan)
            self.known[key] = measure_divergence(self.model, self.base).mean_kld
            with open(self.results, "w", encoding="utf-8") as file:
                json.dump(self.known, file)
        return self.known[key]


def presets(laboratory: Laboratory, names: list[str]) -> list[tuple[str, int, float]]:
    """Return (name, bytes, divergence), by size; presets that the model cannot have are left
    out.
    """
    found = []
    for name in names:
        try:
            planned = iqforge.api.plan_quantization(
                laboratory.model.source, name, laboratory.imatrix
            )
        except IqforgeError as error:
            print(f"{name}: {error}")
            continue
        plan = {p.source.name: p.target.type.name for p in planned if not p.kept}
        found.append((name, laboratory.size(plan), laboratory.kld(plan)))
        print("{}: {} bytes, {:.5f}".format(*found[-1]), flush=True)
    return sorted(found, key=lambda row: row[1])


class Chooser:
    """Choose types as `iqforge.recipe_for_target` does, with the errors measured once for all
    sizes.
    """

    def __init__(self, laboratory: Laboratory, path: str):
        source, self.laboratory = laboratory.model.source, laboratory
        self.draft = iqforge.api.plan_quantization(source, DRAFT, laboratory.imatrix)
        free = [plan.source for plan in self.draft if is_free(plan)]
        report = iqforge.quantize_stats(path, DEFAULT_TYPES, laboratory.imatrix, rows=SAMPLED_ROWS)
        self.stats = [
            found
            for name in (tensor.name for tensor in free)
            for found in report.tensors
            if found.tensor.name == name
        ]
        for found in self.stats:
            allowed = candidates(found.tensor, found.weighted, report.types, False)
            found.errors = {type.name: found.errors[type.name] for type in allowed}
        self.free, self.facts = free, ModelFacts.of(source.metadata, source.tensors)

    def choose(self, budget: int, damage: str | None) -> tuple[Plan, float]:
        """Return the types for a number of bytes, and the divergence predicted for them."""
        sensitivities = (
            Sensitivities.load(damage, self.free, self.facts)
            if damage
            else Sensitivities.of_roles(self.free, self.facts)
        )
        fitted = fit_types(Recipe(DRAFT), self.draft, self.stats, sensitivities, budget)
        return dict(fitted.recipe.tensor_types), fitted.predicted_kld


def main() -> None:
    """Compare plans for sizes with presets, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--imatrix", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument(
        "--damage", help="measured sensitivities; without it only those by role are tried"
    )
    parser.add_argument("--work", required=True)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument(
        "--preset",
        action="append",
        dest="presets",
        help="default: all that quantize and are not interleaved or ternary",
    )
    parser.add_argument(
        "--same-size", action="append", default=[], help="presets whose exact sizes are targets too"
    )
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    names = args.presets or [
        name
        for name, kind in FILE_TYPES.items()
        if kind.base.is_quantized
        and not kind.base.is_interleaved
        and kind.base.name not in TERNARY
        and name not in ("Q3_K", "Q4_K", "Q5_K")
    ]
    ways = [("roles", None)] + ([("measured", args.damage)] if args.damage else [])
    with iqforge.load_model(args.model) as model:
        laboratory = Laboratory(model, args.imatrix, args.text, args.chunks, args.work)
        rows, n = presets(laboratory, names), laboratory.n_elements
        chooser = Chooser(laboratory, args.model)

        def ours(budget: int) -> list[tuple[int, float, float]]:
            tried = []
            for way, damage in ways:
                plan, predicted = chooser.choose(budget, damage)
                tried.append((laboratory.size(plan), predicted, laboratory.kld(plan)))
                size, _, kld = tried[-1]
                print(
                    f"{8 * budget / n:.4f} {way}: {8 * size / n:.4f} bpw, {kld:.5f} (predicted"
                    f" {predicted:.5f})",
                    flush=True,
                )
            return tried

        lines = []
        for bpw in BUDGETS:
            tried = ours(int(bpw * n / 8))
            best = min(
                (row for row in rows if row[1] <= bpw * n / 8), key=lambda row: row[2], default=None
            )
            better = next((row for row in rows if row[2] < tried[-1][2]), None)
            lines.append([str(bpw), *_cells(tried, n), _preset(best, n), _preset(better, n)])
        same = []
        for name, size, kld in rows:
            if name in args.same_size:
                tried = ours(size)
                same.append(
                    [
                        name,
                        f"{8 * size / n:.3f}",
                        f"{kld:.5f}",
                        *_cells(tried, n),
                        f"{tried[-1][2] / kld:.3f}",
                    ]
                )
    print()
    _table(
        [
            "target bpw",
            *(f"{c}, {way}" for way, _ in ways for c in ("bpw", "predicted", "mean KLD")),
            "best preset not larger",
            "smallest preset with a smaller KLD",
        ],
        lines,
    )
    if same:
        _table(
            [
                "preset",
                "bpw",
                "mean KLD",
                *(f"{c}, {way}" for way, _ in ways for c in ("bpw", "predicted", "mean KLD")),
                "ratio",
            ],
            same,
        )
    _table(
        ["preset", "bytes of tensors", "bpw", "mean KLD"],
        [[name, str(size), f"{8 * size / n:.3f}", f"{kld:.5f}"] for name, size, kld in rows],
    )


def _cells(tried: list[tuple[int, float, float]], n: int) -> list[str]:
    return [
        cell
        for size, predicted, kld in tried
        for cell in (f"{8 * size / n:.4f}", f"{predicted:.5f}", f"{kld:.5f}")
    ]


def _preset(row: tuple[str, int, float] | None, n: int) -> str:
    return "none" if row is None else f"{row[0]} ({8 * row[1] / n:.3f} bpw): {row[2]:.5f}"


def _table(heads: list[str], rows: list[list[str]]) -> None:
    print(
        "\n"
        + "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])
    )


if __name__ == "__main__":
    main()
