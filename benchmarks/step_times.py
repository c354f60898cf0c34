"""Where the time of a step's launches goes: when the warps of each product and router of the last
layer pass certain points, by the device's timer.

    python benchmarks/step_times.py qwen3-30b-a3b:IQ4_K,layers=12 llama-8b:IQ4_K,layers=8

Kernels are compiled with stamps (cuda_kernels/sources/units/stamps.cuh), in every run of this
command, and steps take a little longer. Prints a table in Markdown for each model: microseconds
from the end of the preceding product or router to the median of all warps; `latest end` is that of
the last warp. The output projection counts from the end of its own wait, as attention has no
stamps. Gate and up of experts have their input before the wait for the router. All are medians of
--runs steps.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

BLOCKS, WARPS, POINTS = 1024, 16, 8
# As in stamps.cuh.
WAIT_ENDED, INPUT_THERE, INPUT_READY, REQUESTED, WEIGHTS_THERE, FIRST_ITEM, ENDED = range(7)
COLUMNS = {
    "wait ended": WAIT_ENDED,
    "input there": INPUT_THERE,
    "input ready": INPUT_READY,
    "weights requested": REQUESTED,
    "weights there": WEIGHTS_THERE,
    "first row": FIRST_ITEM,
    "end": ENDED,
}
MOST_KERNELS = 32


class Stamps:
    """Memory for the stamps of each kernel, which `of` compiles it with."""

    def __init__(self, device: torch.device):
        shape = MOST_KERNELS, BLOCKS, WARPS * POINTS
        self.times = torch.zeros(shape, dtype=torch.int32, device=device)
        self.kernels: dict[str, tuple[int, int]] = {}  # name: place, warps

    def of(self, spec_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return `spec_of`, whose kernels have stamps."""

        @functools.cache
        def stamped(*arguments: Any, **options: Any) -> Any:
            spec = spec_of(*arguments, **options)
            warps = int(dict(spec.defines).get("WARPS", 4))  # a router has 4
            place, _ = self.kernels.setdefault(spec.name, (len(self.kernels), warps))
            address = self.times[place].data_ptr()
            return replace(spec, defines=(*spec.defines, ("STAMPS", f"{address:#x}ull")))

        return stamped


@dataclass(frozen=True)
class Launch:
    """The stamps of a kernel's last launch in one run: nanoseconds [blocks, warps, points] from a
    time that all launches share, NaN where there is none.
    """

    name: str
    times: np.ndarray

    def at(self, point: int, pick: Callable[[np.ndarray], Any] = np.nanmedian) -> float:
        """Return the time of a point, of the warps that passed it; NaN if none did."""
        found = self.times[:, :, point]
        return float(pick(found)) if np.isfinite(found).any() else float("nan")


def launches_of(stored: np.ndarray, kernels: dict[str, tuple[int, int]]) -> list[Launch]:
    """Return the launches of the last layer in the order in which their waits ended. stored:
    int32[kernels, blocks, warps * points], 0 without a stamp.
    """
    found, start = [], stored.reshape(-1)[np.flatnonzero(stored)[0]]
    for name, (place, warps) in kernels.items():
        stamps = stored[place].reshape(-1)[: BLOCKS * warps * POINTS].reshape(BLOCKS, warps, POINTS)
        since = (stamps - start).astype(np.float64)  # modulo 2^32, like the timer
        found.append(Launch(name, np.where(stamps == 0, np.nan, since)))
    found = [launch for launch in found if np.isfinite(launch.times).any()]
    return sorted(found, key=lambda launch: launch.at(WAIT_ENDED))


def rows_of(launches: list[Launch]) -> dict[str, list[float]]:
    """Return, by kernel, the microseconds of COLUMNS and of the latest end."""
    rows, before = {}, None
    for launch in launches:
        begin = before
        if begin is None or launch.at(WAIT_ENDED) - begin > 3000:  # attention is in between
            begin = launch.at(WAIT_ENDED)
        points = [launch.at(point) for point in COLUMNS.values()]
        before = launch.at(ENDED, np.nanmax)
        rows[launch.name] = [(time - begin) / 1000 for time in (*points, before)]
    return rows


def measure(model: str, device: torch.device, runs: int, n_gen: int) -> dict[str, np.ndarray]:
    """Return, by kernel in order, the medians of `rows_of` over steps of a model."""
    import iqforge
    from iqforge.cuda_kernels.matvec import experts, products
    from iqforge.cuda_kernels.step import router

    stamps = Stamps(device)
    originals = [(module, "product_spec") for module in (products, experts)]
    originals.append((router, "router_spec"))
    kept = [(module, name, getattr(module, name)) for module, name in originals]
    for module, name, function in kept:
        setattr(module, name, stamps.of(function))
    try:
        seen = []
        with iqforge.random_model(model, device=str(device), ubatch=512) as opened:
            for _ in range(runs + 2):
                iqforge.benchmark_model(opened, prompts=[], generations=[n_gen], repetitions=1)
                torch.cuda.synchronize(device)
                seen.append(rows_of(launches_of(stamps.times.cpu().numpy(), stamps.kernels)))
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
    seen = seen[2:]  # graphs are captured in the first ones
    names = [name for name in seen[0] if all(name in rows for rows in seen)]
    return {name: np.nanmedian([rows[name] for rows in seen], axis=0) for name in names}


def main() -> None:
    """Measure the models and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="SHAPE:TYPE[,layers=N]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens of a run")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found")
    device = torch.device(args.device)
    for model in args.models:
        print(f"\n{model}, {torch.cuda.get_device_name(device)}\n")
        print(f"| kernel | {' | '.join(COLUMNS)} | latest end |")
        print(f"| --- |{' --- |' * (len(COLUMNS) + 1)}")
        for name, times in measure(model, device, args.runs, args.n_gen).items():
            cells = ["" if np.isnan(time) else f"{time:.2f}" for time in times]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
