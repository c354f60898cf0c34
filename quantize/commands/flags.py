"""The flags of `iqforge quantize`."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, cast

from ...formats.ftypes import FILE_TYPES
from ..plan.overrides import ROLE_FLAGS, flag_name

USAGE = "IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.usage = f"iqforge quantize [flags] {USAGE}"
    parser.description = (
        "Quantize IN (a GGUF file, the first shard of a split one, or a checkpoint folder) to TYPE."
        " Without OUT the result is ggml-model-TYPE.gguf beside IN. Several OUT TYPE are made in"
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
    _configure_target(parser.add_argument_group("types for a given size"))
    _configure_rest(parser)


def _configure_types(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pure",
        action="store_true",
        help="use one type for all tensors, without the preset's mix and --custom-q",
    )
    group.add_argument(
        "--rules",
        choices=("ik", "mainline"),
        help=(
            "the mixes of presets: ik_llama.cpp's (default) or llama.cpp's; presets that only"
            " llama.cpp has follow its own"
        ),
    )
    group.add_argument(
        "--recipe",
        metavar="F",
        help="YAML (.yaml, .yml), or rules REGEX=TYPE as text; flags take precedence",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="a rule that matches no tensor is an error, not a warning",
    )
    group.add_argument(
        "--custom-q",
        metavar="REGEX=TYPE,..",
        action="append",
        default=[],
        help=(
            "types for tensors whose names match REGEX, in place of the preset's; the first match"
            " counts; may be repeated"
        ),
    )
    group.add_argument(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="as --custom-q, but it takes precedence, is matched in lower case, and also works with"
        " --pure; may be repeated",
    )
    group.add_argument(
        "--tensor-type-file",
        metavar="F",
        action="append",
        default=[],
        help="read such items from a file, separated by white space",
    )
    group.add_argument("--token-embedding-type", metavar="T", help="type of token_embd.weight")
    group.add_argument("--output-tensor-type", metavar="T", help="type of output.weight")
    for role, what in ROLE_FLAGS.items():
        group.add_argument(flag_name(role), metavar="T", help=what)
    group.add_argument(
        "--leave-output-tensor", action="store_true", help="do not quantize output.weight"
    )
    group.add_argument(
        "--extra-output-tensor",
        metavar="T",
        help="also write the output matrix as output_extra.weight, in type T",
    )
    group.add_argument(
        "--allow-requantize", action="store_true", help="accept tensors that are already quantized"
    )
    group.add_argument(
        "--symmetric-q40",
        action="store_true",
        help=(
            "write Q4_0 with codes from -7 to 7 and without the importance matrix, which is exact"
            " for models that were trained so"
        ),
    )
    group.add_argument(
        "--save-plan", metavar="F", help="write the type of every tensor, and the reason, as JSON"
    )
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


def _configure_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target-bpw",
        metavar="X",
        type=float,
        help=(
            "choose the types that lose least at X bits per weight of all tensor data; tensors that"
            " other flags give types to are included"
        ),
    )
    group.add_argument(
        "--target-size",
        metavar="SIZE",
        help="choose types for a file of at most 12G (10^9 bytes), 11.5GiB, ..",
    )
    group.add_argument(
        "--target-types",
        metavar="T,..",
        action="append",
        default=[],
        help="types to choose from (default: most plain types)",
    )
    group.add_argument(
        "--damage",
        metavar="F",
        help="how much each tensor matters, as measured by iqforge sensitivity (default: by role)",
    )


def _configure_rest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imatrix", metavar="F", help="importance matrix, legacy .dat or GGUF")
    parser.add_argument(
        "--include-weights",
        metavar="PART",
        action="append",
        default=[],
        help="use only entries with PART in their names; may be repeated",
    )
    parser.add_argument(
        "--exclude-weights",
        metavar="PART",
        action="append",
        default=[],
        help="do not use entries with PART in their names; may be repeated",
    )
    parser.add_argument(
        "--hide-imatrix",
        action="store_true",
        help="do not store the name of the importance matrix in the file",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="use an importance matrix that seems to belong to another model",
    )
    parser.add_argument(
        "--ignore-imatrix-rules",
        action="store_true",
        help="quantize without an importance matrix where a type requires one",
    )
    parser.add_argument(
        "--override-kv",
        metavar="KEY=TYPE:VALUE",
        action="append",
        default=[],
        help=(
            "set a metadata key, before the mixes read it; TYPE is int, float, bool or str; may be"
            " repeated"
        ),
    )
    parser.add_argument(
        "--prune-layers",
        metavar="N,..",
        default="",
        help="leave these layers out and renumber the others",
    )
    parser.add_argument(
        "--nan-to-zero",
        action="store_true",
        help="replace NaN and infinities in the source by 0 instead of failing",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help=(
            "auto (default: all GPUs, or the CPU if there is none), cpu, cuda for all GPUs, cuda:N"
            " or cuda:N,M for some; the bytes are the same, except for trellis types, IQ1_KT to"
            " IQ4_KT"
        ),
    )
    parser.add_argument(
        "--no-provenance",
        action="store_true",
        help=(
            "do not store the keys that say which version made the file from which weights, recipe"
            " and importance matrix"
        ),
    )
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
    parser.add_argument(
        "--validate",
        action="store_true",
        help=(
            "read every output back before it gets its name, and check its values and the errors"
            " that the run reported"
        ),
    )
    parser.add_argument("--keep-split", action="store_true", help="write the same shards as IN has")
    parser.add_argument(
        "--partial-requant",
        action="store_true",
        help=("keep shards of the output (with --keep-split), or outputs, that already exist"),
    )
    parser.add_argument(
        "--split-max-size",
        metavar="N",
        help="split the output into shards of at most N bytes: 300M, 2G",
    )
    parser.add_argument(
        "--split-max-tensors",
        metavar="N",
        type=int,
        help="split the output into shards of at most N tensors",
    )
    parser.add_argument(
        "--merge-gate-up",
        dest="gate_up",
        action="store_const",
        const="merge",
        help="write gate and up of experts as one tensor, ffn_gate_up_exps",
    )
    parser.add_argument(
        "--split-gate-up",
        dest="gate_up",
        action="store_const",
        const="split",
        help="write ffn_gate_up_exps as two tensors, gate and up",
    )
    parser.add_argument(
        "--part-gate-up",
        dest="gate_up",
        action="store_const",
        const="split",
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start from scratch instead of resuming an interrupted run",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "print the plan, the sizes, and an estimate of time, memory and space from a trial on"
            " some rows; write nothing"
        ),
    )
    parser.add_argument(
        "--no-estimate",
        action="store_true",
        help="with --dry-run: print only the plan and the sizes, without a trial",
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for every tensor")
    parser.add_argument(
        "-t",
        "--threads",
        metavar="N",
        type=int,
        default=0,
        help="threads, as NTHREADS (default: all cores)",
    )


def _configure_presets(parser: argparse.ArgumentParser) -> None:
    formatter: Any = parser.formatter_class

    class Lines(formatter):
        """Keeps the lines of a text that has several."""

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
