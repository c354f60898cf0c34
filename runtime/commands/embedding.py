"""`iqforge embedding`: vectors of texts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ...errors import UsageError, utf_8
from ..text_options import EmbeddingOptions
from .flags import add_load_flags, add_model_flag, on_one_device, open_model
from .prompt_flags import prompt_text

if TYPE_CHECKING:
    import numpy as np

_SHOWN = 16  # values of each of several vectors
_ENDS = 3  # values at both ends of a token's vector


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge embedding` to its parser."""
    parser.description = (
        "Print embeddings of texts: what the model's last norm gives, for every token or pooled."
        " Each line of the input is a text. For several texts the cosines between them follow."
    )
    add_model_flag(parser)
    parser.add_argument("-p", "--prompt", type=utf_8, metavar="TEXT", help="the texts")
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the texts")
    EmbeddingOptions.add_flags(parser)
    parser.add_argument(
        "--embd-output-format",
        choices=("array", "json", "json+", "raw"),
        metavar="FORM",
        help="array: [[...], ...]; json: as OpenAI's API; json+: the same with cosines; raw: a line"
        " of numbers per vector (default: for people)",
    )
    parser.add_argument(
        "--embd-separator",
        default="\\n",
        metavar="TEXT",
        help="what is between two texts (default: the end of a line)",
    )
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p as they are"
    )
    parser.add_argument("-e", "--escape", action="store_true", help=argparse.SUPPRESS)  # always so
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Print the vectors, and the cosines between several texts. Return 0. Raise UsageError if there
    is no text.
    """
    options = EmbeddingOptions.from_flags(args)
    content = prompt_text(args) or ""
    separator = args.embd_separator.replace("\\n", "\n").replace("\\t", "\t")
    if not separator:
        raise UsageError("--embd-separator is empty")
    texts = [text for text in content.split(separator) if text]
    if not texts:
        raise UsageError("there is no text", file=args.file)
    on_one_device(args, "embeddings are computed by one process")
    with open_model(args, api) as model:
        found = api.embed(model, texts, options=options)
    if found[0].ndim == 2 and args.embd_output_format:  # a vector per token
        found = [row for rows in found for row in rows]
    _print(found, texts, args.embd_output_format, options.normalize)
    return 0


def _print(found: list[np.ndarray], texts: list[str], form: str | None, normalize: int) -> None:
    if form == "array":
        print(json.dumps([_numbers(vector) for vector in found]))
    elif form == "raw":
        for vector in found:
            print(" ".join(f"{value:.7g}" for value in vector))
    elif form is not None:
        data = [
            {"object": "embedding", "index": i, "embedding": _numbers(vector)}
            for i, vector in enumerate(found)
        ]
        result: dict = {"object": "list", "data": data}
        if form == "json+" and len(found) > 1:
            result["cosineSimilarity"] = _cosines(found)
        print(json.dumps(result, indent=2))
    elif found[0].ndim == 2:
        for number, rows in enumerate(found):
            for token, row in enumerate(rows):
                shown = f"{_shown(row[:_ENDS], normalize)} ... {_shown(row[-_ENDS:], normalize)}"
                print(f"embedding {number}, token {token}: {shown}")
    else:
        for number, vector in enumerate(found):
            several = len(found) > 1
            print(f"embedding {number}: {_shown(vector[: _SHOWN if several else None], normalize)}")
        if len(found) > 1:
            print("\ncosine similarity matrix:\n")
            for row, text in zip(_cosines(found), texts):
                print("".join(f"{value:6.2f} " for value in row) + text[:40].replace("\n", " "))


def _numbers(vector: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in vector]


def _shown(values: np.ndarray, normalize: int) -> str:
    return " ".join(f"{value:6.0f}" if normalize == 0 else f"{value:9.6f}" for value in values)


def _cosines(found: list[np.ndarray]) -> list[list[float]]:
    from ..evaluate.embedding import similarity

    return [[round(similarity(a, b), 6) for b in found] for a in found]
