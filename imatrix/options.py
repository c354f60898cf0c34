"""Options of importance matrices: collecting, merging, cold experts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..formats.options import Options, option
from ..runtime.text_options import ChunkOptions

METHODS = ("prior", "neighbours", "all-experts", "none")  # for cold experts
WEIGHTINGS = ("tokens", "calls")
DEFAULT_LEAST = 128  # tokens below which an expert counts as cold
DEFAULT_PRIOR_TOKENS = 32.0
_LAYOUTS = ("dat", "gguf")


@dataclass(frozen=True)
class FileOptions(Options):
    """The layout of a file that is written."""

    output_format: str | None = option(
        None,
        "--output-format",
        choices=_LAYOUTS,
        help="layout of OUT (default: gguf if it ends in .gguf, else dat)",
    )


@dataclass(frozen=True)
class ConvertFileOptions(FileOptions):
    """How a file is written in another layout; see `iqforge.convert_imatrix`."""

    chunk_size: int | None = option(
        None,
        "--chunk-size",
        kind=int,
        metavar="N",
        help="tokens of a call, which is what a .dat file counts (default: 512)",
    )


@dataclass(frozen=True)
class CoverageOptions(Options):
    """Which experts count as cold; see `iqforge.imatrix_coverage`."""

    min_tokens: int = option(
        DEFAULT_LEAST, "--min-tokens", least=0, metavar="N", help="experts that saw fewer are cold"
    )


@dataclass(frozen=True)
class ColdOptions(FileOptions):
    """Options for experts that saw few tokens, and for the layout of the file."""

    weighting: str = option(
        "tokens",
        "--in-weighting",
        choices=WEIGHTINGS,
        help="count a call of a .dat file as -c tokens (tokens), or as one token, as ik_llama.cpp"
        " does (calls)",
    )
    cold_experts: str = option(
        "none",
        "--cold-experts",
        choices=METHODS,
        help="what to write for cold experts: prior (the default with a text) mixes the mean of"
        " their layer into what they saw, neighbours the mean of the experts with the nearest"
        " router rows; all-experts shows every token to every expert while collecting; none writes"
        " what they saw, and ones for those that saw nothing",
    )
    min_tokens: int = option(
        DEFAULT_LEAST,
        "--coverage",
        least=0,
        metavar="N",
        help="experts that saw fewer than N tokens are cold; they are named at the end",
    )
    force: bool = option(False, "--force", help="add files that seem to belong to another model")
    prior_tokens: float = option(
        DEFAULT_PRIOR_TOKENS,
        "--prior-tokens",
        metavar="K",
        help="how many tokens the mean that is mixed into cold experts counts as",
    )


@dataclass(frozen=True)
class MergeOptions(ColdOptions):
    """Options for adding up importance matrices."""

    weights: tuple[float, ...] | None = option(
        None,
        "--in-weight",
        kind=float,
        many=True,
        metavar="W",
        help="count the --in-file at the same place W times (repeatable)",
    )
    chunk_size: int | None = option(None, kind=int)


@dataclass(frozen=True)
class CollectOptions(ChunkOptions, ColdOptions):
    """Options for collecting an importance matrix."""

    cold_experts: str = option("prior", choices=METHODS)
    from_chunk: int = option(
        0,
        "--chunk",
        "--from-chunk",
        least=0,
        metavar="N",
        help="leave out the first N chunks",
    )
    text_weights: tuple[float, ...] | None = option(None, kind=float, many=True)
    parse_special: bool = option(
        False, "--parse-special", help="read the text of a control token as that token"
    )
    process_output: bool = option(False, "--process-output", help="include the output matrix")
    output_name: str = option(
        "output.weight", "--output-tensor-name", metavar="NAME", help="name of the output matrix"
    )
    compute_perplexity: bool = option(
        True, "--no-ppl", off=True, help="do not compute the running perplexity"
    )
    in_files: tuple[Any, ...] = option(
        (),
        "--in-file",
        kind=object,
        many=True,
        metavar="F",
        help="add to this importance matrix, .dat or .gguf (repeatable)",
    )
    in_weights: tuple[float, ...] | None = option(None, kind=float, many=True)
    output_frequency: int | None = option(
        None,
        "-ofreq",
        "--output-frequency",
        kind=int,
        metavar="N",
        help="write OUT, and OUT.resume to resume from, after every N chunks; 0: only at the end"
        " (default: 10, at most once a minute)",
    )
    save_frequency: int = option(
        0, "--save-frequency", metavar="N", help="keep a copy OUT.at_CHUNKS every N chunks"
    )
    resume: bool = option(
        False, "--resume", help="resume an interrupted run of the same command, if there is one"
    )


@dataclass(frozen=True)
class SensitivityOptions(ChunkOptions):
    """Options for measuring how sensitive a model is to errors in its tensors."""

    chunks: int = option(16)
    layers: int = option(
        1,
        "--layers",
        least=1,
        metavar="N",
        help="replace a tensor of N layers at a time: faster, but less precise",
    )
    types: tuple[str, ...] = option((), kind=str, many=True)
    force: bool = option(
        False, "--force", help="use an importance matrix that seems to belong to another model"
    )
