"""`iqforge kernels`: what there is to compile for CUDA devices, what is compiled, and compiling it
ahead of time.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import time

from ..errors import UsageError
from .compile.nvrtc import ARCHITECTURES, KernelSpec, cache_folder, need_cuda_core
from .registry import build, cached_bytes, clear, missing, unchecked


def configure(parser: argparse.ArgumentParser) -> None:
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
            "only see that what is not compiled yet compiles: several times as fast, and "
            "no code is kept"
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
    if args.jobs < 1:
        raise UsageError("--jobs needs a number above 0")
    if args.clear + args.build + args.check > 1 or (args.clear and (args.names or args.arch)):
        raise UsageError(
            "--clear, --build and --check exclude one another; --clear takes no names and no --arch"
        )
    if args.build or args.check:
        need_cuda_core()
    if args.clear:
        count, n_bytes = clear()
        print(f"removed {count} compiled modules, {n_bytes / 2**20:.1f} MiB, from {cache_folder()}")
        return 0
    specs = chosen_specs(args.names, api.kernel_specs())
    archs = architectures(args.arch, needed=args.build or args.check)
    if args.check:
        _compile(unchecked((spec for _, spec in specs), archs), args.jobs, "checked", check=True)
    if args.build:
        _compile(missing((spec for _, spec in specs), archs), args.jobs, "compiled")
    print_table(specs, archs)
    return 0


def chosen_specs(
    names: list[str], specs: list[tuple[str, KernelSpec]]
) -> list[tuple[str, KernelSpec]]:
    """Return the (module, spec) pairs whose names match one of the patterns. UsageError for a
    pattern that matches none.
    """
    for name in names:
        if not any(fnmatch.fnmatchcase(spec.name, name) for _, spec in specs):
            raise UsageError(f"no kernel is named '{name}'")
    return [
        (module, spec)
        for module, spec in specs
        if not names or any(fnmatch.fnmatchcase(spec.name, name) for name in names)
    ]


def architectures(asked: str | None, *, needed: bool) -> list[str]:
    """Return the architectures that `--arch` names; without it those of the devices here, or else,
    if they are not `needed`, all. UsageError for others.
    """
    if asked:
        names: list[str] = list(ARCHITECTURES) if asked == "all" else asked.split(",")
        if wrong := [name for name in names if not re.fullmatch(r"sm_\d{2,3}", name)]:
            raise UsageError(f"'{wrong[0]}' is not an architecture; they are spelled as sm_90")
        return names
    import torch

    if torch.cuda.is_available():
        from .compile.launch import architecture

        return sorted({architecture(device) for device in range(torch.cuda.device_count())})
    if needed:
        raise UsageError(
            "there is no CUDA device here: say with --arch for which architecture to compile"
        )
    return list(ARCHITECTURES)


def _compile(
    wanted: list[tuple[KernelSpec, str]], jobs: int, done: str, *, check: bool = False
) -> None:
    from tqdm import tqdm

    start = time.perf_counter()
    with tqdm(total=len(wanted), unit="module", disable=None, file=sys.stderr) as bar:
        for _ in build(wanted, jobs, check=check):
            bar.update()
    print(f"{done} {len(wanted)} modules in {time.perf_counter() - start:.1f} s")


def print_table(specs: list[tuple[str, KernelSpec]], archs: list[str]) -> None:
    """One line per spec: its module, how many kernels it has, and per architecture the size of the
    compiled code.
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
