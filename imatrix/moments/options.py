"""Options of collecting second moments. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.options import option
from ...runtime.text_options import ChunkOptions


@dataclass(frozen=True)
class HessianOptions(ChunkOptions):
    """Options for collecting second moments; see `iqforge.collect_hessian`."""

    from_chunk: int = option(
        0,
        "--chunk",
        "--from-chunk",
        least=0,
        metavar="N",
        help="leave out the first N chunks",
    )
    parse_special: bool = option(
        False, "--parse-special", help="read the text of a control token as that token"
    )
    process_output: bool = option(False, "--process-output", help="include the output matrix")
    output_name: str = option(
        "output.weight", "--output-tensor-name", metavar="NAME", help="name of the output matrix"
    )
    experts: str = option(
        "each",
        "--experts",
        choices=("each", "layer"),
        help="statistics of gate and up of experts: one per expert (each), or one for all of a"
        " layer (layer), which takes less space; down always has one per expert",
    )
    correlations: str = option(
        "f32",
        "--correlations",
        choices=("f32", "bf16"),
        help="how the file stores correlations: bf16 halves it, and is precise enough with the"
        " shrinking that quantize applies",
    )
    output_frequency: int | None = option(
        None,
        "-ofreq",
        "--output-frequency",
        kind=int,
        metavar="N",
        help="write OUT.resume after every N chunks; 0: never (default: once a minute)",
    )
    resume: bool = option(
        False, "--resume", help="resume an interrupted run of the same command, if there is one"
    )
