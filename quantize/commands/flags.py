"""The flags of `iqforge quantize`, and what they say: a recipe, changes, files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ...errors import IqforgeError, NotFoundError, UnknownTypeError, UsageError
from ...formats.output import refuse_same_file
from ..plan.changes import Changes
from ..plan.overrides import ROLE_FLAGS, Rule, flag_name, parse_rules
from ..plan.recipe import AUTO, COPY, Recipe
from ..plan.recipe_file import combine, read_recipe
from ..plan.saved_plan import SavedPlan, load_plan

USAGE = "IN [OUT] TYPE [OUT TYPE ..] [NTHREADS]"


def configure(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
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
            "TYPE: a preset name or number, any case, or COPY; may be left out where "
            "--recipe or --plan names one, and with --target-bpw or --target-size, where it is AUTO"
        ),
    )
    _configure_types(parser.add_argument_group("types"))
    _configure_target(parser.add_argument_group("types for a given size"))
    _configure_rest(parser)


def _configure_types(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pure",
        action="store_true",
        help="one type for all tensors, without the preset's mix and --custom-q",
    )
    group.add_argument(
        "--rules",
        choices=("ik", "mainline"),
        help=(
            "whose mixes the presets are: ik_llama.cpp's (default) or llama.cpp's; "
            "presets that only llama.cpp has follow its own"
        ),
    )
    group.add_argument(
        "--recipe",
        metavar="F",
        help="YAML (.yaml, .yml), or rules REGEX=TYPE as text; flags win over it",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="a rule that counts for no tensor is an error, not a warning",
    )
    group.add_argument(
        "--custom-q",
        metavar="REGEX=TYPE,..",
        action="append",
        default=[],
        help=(
            "types for tensors with REGEX in their names, whatever the preset says; the first that"
            " matches counts; may be repeated"
        ),
    )
    group.add_argument(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="as --custom-q, but before it, in lower case, and with --pure too; may be repeated",
    )
    group.add_argument(
        "--tensor-type-file",
        metavar="F",
        action="append",
        default=[],
        help="such items in a file, with white space between",
    )
    group.add_argument("--token-embedding-type", metavar="T", help="type of token_embd.weight")
    group.add_argument("--output-tensor-type", metavar="T", help="type of output.weight")
    for role, what in ROLE_FLAGS.items():
        group.add_argument(flag_name(role), metavar="T", help=f"type of {what}")
    group.add_argument(
        "--leave-output-tensor", action="store_true", help="keep output.weight as it is"
    )
    group.add_argument(
        "--extra-output-tensor",
        metavar="T",
        help="write the output matrix a second time, as output_extra.weight in type T",
    )
    group.add_argument(
        "--allow-requantize", action="store_true", help="accept tensors that are quantized already"
    )
    group.add_argument(
        "--symmetric-q40",
        action="store_true",
        help=(
            "Q4_0 with codes from -7 to 7 and without the importance matrix: exact "
            "for models that were trained so"
        ),
    )
    group.add_argument(
        "--save-plan", metavar="F", help="write what every tensor becomes, and why, as JSON"
    )
    group.add_argument(
        "--plan",
        metavar="F",
        help="carry out a plan that was saved, and perhaps edited; IN must have the same tensors",
    )
    group.add_argument(
        "--repack",
        action="store_true",
        help="quantize nothing: row-interleaved forms, as iqforge repack; TYPE is not used",
    )
    group.add_argument(
        "--repack-pattern",
        metavar="REGEX,..",
        action="append",
        default=[],
        help="repack only tensors with one of these",
    )


def _configure_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target-bpw",
        metavar="X",
        type=float,
        help=(
            "choose types that do least damage at so many bits per weight of all "
            "tensor data; what other flags give types to counts"
        ),
    )
    group.add_argument(
        "--target-size",
        metavar="SIZE",
        help="likewise for a file of at most 12G (10^9 bytes), 11.5GiB, ..",
    )
    group.add_argument(
        "--target-types",
        metavar="T,..",
        action="append",
        default=[],
        help="types that may be used (default: most plain ones)",
    )
    group.add_argument(
        "--damage",
        metavar="F",
        help="how much each tensor matters, measured by iqforge sensitivity; without it roles tell",
    )


def _configure_rest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imatrix", metavar="F", help="importance matrix, legacy .dat or GGUF")
    parser.add_argument(
        "--include-weights",
        metavar="PART",
        action="append",
        default=[],
        help="use only its entries with PART in their names; may be repeated",
    )
    parser.add_argument(
        "--exclude-weights",
        metavar="PART",
        action="append",
        default=[],
        help="do not use those; may be repeated",
    )
    parser.add_argument(
        "--hide-imatrix",
        action="store_true",
        help="do not say in the file which importance matrix was used",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="use an importance matrix that seems to belong to another model",
    )
    parser.add_argument(
        "--ignore-imatrix-rules",
        action="store_true",
        help="do without an importance matrix where one is demanded",
    )
    parser.add_argument(
        "--override-kv",
        metavar="KEY=TYPE:VALUE",
        action="append",
        default=[],
        help=(
            "set a key of the model, for the mixes too; TYPE int, float, bool or str; may be"
            " repeated"
        ),
    )
    parser.add_argument(
        "--prune-layers",
        metavar="N,..",
        default="",
        help="leave these blocks out; the others are numbered anew",
    )
    parser.add_argument(
        "--nan-to-zero",
        action="store_true",
        help="NaN and infinities in the source become 0 instead of an error",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default="cpu",
        help=(
            "cpu (default), cuda for all GPUs, cuda:N or cuda:N,M for some, auto for all GPUs or,"
            " without one, the CPU; the bytes are the same, but for trellis types"
        ),
    )
    parser.add_argument(
        "--no-provenance",
        action="store_true",
        help=(
            "leave out the keys that say which version made the file of which "
            "weights, recipe and importance matrix"
        ),
    )
    parser.add_argument(
        "--slow-iq2ks",
        action="store_true",
        help="accepted, but changes nothing: there is one search for IQ2_KS",
    )
    parser.add_argument(
        "--max-buffer-size",
        metavar="MiB",
        type=int,
        help="accepted, but changes nothing: memory is bounded anyway",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help=(
            "read every output back before it gets its name: values, and errors as the "
            "run reported them"
        ),
    )
    parser.add_argument(
        "--keep-split", action="store_true", help="as many shards as IN has, with the same tensors"
    )
    parser.add_argument(
        "--partial-requant",
        action="store_true",
        help=(
            "shards of the output (with --keep-split), or outputs, that are "
            "there already stay as they are"
        ),
    )
    parser.add_argument(
        "--split-max-size",
        metavar="N",
        help="cut the output into shards of at most so many bytes: 300M, 2G",
    )
    parser.add_argument(
        "--split-max-tensors",
        metavar="N",
        type=int,
        help="cut the output into shards of at most so many tensors",
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
        help="write ffn_gate_up_exps as gate and up",
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
        help="begin anew where an earlier run was broken off, instead of going on",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "print the plan, the sizes, and what time, memory and space the run would "
            "take, from trying some rows; write nothing"
        ),
    )
    parser.add_argument(
        "--no-estimate",
        action="store_true",
        help="with --dry-run: the plan and the sizes only, at once",
    )


def notes(args: argparse.Namespace) -> list[str]:
    """A line for every flag that was given and changes nothing."""
    said = []
    if args.slow_iq2ks:
        said.append("--slow-iq2ks changes nothing: there is one search for IQ2_KS")
    if args.max_buffer_size is not None:
        said.append(
            "--max-buffer-size changes nothing: tensors are read in pieces, and memory stays below"
            " 1 GB whatever their size"
        )
    return said


def given_roles(args: argparse.Namespace) -> dict[str, str]:
    """Type names by the role whose flag was given."""
    return {
        role: given for role in ROLE_FLAGS if (given := getattr(args, f"{role}_type")) is not None
    }


def given_fields(args: argparse.Namespace) -> dict[str, object]:
    """What the flags say of a `Recipe`, and only that."""
    patterns = [
        *args.tensor_type,
        *(rule for path in args.tensor_type_file for rule in tensor_type_file(path)),
    ]
    fields = {
        "pure": args.pure,
        "rules": args.rules,
        "custom_q": args.custom_q,
        "tensor_patterns": patterns,
        "role_types": given_roles(args),
        "token_embedding_type": args.token_embedding_type,
        "output_tensor_type": args.output_tensor_type,
        "leave_output_tensor": args.leave_output_tensor,
        "allow_requantize": args.allow_requantize,
        "strict": args.strict,
        "ignore_imatrix_rules": args.ignore_imatrix_rules,
        "symmetric_q40": args.symmetric_q40,
    }
    return {name: value for name, value in fields.items() if value}


def recipe_fields(args: argparse.Namespace) -> tuple[dict[str, object], SavedPlan | None]:
    """Fields of `Recipe` that the flags and --recipe set, `type` among them if a file names a
    preset; or the plan to carry out.

    UsageError for flags beside --plan that it leaves no room for.
    """
    given = given_fields(args)
    if args.plan is None:
        return combine(read_recipe(args.recipe) if args.recipe else {}, given), None
    leave = {
        name: given.pop(name)
        for name in ("allow_requantize", "ignore_imatrix_rules")
        if name in given
    }
    if given or args.recipe:
        others = ", ".join((["recipe"] if args.recipe else []) + sorted(given))
        raise UsageError(f"--plan says what every tensor becomes: no {others} beside it")
    plan = load_plan(args.plan)
    return leave, plan


def refuse_read_files(args: argparse.Namespace, outputs: Sequence[str]) -> None:
    """OutputError for an output, or a plan to be saved, that would replace a file that the flags
    name to be read.
    """
    read = [
        path
        for path in (args.recipe, args.plan, args.damage, args.imatrix, *args.tensor_type_file)
        if path is not None
    ]
    for output in [*outputs, *([args.save_plan] if args.save_plan is not None else [])]:
        refuse_same_file(output, read)


def tensor_type_file(path: str) -> list[Rule]:
    """Rules `NAME=TYPE` of a file, with white space between them."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        raise NotFoundError("no such file", file=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise IqforgeError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path
        ) from None
    name = os.path.basename(path)
    return [
        rule
        for number, line in enumerate(lines, 1)
        for word in line.split()
        for rule in parse_rules(word, f"{name}:{number}")
    ]


