"""The language in which `presets.py` and `mainline.py` say which tensor gets which type.

- A preset belongs to one chain. A chain is a list of `Row`s; a tensor takes the first row whose
  part its name contains and whose `when` holds. A tensor without row gets the preset's base type.
  The output matrix (or the token embedding, if it also serves as that) and the embeddings have rows
  of their own, before any chain.
- Lines of a row are `PRESETS: choice, choice, ..`, `*` for all. A choice is conditions and then a
  type, or only a type. The first choice that holds counts, in any line for the preset; if none
  does, the base type does. `flag` names the user's type that goes first.
- `base` is the base type; `step` and `step70` are one step up from it, by `STEPS`, where there is
  one (if not, the base type).
- Conditions: `E>=4` experts, `G>=4` query heads per key head, `v<2` value projections seen before,
  `first/8` and `first/16` (layer in that part of the layers), `middle` (neither in the first nor
  the last eighth), `more` (in the first or last eighth, or every third layer between), `more_v` (so
  by value projections), `imatrix`, `falcon`, `dflash-draft`, `glm5-next` (architectures), `70B`
  (size class), `big_vocabulary`, `tied`, `ragged` (row not a multiple of 256), `unfit` (nor of the
  base type's block), `experts` (a matrix for each expert); `!` negates.
- `count`: what the row counts, layers by their ffn matrices where the model has no experts (or
  always, with `by_count`), or "value".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...formats.ftypes import FILE_TYPES
from ...formats.source import TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType, ggml_type

WORDS = frozenset(
    [
        "first/8",
        "first/16",
        "middle",
        "more",
        "more_v",
        "imatrix",
        "falcon",
        "dflash-draft",
        "glm5-next",
        "70B",
        "big_vocabulary",
        "tied",
        "ragged",
        "unfit",
        "experts",
    ]
)
COMPARISON = re.compile(r"([EGv])(>=|<|=)(\d+)")
VALUES = "value"  # what rows of value projections count
STEPS = {
    "step": (
        """IQ3_S: Q2_K IQ3_XXS; IQ3_K_R4: Q2_K_R4 IQ3_XXS_R4; Q4_K: Q3_K IQ3_S; IQ4_K: IQ3_K; IQ4_KS: IQ3_KS IQ2_KL;
               Q4_K_R4: IQ3_S_R4 Q3_K_R4; Q5_K: Q4_K IQ4_XS IQ4_NL IQ4_NL_R4 IQ4_XS_R8; IQ5_K: IQ4_K IQ4_KS; Q6_K: Q5_K;
               IQ6_K: IQ5_K IQ5_KS"""
    ),
    "step70": "Q5_K: Q3_K Q4_K; IQ5_K: IQ3_K",
}


@dataclass(frozen=True)
class Choice:
    """`result` (a type, `base` or a name of STEPS) if all `conditions` hold."""

    conditions: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class Row:
    """What tensors get whose name contains `part`. `lines`: (presets, or None for all, and
    choices).
    """

    part: str
    lines: tuple[tuple[frozenset[str] | None, tuple[Choice, ...]], ...]
    flag: str = ""
    when: tuple[str, ...] = ()
    count: str = ""
    by_count: bool = False

    def choices(self, preset: str) -> list[Choice]:
        """Those for a preset, in order."""
        return [
            choice
            for presets, choices in self.lines
            if presets is None or preset in presets
            for choice in choices
        ]


def row(
    part: str,
    text: str = "",
    *,
    flag: str = "",
    when: str = "",
    count: str = "",
    by_count: bool = False,
) -> Row:
    """A row of lines that are written as above. RuntimeError for words that mean nothing."""
    lines = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        presets, _, choices = line.partition(":")
        names = None if presets == "*" else frozenset(presets.split())
        if unknown := (names or frozenset()) - FILE_TYPES.keys():
            raise RuntimeError(f"no presets: {sorted(unknown)}")
        lines.append((names, tuple(_choice(choice) for choice in choices.split(","))))
    return Row(
        part, tuple(lines), flag, tuple(_condition(word) for word in when.split()), count, by_count
    )


def _choice(text: str) -> Choice:
    *conditions, result = text.split()
    if result != "base" and result not in STEPS:
        ggml_type(result)
    return Choice(tuple(_condition(word) for word in conditions), result)


def _condition(word: str) -> str:
    if word.removeprefix("!") not in WORDS and not COMPARISON.fullmatch(word):
        raise RuntimeError(f"unknown condition {word!r}")
    return word


def step_up(base: GGMLType, step: str) -> GGMLType:
    """The type that `step` puts in the place of `base`."""
    for entry in STEPS[step].split(";"):
        better, _, names = entry.partition(":")
        if base.name in names.split():
            return ggml_type(better.strip())
    return base


@dataclass(frozen=True)
class RuleSet:
    """What one tool does: its mixes, and what it does with single tensors beside them.

    presets: those it has, None for all. embeddings: rows by tensor, of which `tied` take the
    output's row in models without one. chains: by preset, beside the general one. value_parts: what
    is counted as a value projection, by parts of names. need_preset, need_type: names of presets
    and types that are refused without an importance matrix, beside `GGMLType.needs_importance`.
    no_need: tensors that never need one. short_rows: what stands in for types by name, where rows
    are not a multiple of their block. protected: parts of names of tensors that are kept;
    protected_in: the same by architecture. sorted_by_layer: whether rows that count see the tensors
    by layer and name, those of no layer first, and not in the order of the file.
    """

    name: str
    output: Row
    embeddings: Mapping[str, Row]
    general: tuple[Row, ...]
    chains: Mapping[str, tuple[Row, ...]]
    tied: tuple[str, ...]
    value_parts: tuple[str, ...]
    no_need: tuple[str, ...]
    protected: tuple[str, ...]
    presets: frozenset[str] | None = None
    need_preset: frozenset[str] = frozenset()
    need_type: frozenset[str] = frozenset()
    short_rows: Mapping[str, str] = field(default_factory=dict)
    protected_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sorted_by_layer: bool = False

    def chain_of(self, preset: str) -> tuple[Row, ...]:
        """The rows of a preset, which a tensor's name is tried against in order."""
        return self.chains.get(preset, self.general)

    def in_order(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        """The tensors in the order in which rows count them."""
        return sorted(tensors, key=_layer_and_name) if self.sorted_by_layer else list(tensors)


def _layer_and_name(tensor: TensorInfo) -> tuple[int, bytes]:
    layer = TensorName.parse(tensor.name).layer
    return -1 if layer is None else layer, tensor.name.encode(errors="surrogateescape")


def by_preset(chains: Mapping[str, tuple[Row, ...]]) -> dict[str, tuple[Row, ...]]:
    """Chains by single presets, of chains by names of several."""
    return {name: chain for names, chain in chains.items() for name in names.split()}


_SAME = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def preset_name(name: str) -> str:
    """The name that rules have for a preset: its own, or that of the preset it is short for."""
    return _SAME.get(name, name)
