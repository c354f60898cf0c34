"""Options of `iqforge auto`: the target, the texts, and what the types are chosen from. Imports
nothing heavy.
"""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..formats.options import Options, option


@dataclass(frozen=True)
class Target:
    """The size of the result: bytes of the file, bits per weight, or the memory of a GPU (bytes)
    that it has to fit with a context of `context` tokens. Exactly one is given.
    """

    size: str | int | None = None
    bpw: float | None = None
    gpu: str | int | None = None
    context: int = 8192

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.size, self.bpw, self.gpu)) != 1:
            raise UsageError("give one target: a size, bits per weight, or the memory of a GPU")

    @property
    def label(self) -> str:
        """Return what the name of the file says about the target."""
        if self.bpw is not None:
            return f"{self.bpw:g}bpw"
        return f"{self.size}" if self.gpu is None else f"fit{self.gpu}"


@dataclass(frozen=True)
class AutoOptions(Options):
    """What `iqforge.auto_model` makes, from which texts. Exactly one of target_size, target_bpw and
    fit_gpu is given.
    """

    target_size: str | int | None = option(
        None, "--target-size", metavar="SIZE", help="a file of at most 12G, 11.5GiB, .."
    )
    target_bpw: float | None = option(
        None, "--target-bpw", kind=float, metavar="X", help="X bits per weight"
    )
    fit_gpu: str | int | None = option(
        None,
        "--fit-gpu",
        metavar="SIZE",
        help="a file that fits a GPU with this much memory, 24GiB, with a context of --context",
    )
    context: int = option(
        8192,
        "--context",
        least=1,
        metavar="N",
        help="tokens of the cache that --fit-gpu leaves memory for (default: 8192)",
    )
    texts: Sequence[str | os.PathLike] = option(
        (),
        "-f",
        "--file",
        kind=str,
        many=True,
        metavar="TEXT",
        help="calibration text (repeatable; default: the one that comes with iqforge)",
    )
    tests: Sequence[str | os.PathLike] = option(
        (),
        "--test",
        kind=str,
        many=True,
        metavar="TEXT",
        help="text to measure on (repeatable; default: the last fifth of every calibration text,"
        " which is then not calibrated with)",
    )
    n_ctx: int = option(
        512, "-c", "--ctx-size", least=4, metavar="N", help="tokens per chunk, 4 or more"
    )
    chunks: int = option(
        -1,
        "--chunks",
        least=-1,
        metavar="N",
        help="calibrate with at most N chunks of each text (default: all)",
    )
    test_chunks: int = option(
        20,
        "--test-chunks",
        least=-1,
        metavar="N",
        help="measure on at most N chunks of each text (default: 20; -1: all)",
    )
    types: Sequence[str] = option(
        (),
        "--target-types",
        kind=str,
        many=True,
        commas=True,
        metavar="T,..",
        help="types to choose from (default: most plain types)",
    )
    damage: str | os.PathLike | None = option(
        None,
        "--damage",
        metavar="F",
        help="how much each tensor matters, as measured by iqforge sensitivity (default: measure"
        " it here)",
    )
    sensitivity: bool = option(
        True,
        "--no-sensitivity",
        off=True,
        help="do not measure how much each tensor matters, but take what is usual for its role, as"
        " for models of more than a billion parameters",
    )
    name: str | None = option(
        None, "--model-name", kind=str, metavar="NAME", help="name in the file and of the files"
    )
    clean: bool = option(
        False, "--clean", help="remove the unquantized model and other work at the end"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and (os.sep in self.name or self.name in ("", ".", "..")):
            raise UsageError(f"the name '{self.name}' cannot be that of a file")

    @property
    def target(self) -> Target:
        """The size that was asked for, in one of its forms."""
        return Target(self.target_size, self.target_bpw, self.fit_gpu, self.context)


TARGETS = ("target_size", "target_bpw", "fit_gpu")
