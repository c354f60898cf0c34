"""The flags of `iqforge quantize`."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, cast

from ...formats.ftypes import FILE_TYPES
from ..options import QuantizeOptions, Shards, TargetOptions
from ..plan.changes import Changes
from ..plan.recipe import Recipe

USAGE = "IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.usage = f"iqforge quantize [flags] {USAGE}"
    parser.description = (
        "Quantize IN (a GGUF file, the first shard of a split one, or a checkpoint folder) to TYPE."
        " Without OUT the result is ggml-model-TYPE.gguf next to IN. Several OUT TYPE are made in"
        " one pass over IN."
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar=USAGE,
        help=(
            "TYPE: name or number of a preset (see below), in any case, or COPY; may be left out"
            " if --recipe or --plan names one, and with --target-bpw or --target-size, where it is"
            " AUTO"
        ),
    )
    _configure_presets(parser)
    _configure_types(parser.add_argument_group("types"))
    TargetOptions.add_flags(parser.add_argument_group("types for a given size"))
    _configure_rest(parser)


def _configure_types(group: argparse._ArgumentGroup) -> None:
    Recipe.add_flags(group, only=("pure", "rules"), rules=None)
    group.add_argument(
        "--recipe",
        metavar="F",
        help="YAML (.yaml, .yml), or rules REGEX=TYPE as text; flags take precedence",
    )
    Recipe.add_flags(group, only=("strict", "custom_q", "tensor_patterns"))
    group.add_argument(
        "--tensor-type-file",
        metavar="F",
        action="append",
        default=[],
        help="read such items from a file, separated by white space",
    )
    by_role = ("token_embedding_type", "output_tensor_type", "role_types", "leave_output_tensor")
    Recipe.add_flags(group, only=by_role)
    Changes.add_flags(group, only=("extra_output",))
    Recipe.add_flags(group, only=("allow_requantize", "symmetric_q40"))
    QuantizeOptions.add_flags(group, only=("save_plan",))
    group.add_argument(
        "--plan",
        metavar="F",
        help="use a saved plan, which may have been edited; IN must have the same tensors",
    )
    group.add_argument(
        "--repack",
        action="store_true",
        help="do not quantize, only interleave rows, as iqforge repack does; TYPE is ignored",
    )
    group.add_argument(
        "--repack-pattern",
        metavar="REGEX,..",
        action="append",
        default=[],
        help="repack only tensors whose names match one of these",
    )


def _configure_rest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imatrix", metavar="F", help="importance matrix, legacy .dat or GGUF")
    parser.add_argument(
        "--hessian",
        metavar="F",
        help="second moments, as iqforge hessian collects them: round with these, and use their"
        " diagonal as importance matrix unless --imatrix is given",
    )
    parser.add_argument(
        "--calibrate",
        action="append",
        metavar="TEXT",
        help="run this text through the model, layer by layer, and round with the second moments of"
        " every layer's inputs, without a file of them (repeatable; 'default': a text that comes"
        " with iqforge)",
    )
    QuantizeOptions.add_flags(
        parser,
        only=(
            "calibrate_chunks",
            "calibrate_ctx",
            "hessian_shrink",
            "refine",
            "couple_rows",
            "stretch",
            "sequential",
        ),
    )
    entries = ("include_weights", "exclude_weights", "hide_imatrix", "force_imatrix")
    Changes.add_flags(parser, only=entries)
    Recipe.add_flags(parser, only=("ignore_imatrix_rules",))
    Changes.add_flags(parser, only=("override_kv", "prune_layers"))
    QuantizeOptions.add_flags(parser, only=("nan_to_zero", "device", "provenance"), device="auto")
    parser.add_argument(
        "--slow-iq2ks",
        action="store_true",
        help="accepted, but has no effect: there is one search for IQ2_KS",
    )
    parser.add_argument(
        "--max-buffer-size",
        metavar="MiB",
        type=int,
        help="accepted, but has no effect: memory is always bounded",
    )
    QuantizeOptions.add_flags(parser, only=("validate",))
    Shards.add_flags(parser)
    QuantizeOptions.add_flags(parser.add_mutually_exclusive_group(), only=("gate_up",))
    QuantizeOptions.add_flags(parser, only=("restart", "dry_run", "estimate"), estimate=True)
    parser.add_argument("--verbose", action="store_true", help="print a line for every tensor")
    QuantizeOptions.add_flags(parser, only=("threads",))


def _configure_presets(parser: argparse.ArgumentParser) -> None:
    formatter: Any = parser.formatter_class

    class Lines(formatter):
        """Keep the line breaks of a help text that has several lines."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            if "\n" not in text:
                return super()._fill_text(text, width, indent)
            return "\n".join(indent + line for line in text.splitlines())

    parser.formatter_class = cast(Any, Lines)
    parser.add_argument_group("presets, by bits per weight of their main type", preset_lines())


def preset_lines() -> str:
    """Return lines for each range of bits per weight, with the presets in ascending order."""
    ranges: dict[str, list[str]] = {}
    plain = [preset for preset in FILE_TYPES.values() if not preset.base.is_interleaved]
    for preset in sorted(plain, key=lambda preset: (preset.base.bits_per_weight, preset.number)):
        bits = int(preset.base.bits_per_weight)
        name = (
            "1 to 2 bits"
            if bits < 2
            else f"{bits} to {bits + 1} bits"
            if bits < 8
            else "8 and more"
        )
        ranges.setdefault(name, []).append(preset.name)
    lines = []
    for name, presets in ranges.items():
        lines += textwrap.wrap(
            ", ".join(presets), 76, initial_indent=f"{name:<13}", subsequent_indent=" " * 13
        )
    lines.append("Most have a row-interleaved form, as IQ4_K_R4. iqforge types lists all types.")
    return "\n".join(lines)
