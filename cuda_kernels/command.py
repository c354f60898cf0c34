"""`iqforge kernels`: list the kernels for CUDA devices and what is compiled, and compile them ahead
of time.
"""

from __future__ import annotations

import argparse
import os
import time

from ..errors import UsageError
from ..formats.commands.progress import Meter
from .compile.nvrtc import cache_folder, need_cuda_core
from .compile.spec import ARCHITECTURES, KernelSpec
from .registry import architectures, cached_bytes, chosen_specs


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge kernels` to its parser."""
    parser.description = (
        "List and compile CUDA kernels. A kernel is compiled when it is first used and then kept in"
        " a cache. This command also compiles kernels ahead of time, which needs the package"
        " cuda-core (pip install 'iqforge[cuda]') but no CUDA toolkit and no device. The matrix"
        " products and the attention of a decoding step depend on a model's sizes: one size of each"
        " type and kind is listed here, and others are compiled when a model needs them."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="only kernels whose names match; * stands for anything",
    )
    parser.add_argument(
        "--arch",
        metavar="ARCH[,ARCH]",
        help="architectures such as sm_90; 'all' for "
        + ", ".join(ARCHITECTURES)
        + " (default: that of the devices here)",
    )
    parser.add_argument("--build", action="store_true", help="compile what is not compiled yet")
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "only check that kernels that are not compiled yet compile; several times as fast, "
            "and no code is kept"
        ),
    )
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that compile (default: %(default)s)",
    )
    parser.add_argument("--clear", action="store_true", help="remove everything that is compiled")


def run(args: argparse.Namespace, api) -> int:
    """List, compile, check or clear kernels, and return 0. Raise UsageError for flags that exclude
    each other, and for --jobs below 1.
    """
    if args.jobs < 1:
        raise UsageError("--jobs needs a number above 0")
    if args.clear + args.build + args.check > 1 or (args.clear and (args.names or args.arch)):
        raise UsageError(
            "--clear, --build and --check exclude one another; --clear takes no names and no --arch"
        )
    if args.build or args.check:
        need_cuda_core()
    if args.clear:
        count, n_bytes = api.clear_kernels()
        print(f"removed {count} compiled modules, {n_bytes / 2**20:.1f} MiB, from {cache_folder()}")
        return 0
    specs = chosen_specs(args.names, api.kernel_specs())
    archs = architectures(asked_architectures(args.arch), needed=args.build or args.check)
    if args.check or args.build:
        _compile(args, archs, api)
    print_table(specs, archs)
    return 0


def asked_architectures(text: str | None) -> list[str]:
    """Return the architectures that `--arch` names; none without it."""
    if not text:
        return []
    return list(ARCHITECTURES) if text == "all" else text.split(",")


def _compile(args: argparse.Namespace, archs: list[str], api) -> None:
    start = time.perf_counter()
    what = "checking" if args.check else "compiling"
    with Meter(f"{what} kernels", unit=" modules") as meter:
        made = api.build_kernels(
            args.names, archs, check=args.check, processes=args.jobs, progress=meter.reach
        )
    done = "checked" if args.check else "compiled"
    print(f"{done} {len(made)} modules in {time.perf_counter() - start:.1f} s")


def print_table(specs: list[tuple[str, KernelSpec]], archs: list[str]) -> None:
    """Print a line per spec: its module, the number of kernels and, per architecture, the size of
    the compiled code.
    """
    cells, total, done = [["name", "of", "kernels", *archs]], 0, 0
    for module, spec in specs:
        sizes = [cached_bytes(spec, arch) for arch in archs]
        total += sum(size or 0 for size in sizes)
        done += sum(size is not None for size in sizes)
        shown = [
            f"{size / 1024:.0f} KiB" if size else "-" if spec.target(arch) else "n/a"
            for size, arch in zip(sizes, archs, strict=True)
        ]
        cells.append([spec.name, module, str(len(spec.functions)), *shown])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        left, right = zip(row[:2], widths[:2], strict=True), zip(row[2:], widths[2:], strict=True)
        print(
            "  ".join(
                [
                    *(cell.ljust(width) for cell, width in left),
                    *(cell.rjust(width) for cell, width in right),
                ]
            )
        )
    wanted = sum(spec.target(arch) is not None for _, spec in specs for arch in archs)
    print(f"{done} of {wanted} modules are compiled, {total / 2**20:.1f} MiB in {cache_folder()}")