def changes_of(args: argparse.Namespace) -> Changes:
    """What the flags say beside types."""
    try:
        layers = [int(word) for word in args.prune_layers.split(",")] if args.prune_layers else []
    except ValueError:
        raise UsageError(
            f"--prune-layers {args.prune_layers}: expected numbers with commas between them"
        ) from None
    return Changes(
        layers,
        args.extra_output_tensor,
        args.override_kv,
        args.include_weights,
        args.exclude_weights,
        args.hide_imatrix,
        args.force,
    )


def parse_words(
    words: list[str], preset: str | None = None
) -> tuple[str, list[tuple[str, str]], int]:
    """(IN, [(OUT, TYPE), ..], NTHREADS) of the positional words; a single OUT gets the reference's
    default name if it was left out.

    preset: what TYPE is if that is left out.
    """
    src, rest = words[0], words[1:]
    preset = None if preset is None else type_name(preset)
    first, second = (_known(word) for word in [*rest, "", ""][:2])
    if first or (preset and not rest):
        outputs, rest = [(_default_name(src, first or preset), first or preset)], rest[1:]
    elif preset and not second:
        outputs, rest = [(rest[0], preset)], rest[1:]
    elif not rest:
        raise UsageError(f"expected {USAGE}")
    elif not second:
        raise UnknownTypeError(_unknown(rest[1] if len(rest) > 1 else rest[0]))
    else:
        pairs, rest = rest, rest[len(rest) - len(rest) % 2 :]
        outputs = [(out, type_name(type)) for out, type in zip(pairs[::2], pairs[1::2])]
    if len(rest) > 1 or any(
        _is_number(out) for out, _ in outputs[1:]
    ):  # a number is no file, but NTHREADS in the wrong place
        raise UsageError(f"unexpected argument '{(rest if len(rest) > 1 else words)[-1]}'")
    try:
        return src, outputs, max(0, int(rest[0])) if rest else 0
    except ValueError:
        raise UsageError(f"invalid nthread '{rest[0]}', expected a number") from None


