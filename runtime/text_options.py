"""Options of evaluating a text, and of continuing one. Imports nothing heavy."""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats.options import Options, option

if TYPE_CHECKING:
    from .network.sampling import Sampling


@dataclass(frozen=True)
class ChunkOptions(Options):
    """How a text is cut into chunks and evaluated."""

    n_ctx: int = option(512, "-c", "--ctx-size", metavar="N", help="tokens per chunk")
    chunks: int = option(
        -1, "--chunks", metavar="N", help="evaluate at most N chunks (default: all)"
    )
    batch_tokens: int = option(
        2048, "-b", "--batch-size", least=1, metavar="N", help="tokens per pass, in whole chunks"
    )

    def tokens_per_pass(self, ubatch: int | None = None) -> int:
        """Return `batch_tokens`, or `ubatch` if that is less; never less than a chunk."""
        return max(self.n_ctx, min(self.batch_tokens, ubatch or self.batch_tokens))


@dataclass(frozen=True)
class PerplexityOptions(ChunkOptions):
    """What is measured besides perplexity."""

    kl_divergence_base: str | os.PathLike | None = option(
        None,
        "--kl-divergence-base",
        "--save-all-logits",
        metavar="F",
        help="file with the base model's predictions",
    )
    kl_divergence: bool = option(
        False, "--kl-divergence", help="compare with the base file instead of writing it"
    )
    ppl_stride: int = option(
        0,
        "--ppl-stride",
        least=0,
        metavar="N",
        help="score only the last N tokens of windows that begin every N tokens",
    )


@dataclass(frozen=True)
class GenerateOptions(Options):
    """How text is generated."""

    n: int | None = option(
        None,
        "-n",
        "--predict",
        "--n-predict",
        kind=int,
        metavar="N",
        help="generate at most N tokens; -1: until the context is full (default: 128, if they fit)",
    )
    context: int = option(
        0,
        "-c",
        "--ctx-size",
        least=0,
        metavar="N",
        help="most tokens in all, prompt included (default: as many as needed)",
    )
    temperature: float = option(
        0.8,
        "--temp",
        "--temperature",
        metavar="T",
        help="0: always the most probable token",
    )
    top_k: int = option(40, "--top-k", metavar="K", help="the K best tokens, 0: all")
    top_p: float = option(
        0.95, "--top-p", metavar="P", help="the fewest tokens with probability P in all, 1: all"
    )
    min_p: float = option(
        0.05,
        "--min-p",
        metavar="P",
        help="tokens at least P times as probable as the best, 0: all",
    )
    seed: int = option(
        0, "-s", "--seed", metavar="N", help="the same seed gives the same text, -1: any"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="continue after tokens that end a text")
    special: bool = option(False, "--special", help="print control tokens too")

    def sampling(self) -> Sampling:
        from .network.sampling import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
