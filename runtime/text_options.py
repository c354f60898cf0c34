"""Options of evaluating a text, and of continuing one. Imports nothing heavy."""

# ruff: noqa: RUF009  `option` makes dataclass fields

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import EvaluationError, NotFoundError, UsageError
from ..formats.options import Options, option
from .sampling.options import SamplerOptions

if TYPE_CHECKING:
    from .prompt_cache import PromptCache


HELLASWAG_TASKS = 400  # by default, of --hellaswag


@dataclass(frozen=True)
class ChunkOptions(Options):
    """How a text is cut into chunks and evaluated."""

    n_ctx: int = option(
        512, "-c", "--ctx-size", least=4, metavar="N", help="tokens per chunk, 4 or more"
    )
    chunks: int = option(
        -1,
        "--chunks",
        least=-1,
        metavar="N",
        help="evaluate at most N chunks of each text; -1, 0: all",
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
    kl_divergence_compact: bool = option(
        False,
        "--kl-divergence-compact",
        help="write a base file of a tenth of the size, from which KL divergence is estimated",
    )
    ppl_stride: int = option(
        0,
        "--ppl-stride",
        least=0,
        metavar="N",
        help="score only the last N tokens of chunks that begin every N tokens",
    )


@dataclass(frozen=True)
class CompareOptions(ChunkOptions):
    """What is measured of models that are compared."""

    compact: bool = option(
        False,
        "--compact",
        help="keep a tenth of the base's predictions; KL divergence is then an estimate",
    )
    keep: bool = option(
        False, "--keep", help="keep the base's predictions in DIR, to compare more models later"
    )
    speed_prompt: int = option(
        512,
        "-p",
        "--n-prompt",
        least=0,
        metavar="N",
        help="tokens of the prompt whose speed is measured, 0: do not",
    )
    speed_generation: int = option(
        32,
        "-n",
        "--n-gen",
        least=0,
        metavar="N",
        help="tokens to generate to measure the speed, 0: do not",
    )
    worst: int = option(
        10, "--worst", least=0, metavar="N", help="list the N tokens that differ most"
    )


@dataclass(frozen=True)
class EmbeddingOptions(Options):
    """How the hidden states of a text become an embedding."""

    pooling: str | None = option(
        None,
        "--pooling",
        choices=("none", "mean", "cls", "last"),
        metavar="HOW",
        help="none: a vector per token; mean: of all tokens; cls: of the first one; last: of the"
        " last one (default: as the file says, or none)",
    )
    normalize: int = option(
        2,
        "--embd-normalize",
        least=-1,
        metavar="N",
        help="-1: not at all, 0: to integers up to 32760, 1: by the sum of absolute values,"
        " 2: Euclidean, more: by that norm",
    )


@dataclass(frozen=True)
class TextOptions(SamplerOptions):
    """How text is generated, after a prompt or in a conversation."""

    n: int | None = option(
        None,
        "-n",
        "--predict",
        "--n-predict",
        kind=int,
        least=-2,
        metavar="N",
        help="generate at most N tokens; -1, -2: until the context is full (default: 128, if they"
        " fit)",
    )
    stop: tuple[str, ...] = option(
        (),
        "-r",
        "--reverse-prompt",
        kind=str,
        many=True,
        metavar="TEXT",
        help="end before this text, such as '\\n' (repeatable)",
    )
    grammar: str | None = option(
        None,
        "--grammar",
        kind=str,
        metavar="GBNF",
        help="a grammar that the text follows, in the notation of llama.cpp",
    )
    grammar_file: str | os.PathLike | None = option(
        None, "--grammar-file", metavar="FILE", help="a file with such a grammar"
    )
    json_schema: str | None = option(
        None,
        "-j",
        "--json-schema",
        kind=str,
        metavar="SCHEMA",
        help="a JSON schema that the text follows, such as '{}' for any JSON",
    )
    json_schema_file: str | os.PathLike | None = option(
        None, "-jf", "--json-schema-file", metavar="FILE", help="a file with such a schema"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="continue after tokens that end a text")
    special: bool = option(False, "-sp", "--special", help="print control tokens too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise UsageError("a text to stop at (stop, -r) is empty, which ends every text")

    def grammar_source(self) -> tuple[str, str] | None:
        """Return (kind, text) of the grammar, "gbnf" or "json_schema"; None without one. UsageError
        for several, and for one of a text that never ends.
        """
        given = [
            (kind, value, name.endswith("_file"))
            for name, kind in (
                ("grammar", "gbnf"),
                ("grammar_file", "gbnf"),
                ("json_schema", "json_schema"),
                ("json_schema_file", "json_schema"),
            )
            if (value := getattr(self, name)) is not None
        ]
        if not given:
            return None
        if len(given) > 1:
            raise UsageError("only one grammar or JSON schema can be followed")
        if self.ignore_eos:
            raise UsageError("a text that follows a grammar ends where that ends: drop ignore_eos")
        [(kind, value, is_file)] = given
        return kind, text_of_file(value) if is_file else str(value)


@dataclass(frozen=True)
class GenerateOptions(TextOptions):
    """How a prompt is continued."""

    context: int = option(
        0,
        "-c",
        "--ctx-size",
        least=0,
        metavar="N",
        help="most tokens in all, prompt included; 0: as many as needed, with -n -1 those that the"
        " model was trained for (default: 0)",
    )
    prompt_cache: str | os.PathLike | None = option(
        None,
        "--prompt-cache",
        metavar="FILE",
        help="read what FILE has of the prompt from an earlier run, and write the state after the"
        " prompt to it",
    )
    prompt_cache_all: bool = option(
        False, "--prompt-cache-all", help="write the state after the generated text instead"
    )
    prompt_cache_ro: bool = option(False, "--prompt-cache-ro", help="do not write the file")

    def cache(self) -> PromptCache | None:
        """Return the file of the prompt's state; None without one. UsageError for flags about a
        file that is not given.
        """
        if self.prompt_cache is None:
            if self.prompt_cache_all or self.prompt_cache_ro:
                raise UsageError("prompt_cache_all and prompt_cache_ro need prompt_cache")
            return None
        from .prompt_cache import PromptCache

        return PromptCache(self.prompt_cache, self.prompt_cache_all, self.prompt_cache_ro)


def text_of_file(path: str | os.PathLike) -> str:
    """Return the text of a UTF-8 file. Raise NotFoundError or EvaluationError, with the file, if it
    cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise NotFoundError("no such file", file=path) from None
    except UnicodeDecodeError as error:
        raise EvaluationError("the text is not UTF-8", file=path, offset=error.start) from None
    except OSError as error:
        raise EvaluationError(f"cannot be read: {error.strerror}", file=path) from None
