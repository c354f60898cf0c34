"""Compare weighted errors of trellis types with the reference's, and a GPU's bytes with the CPU's,
as Markdown tables.

    python benchmarks/trellis.py [--device cuda]

Root mean square errors relative to the source, weighted by the importances (im), of the values that
matrix products use. The reference data is needed: IQFORGE_SHARED or ../shared.
"""

from __future__ import annotations

import argparse

import numpy as np
from iqforge.formats.codecs.codec import decode
from iqforge.quantize.encode import encode
from iqforge.quantize.report.timing import sample_rows
from iqforge.quantize.search.trellis.tree import CODEBOOKS
from rmse import GOLDEN


def error(name: str, x: np.ndarray, rows: np.ndarray, w: np.ndarray) -> float:
    """Return the weighted relative error of encoded rows."""
    y = decode(name, rows, x.shape[1], as_weights=True)
    return float(np.sqrt((w * (x - y) ** 2.0).sum() / (w * x**2.0).sum()))


def main() -> None:
    """Encode the sources in every trellis type, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device")
    device = parser.parse_args().device
    sources = np.load(GOLDEN / "sources.npz")
    cases = [(case, imp) for case in ("gauss", "student", "real") for imp in ("no", "im")]
    print(
        "| type | "
        + " | ".join(f"{case} {imp}" for case, imp in cases)
        + " | mean ratio |\n|"
        + "---|" * (len(cases) + 2)
    )
    for name in CODEBOOKS:
        golden, cells, logs = np.load(GOLDEN / f"{name}.npz"), [], []
        for case, imp in cases:
            x, im = sources[case], sources["im"] if imp == "im" else None
            w = np.ones(1024) if im is None else im.astype(np.float64)
            ours, theirs = (
                error(name, x, encode(name, x, im, device or "cpu"), w),
                error(name, x, golden[f"q_{case}_{imp}"], w),
            )
            logs.append(np.log(ours / theirs))
            cells.append(f"{ours:.5f} / {theirs:.5f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {np.exp(np.mean(logs)):.3f} |", flush=True)
    if not device:
        return
    print(
        "\n| type | groups with another word or scale | error, device | error, CPU | ratio"
        " |\n|---|---|---|---|---|"
    )
    for name, book in CODEBOOKS.items():
        x, im = sample_rows(64, 4096, seed=5)
        rows = [encode(name, x, im, device), encode(name, x, im, threads=4)]
        # in units of each row's own d, which depends on all groups of the row
        values = [decode(name, r, 4096) / np.ascontiguousarray(r[:, :4]).view("<f4") for r in rows]
        apart = (
            (np.abs(values[0] - values[1]) > 1e-3 * np.abs(values[1]) + 1e-6)
            .reshape(64, -1, book.dim)
            .any(axis=2)
            .mean()
        )
        errors = [error(name, x, r, im.astype(np.float64)) for r in rows]
        print(
            f"| {name} | {100 * apart:.2f} % | {errors[0]:.6f} | {errors[1]:.6f} |"
            f" {errors[0] / errors[1]:.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
