"""Interpret the words and flags of `iqforge quantize`: outputs, recipes, changes, a size."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from ...errors import IqforgeError, NotFoundError, UnknownTypeError, UsageError
from ...formats.output import refuse_same_file
from ..options import TargetOptions
from ..plan.overrides import Rule, parse_rules
from ..plan.recipe import AUTO, COPY, Recipe
from ..plan.recipe_file import combine
from ..plan.saved_plan import SavedPlan
from .flags import USAGE


def notes(args: argparse.Namespace) -> list[str]:
    """Return a line for every given flag that has no effect, or less than it could have."""
    said = []
    if args.slow_iq2ks:
        said.append("--slow-iq2ks has no effect: there is one search for IQ2_KS")
    if args.max_buffer_size is not None:
        said.append(
            "--max-buffer-size has no effect: tensors are read in pieces, and memory stays below"
            " 1 GB whatever their size"
        )
    one_text = args.calibrate and len(args.calibrate) == 1 and args.calibrate != ["default"]
    if one_text and args.hessian_shrink is None:
        said.append(
            "with one text, correlations are shrunk by 0.75, as they say little of other kinds of"
            " text; add --calibrate default, or set --hessian-shrink"
        )
    return said


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Recipe` that flags give."""
    given = {name: getattr(args, name, None) for name in Recipe.field_names()}
    from_files = [rule for path in args.tensor_type_file for rule in tensor_type_file(path)]
    given["tensor_patterns"] = [*(args.tensor_patterns or ()), *from_files]
    return {name: value for name, value in given.items() if value}


def recipe_fields(args: argparse.Namespace, api) -> tuple[dict[str, Any], SavedPlan | None]:
    """Return the fields of `Recipe` that the flags and --recipe set, among them `type` if the file
    names a preset; and the plan of --plan.

    Raise UsageError for flags that contradict --plan.
    """
    given = given_fields(args)
    if args.plan is None:
        return combine(api.read_recipe(args.recipe) if args.recipe else {}, given), None
    leave = {
        name: given.pop(name)
        for name in ("allow_requantize", "ignore_imatrix_rules")
        if name in given
    }
    if given or args.recipe:
        others = ", ".join((["recipe"] if args.recipe else []) + sorted(given))
        raise UsageError(f"--plan gives the type of every tensor, so it takes no {others}")
    plan = api.load_plan(args.plan)
    return leave, plan


def refuse_read_files(args: argparse.Namespace, outputs: Sequence[str]) -> None:
    """Raise OutputError if an output, or the plan to save, would replace a file that the flags
    read.
    """
    read = [
        path
        for path in (
            args.recipe,
            args.plan,
            args.damage,
            args.imatrix,
            args.hessian,
            *(args.calibrate or ()),
            *args.tensor_type_file,
        )
        if path is not None
    ]
    for output in [*outputs, *([args.save_plan] if args.save_plan is not None else [])]:
        refuse_same_file(output, read)


