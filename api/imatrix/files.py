"""Load, merge, convert and compare files of importance matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, printable
from ...formats.options import checks_keywords, from_keywords
from ..source import PathLike, loaded_imatrix

if TYPE_CHECKING:
    from ...imatrix.compare import Comparison
    from ...imatrix.coverage import Coverage
    from ...imatrix.data import Imatrix
    from ...imatrix.options import (
        ConvertFileOptions,
        CoverageOptions,
        MergeOptions,
    )
    from ...imatrix.statistics import TensorStatistics


@checks_keywords
def load_imatrix(path: PathLike) -> Imatrix:
    """Return the importance matrix in a file, of either layout."""
    from ...imatrix.files.load import load_imatrix as load

    return load(path)


def merge_imatrices(
    files: Sequence[PathLike | Imatrix],
    out: PathLike | None = None,
    *,
    options: MergeOptions | None = None,
    **keywords: Any,
) -> Imatrix:
    """Add up importance matrices of one model, of either layout, and write the sum to `out` unless
    that is None.

    keywords: fields of `imatrix.options.MergeOptions`. weights: how many times each counts (1).
    chunk_size: tokens of a chunk, which is what a `.dat` file counts; by default that of the first
    `.gguf` file, else 512. weighting: "tokens", or "calls" as ik_llama.cpp adds them, see
    `imatrix.merge`. cold_experts: "prior" mixes into experts that saw fewer than `min_tokens`
    tokens what the others saw, see `collect_imatrix`; "none" (default) does not.
    """
    from ...formats.output import refuse_same_file
    from ...imatrix.belongs import check_same_model
    from ...imatrix.cold_experts import fill_cold_experts
    from ...imatrix.files.load import output_format_of, save_imatrix
    from ...imatrix.merge import DEFAULT_CHUNK, as_tokens
    from ...imatrix.merge import merge_imatrices as merge
    from ...imatrix.options import MergeOptions

    [o] = from_keywords(merge_imatrices, keywords, (MergeOptions, options))
    parts = [loaded_imatrix(file) for file in files]
    check_same_model(parts, force=o.force)
    merged = merge(parts, o.weights, chunk_size=o.chunk_size, weighting=o.weighting)
    if out is not None:
        refuse_same_file(out, [part.path for part in parts if part.path])
        if output_format_of(out, o.output_format) == "gguf":
            merged = as_tokens(merged, o.chunk_size or DEFAULT_CHUNK)
    merged = fill_cold_experts(
        merged, o.cold_experts, least=o.min_tokens, prior_tokens=o.prior_tokens
    )
    if out is not None:
        save_imatrix(merged, out, o.output_format)
    return merged


def convert_imatrix(
    src: PathLike,
    out: PathLike,
    output_format: str | None = None,
    *,
    options: ConvertFileOptions | None = None,
    **keywords: Any,
) -> Imatrix:
    """Write the importance matrix `src` in the layout of `output_format` ("dat", "gguf"), or that
    of the name `out`, and return it.

    keywords: fields of `imatrix.options.ConvertFileOptions`, which win over `options`. chunk_size:
    tokens of a call, which is all that a `.dat` file counts (512). Raise UsageError for one that
    contradicts a `.gguf` file.
    """
    from ...formats.output import refuse_same_file
    from ...imatrix.files.load import output_format_of, save_imatrix
    from ...imatrix.merge import DEFAULT_CHUNK, as_tokens
    from ...imatrix.options import ConvertFileOptions

    keywords = keywords if output_format is None else keywords | {"output_format": output_format}
    [o] = from_keywords(convert_imatrix, keywords, (ConvertFileOptions, options))
    chunk_size = o.chunk_size
    refuse_same_file(out, [src])
    imatrix = loaded_imatrix(src)
    if chunk_size is not None and (
        chunk_size < 2 or (not imatrix.counts_calls and chunk_size != imatrix.chunk_size)
    ):
        of_file = (
            ""
            if imatrix.counts_calls
            else f"; {printable(src)} has chunks of {imatrix.chunk_size} tokens"
        )
        raise UsageError(f"the chunk size is {chunk_size}, expected at least 2 tokens{of_file}")
    if output_format_of(out, o.output_format) == "gguf":
        imatrix = as_tokens(imatrix, chunk_size or DEFAULT_CHUNK)
    save_imatrix(imatrix, out, o.output_format)
    return imatrix


@checks_keywords
def compare_imatrices(a: PathLike | Imatrix, b: PathLike | Imatrix) -> Comparison:
    """Return cosine and relative difference of every entry of two importance matrices of one model,
    the worst first; see `imatrix.compare`.
    """
    from ...imatrix.compare import compare

    return compare(loaded_imatrix(a), loaded_imatrix(b))


def imatrix_coverage(
    imatrix: PathLike | Imatrix,
    min_tokens: int | None = None,
    *,
    options: CoverageOptions | None = None,
    **keywords: Any,
) -> Coverage:
    """Count the tokens that each expert saw; those with fewer than `min_tokens` (128) are cold. See
    `imatrix.coverage`.
    """
    from ...imatrix.coverage import measure_coverage
    from ...imatrix.options import CoverageOptions

    keywords = keywords if min_tokens is None else keywords | {"min_tokens": min_tokens}
    [o] = from_keywords(imatrix_coverage, keywords, (CoverageOptions, options))
    return measure_coverage(loaded_imatrix(imatrix), o.min_tokens)


@checks_keywords
def imatrix_statistics(imatrix: PathLike | Imatrix) -> list[TensorStatistics]:
    """Return figures of every entry, by kind of tensor. See `imatrix.statistics`, also for figures
    of layers.
    """
    from ...imatrix.statistics import tensor_statistics

    return tensor_statistics(loaded_imatrix(imatrix))
