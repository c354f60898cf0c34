"""The base that `iqforge perplexity` compares a model with: checks of its flags and of its text.
Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ...errors import UsageError, printable
from ..text_options import PerplexityOptions
from .flags import note

if TYPE_CHECKING:
    from ..model import Model


def check_flags(args: argparse.Namespace, options: PerplexityOptions) -> None:
    """UsageError for flags about a base that do not go together."""
    base = options.kl_divergence_base
    if options.kl_divergence and not base:
        raise UsageError("--kl-divergence needs --kl-divergence-base F")
    if options.kl_divergence_compact and (not base or options.kl_divergence):
        raise UsageError(
            "--kl-divergence-compact is for a base file that is written: --kl-divergence-base F"
            " without --kl-divergence"
        )
    if args.kl_divergence_against == "":
        raise UsageError("--kl-divergence-against is empty, expected the base model")
    if args.kl_divergence_against and (base or options.ppl_stride):
        other = "--kl-divergence-base" if base else "--ppl-stride"
        raise UsageError(f"--kl-divergence-against and {other} cannot be given together")
    if options.kl_divergence and options.ppl_stride:
        raise UsageError("--kl-divergence and --ppl-stride cannot be given together")


def check_output(
    base: str | os.PathLike, model: str, texts: list[str], options: PerplexityOptions
) -> None:
    """UsageError for what a base file cannot be written of, or over."""
    from ...formats.output import refuse_same_file

    if len(texts) > 1:
        raise UsageError("a base file holds one text: give one -f with --kl-divergence-base")
    if options.ppl_stride:
        raise UsageError("a base file has no windows that overlap: not with --ppl-stride")
    refuse_same_file(base, (model, *texts))


def note_other_texts(
    model: Model, base: str | os.PathLike, texts: list[str], prompt: str | None
) -> None:
    """Print a note for each text that is not the one that the base file holds."""
    from ..evaluate.base_file import holds_text
    from ..evaluate.chunks import read_text
    from ..evaluate.compact_base import open_base

    opened = open_base(base)
    given = {f"-f {printable(text, 400)}": read_text(text) for text in texts}
    for flag, text in (given if prompt is None else {"-p": prompt}).items():
        if not holds_text(opened.tokens, model.tokenizer.encode(text)):
            note(flag, f"{printable(base, 400)} holds another text")