def tensor_type_file(path: str) -> list[Rule]:
    """Read rules `NAME=TYPE`, separated by white space, from a file. Raise NotFoundError or
    IqforgeError, with the file, if it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        raise NotFoundError("no such file", file=path) from None
    except OSError as error:
        raise IqforgeError(f"cannot be read: {error.strerror or error}", file=path) from None
    except UnicodeDecodeError as error:
        raise IqforgeError(f"cannot be read: {error}", file=path) from None
    name = os.path.basename(path)
    return [
        rule
        for number, line in enumerate(lines, 1)
        for word in line.split()
        for rule in parse_rules(word, f"{name}:{number}")
    ]


def parse_words(
    words: list[str], preset: str | None = None
) -> tuple[str, list[tuple[str, str]], int]:
    """Return (IN, [(OUT, TYPE), ..], NTHREADS) of the positional words. A single OUT that was left
    out gets the default name of llama-quantize.

    preset: TYPE if that was left out. Raise UsageError for words that are not expected, and
    UnknownTypeError for an unknown TYPE.
    """
    src, rest = words[0], words[1:]
    preset = None if preset is None else type_name(preset)
    first, second = (_known(word) for word in [*rest, "", ""][:2])
    only = first or (preset if not rest else None)  # TYPE without OUT
    if only:
        outputs, rest = [(_default_name(src, only), only)], rest[1:]
    elif preset and not second:
        outputs, rest = [(rest[0], preset)], rest[1:]
    elif not rest:
        raise UsageError(f"expected {USAGE}")
    elif not second:
        if len(rest) == 1 and _is_file(rest[0]):
            raise UsageError(f"TYPE is missing after '{rest[0]}': expected {USAGE}")
        raise UnknownTypeError(_unknown(rest[1] if len(rest) > 1 else rest[0]))
    else:
        pairs, rest = rest, rest[len(rest) - len(rest) % 2 :]
        outputs = [(out, type_name(type)) for out, type in zip(pairs[::2], pairs[1::2])]
    # A number in place of OUT is NTHREADS in the wrong place.
    if len(rest) > 1 or any(_is_number(out) for out, _ in outputs[1:]):
        raise UsageError(f"unexpected argument '{(rest if len(rest) > 1 else words)[-1]}'")
    try:
        return src, outputs, max(0, int(rest[0])) if rest else 0
    except ValueError:
        if _is_file(rest[0]):
            raise UsageError(f"OUT comes before TYPE: expected {USAGE}") from None
        raise UsageError(f"invalid NTHREADS: '{rest[0]}' is not a number") from None


def type_name(word: str) -> str:
    """Return the name of a preset, or COPY or AUTO. Raise UnknownTypeError for other words."""
    from ...formats.ftypes import file_type

    return word.upper() if word.upper() in (COPY, AUTO) else file_type(word).name


def _is_file(word: str) -> bool:
    return word.lower().endswith(".gguf")


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
    fields: dict[str, Any],
    plan: SavedPlan | None,
    fitted: Recipe | None = None,
) -> list[Recipe]:
    """Return a recipe for every output; `fitted` is that of AUTO. Raise UsageError for a plan that
    was made for another type.
    """
    from dataclasses import replace

    if plan is None:
        return [
            fitted if fitted is not None and type == AUTO else _recipe(fields, type)
            for _, type in outputs
        ]
    if len(outputs) > 1 or type_name(plan.type) != outputs[0][1]:
        raise UsageError(f"the plan is one for {plan.type}", file=args.plan)
    return [replace(plan, **fields)]


def _recipe(fields: dict[str, Any], type: str) -> Recipe:
    return Recipe(**{**fields, "type": type})


def asks_for_size(args: argparse.Namespace) -> bool:
    """Return whether a size is given, for which types are chosen. Raise UsageError for flags that
    exclude or need it.
    """
    given = args.bpw is not None or args.size is not None
    if not given and (args.types or args.damage):
        raise UsageError("--target-types and --damage need --target-bpw or --target-size")
    if given and (args.pure or args.plan or args.repack):
        raise UsageError("--pure, --plan and --repack leave no types to choose for a size")
    if given and args.gate_up:
        raise UsageError(
            "types are chosen for the tensors of IN: merge or split gate and up in an earlier run"
            " (COPY)"
        )
    return given


def target_options(
    args: argparse.Namespace, outputs: list[tuple[str, str]]
) -> TargetOptions | None:
    """Return the size that types are chosen for, or None if no output is AUTO. Raise UsageError for
    AUTO without a size, or a size without AUTO.
    """
    asked, auto = asks_for_size(args), any(type == AUTO for _, type in outputs)
    if auto and not asked:
        raise UsageError("AUTO needs --target-bpw or --target-size")
    if asked and not auto:
        raise UsageError(
            "--target-bpw and --target-size choose the types: TYPE must be AUTO or left out, but it"
            f" is {outputs[0][1]}"
        )
    return TargetOptions.from_flags(args) if auto else None
