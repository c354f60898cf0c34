"""Compare relative quantization errors with the reference's, on its own sources, as a Markdown
table.

    python benchmarks/rmse.py

Root mean square errors relative to the source, weighted by the importances where there are any
(im). With a ratio below 1, ours is smaller. The reference data is needed: IQFORGE_SHARED or
../shared.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import iqforge
import numpy as np
from iqforge.formats.types import ggml_type
from iqforge.quantize.searches import encodable_types

GOLDEN = (
    Path(os.environ.get("IQFORGE_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))
    / "golden"
)


def main() -> None:
    """Encode the sources in every type, and print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sources = np.load(GOLDEN / "sources.npz")
    cases = [(case, imp) for case in ("gauss", "student", "real") for imp in ("no", "im")]
    print(
        "| type | "
        + " | ".join(f"{case} {imp}: ours / reference" for case, imp in cases)
        + " | mean ratio |"
    )
    print("|---" * (len(cases) + 2) + "|")
    for name in encodable_types():
        type = ggml_type(name)
        if not type.is_quantized or (type.is_interleaved and type.base) or type.group_rows > 8:
            # interleaved rows are those of the plain type; 16 rows are not in every source
            continue
        golden, cells, logs = np.load(GOLDEN / f"{name}.npz"), [], []
        for case, imp in cases:
            x = sources[case]
            w = sources["im"] if imp == "im" else np.ones(x.shape[1], dtype=np.float32)
            if f"q_{case}_{imp}" not in golden:
                cells.append("-")
                continue
            rows = iqforge.encode(name, x, w if imp == "im" else None), golden[f"q_{case}_{imp}"]
            ours, theirs = (
                np.sqrt(
                    (w * (x - iqforge.decode(name, r, x.shape[1], as_weights=True)) ** 2).sum(
                        dtype=np.float64
                    )
                    / (w * x * x).sum(dtype=np.float64)
                )
                for r in rows
            )
            logs.append(np.log(ours / theirs))
            cells.append(f"{ours:.5f} / {theirs:.5f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {np.exp(np.mean(logs)):.3f} |")


if __name__ == "__main__":
    main()