def type_name(word: str) -> str:
    """The name of a preset, or COPY or AUTO. UnknownTypeError for what is none."""
    from ...formats.ftypes import file_type

    return word.upper() if word.upper() in (COPY, AUTO) else file_type(word).name


def _known(word: str) -> str | None:
    try:
        return type_name(word)
    except UnknownTypeError:
        return None


def _unknown(word: str) -> str:
    try:
        return type_name(word)
    except UnknownTypeError as error:
        return error.message


def _default_name(src: str, type: str) -> str:
    return os.path.join(
        src if os.path.isdir(src) else os.path.dirname(src), f"ggml-model-{type}.gguf"
    )


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True


def recipes_of(
    args: argparse.Namespace,
    outputs: list[tuple[str, str]],
    fields: dict[str, object],
    plan: SavedPlan | None,
    fitted: Recipe | None = None,
) -> list[Recipe]:
    """A recipe for every output; `fitted` is that of AUTO."""
    from dataclasses import replace

    if plan is None:
        return [
            fitted if type == AUTO else Recipe(**{**fields, "type": type}) for _, type in outputs
        ]
    if len(outputs) > 1 or type_name(plan.type) != outputs[0][1]:
        raise UsageError(f"the plan is one for {plan.type}", file=args.plan)
    return [replace(plan, **fields)]


def asks_for_size(args: argparse.Namespace) -> bool:
    """Whether a size is given for which types are to be chosen. UsageError for flags that do not go
    with it, or that need it.
    """
    given = args.target_bpw is not None or args.target_size is not None
    if not given and (args.target_types or args.damage):
        raise UsageError("--target-types and --damage need --target-bpw or --target-size")
    if given and (args.pure or args.plan or args.repack):
        raise UsageError("--pure, --plan and --repack leave no types to choose for a size")
    if given and args.gate_up:
        raise UsageError(
            "types are chosen for the tensors of IN: merge or part gate and up in a run before"
            " (COPY)"
        )
    return given


def target_options(
    args: argparse.Namespace, outputs: list[tuple[str, str]], fields: dict[str, object]
) -> dict[str, object] | None:
    """What the flags say to `recipe_for_target`, or None if no output is AUTO. UsageError for one
    without the other.
    """
    asked, auto = asks_for_size(args), any(type == AUTO for _, type in outputs)
    if auto and not asked:
        raise UsageError("AUTO needs --target-bpw or --target-size")
    if asked and not auto:
        raise UsageError(
            "--target-bpw and --target-size choose the types, TYPE is AUTO or left out; it is"
            f" {outputs[0][1]}"
        )
    types = [name for text in args.target_types for name in text.split(",") if name]
    options = {
        "bpw": args.target_bpw,
        "size": args.target_size,
        "types": types,
        "damage": args.damage,
    }
    return (
        options | {name: value for name, value in fields.items() if name != "type"}
        if auto
        else None
    )
