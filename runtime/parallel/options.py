"""Options of splitting a model over devices. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...formats.options import Options, option
from .modes import DEFAULT_TIMEOUT, EXPERT_CHOICES, MODES, REDUCE_TYPES


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `LoadOptions` has these
class SplitOptions(Options):
    """How a model is split over devices, and what moves between them."""

    split_mode: str | None = option(
        None,
        "-sm",
        "--split-mode",
        choices=MODES,
        metavar="MODE",
        help="graph: a part of every layer on each GPU, one process per GPU; layer: some whole"
        " layers on each, for slow links; data: the whole model on each, with other chunks of a"
        " text; none: one GPU (default); row, attn and tensor mean graph",
    )
    tensor_split: str | Sequence[float] | None = option(
        None,
        "-ts",
        "--tensor-split",
        kind=str,
        metavar="A,B,..",
        help="shares of the GPUs, such as 3,1 (default: equal); with --device cpu and -sm graph,"
        " layer or data so many processes",
    )
    main_gpu: int | None = option(
        None,
        "-mg",
        "--main-gpu",
        kind=int,
        least=0,
        metavar="N",
        help="the GPU of the first rank, and of a model on one GPU",
    )
    max_gpu: int | None = option(
        None, "--max-gpu", kind=int, least=1, metavar="N", help="use at most N GPUs"
    )
    reduce_type: str | None = option(
        None,
        "-grt",
        "--graph-reduce-type",
        choices=REDUCE_TYPES,
        metavar="TYPE",
        help="what moves between GPUs for the sums of prompts: f32, bf16, f16 or q8_0 (default: as"
        " --precision); generated tokens move in f32",
    )
    split_experts: str | None = option(
        None,
        "--split-experts",
        choices=EXPERT_CHOICES,
        metavar="HOW",
        help="with -sm graph, give ranks hidden columns of all experts, or whole experts: columns,"
        " whole or auto, whatever is predicted to be faster (default: auto)",
    )
    timeout: float = option(
        DEFAULT_TIMEOUT,
        "--timeout",
        least=1,
        metavar="SECONDS",
        help="end a rank that waits so long for another one",
    )
