"""The language in which `presets` and `mainline` say which tensor gets which type.

- A preset belongs to one chain. A chain is a list of `MixRule`s; a tensor takes the first rule
  whose part its name contains and whose `when` holds. A tensor without a rule gets the preset's
  base type. The output matrix (or the token embedding, if it also serves as the output) and the
  embeddings have rules that come before any chain.
- Lines of a rule are `PRESETS: choice, choice, ..`, with `*` for all presets. A choice is a type
  after any number of conditions. The first choice whose conditions hold counts, in any line for the
  preset; if none holds, the base type does. `flag` names the type of the user that takes
  precedence.
- `base` is the base type. `step` and `step70` are one step up from it, by `STEPS`, or the base type
  if there is no step.
- Conditions: `E>=4` experts, `G>=4` query heads per key head, `v<2` value projections so far,
  `first/8` and `first/16` (the layer is in that part of the layers), `middle` (neither in the first
  nor the last eighth), `more` (in the first or last eighth, or every third layer between), `more_v`
  (the same, counted in value projections), `imatrix`, `falcon`, `dflash-draft`, `glm5-next`
  (architectures), `70B` (size class), `big_vocabulary`, `tied`, `ragged` (the row length is not a
  multiple of 256), `unfit` (nor of the base type's block), `experts` (the tensor has a matrix per
  expert). `!` negates.
- `count`: what the rule counts. Layers are counted by their ffn matrices in models without experts
  (or always, with `by_count`); "value" counts value projections.
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
VALUES = "value"  # what rules of value projections count
STEPS = {
    "step": """
        IQ3_S: Q2_K IQ3_XXS; IQ3_K_R4: Q2_K_R4 IQ3_XXS_R4; Q4_K: Q3_K IQ3_S; IQ4_K: IQ3_K;
        IQ4_KS: IQ3_KS IQ2_KL; Q4_K_R4: IQ3_S_R4 Q3_K_R4;
        Q5_K: Q4_K IQ4_XS IQ4_NL IQ4_NL_R4 IQ4_XS_R8; IQ5_K: IQ4_K IQ4_KS; Q6_K: Q5_K;
        IQ6_K: IQ5_K IQ5_KS
    """,
    "step70": "Q5_K: Q3_K Q4_K; IQ5_K: IQ3_K",
}


@dataclass(frozen=True)
class MixChoice:
    """`result` (a type, `base` or a name of STEPS) if all `conditions` hold."""

    conditions: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class MixRule:
    """The types of tensors whose name contains `part`. lines: (presets, None for all; choices)."""

    part: str
    lines: tuple[tuple[frozenset[str] | None, tuple[MixChoice, ...]], ...]
    flag: str = ""
    when: tuple[str, ...] = ()
    count: str = ""
    by_count: bool = False

    def choices(self, preset: str) -> list[MixChoice]:
        """Return the choices for a preset, in order."""
        return [
            choice
            for presets, choices in self.lines
            if presets is None or preset in presets
            for choice in choices
        ]


def mix_rule(
    part: str,
    text: str = "",
    *,
    flag: str = "",
    when: str = "",
    count: str = "",
    by_count: bool = False,
) -> MixRule:
    """Return a rule from lines in the language above. Raise RuntimeError for unknown words."""
    lines = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        presets, _, choices = line.partition(":")
        names = None if presets == "*" else frozenset(presets.split())
        if unknown := (names or frozenset()) - FILE_TYPES.keys():
            raise RuntimeError(f"unknown presets: {sorted(unknown)}")
        lines.append((names, tuple(_choice(choice) for choice in choices.split(","))))
    return MixRule(
        part, tuple(lines), flag, tuple(_condition(word) for word in when.split()), count, by_count
    )


def _choice(text: str) -> MixChoice:
    *conditions, result = text.split()
    if result != "base" and result not in STEPS:
        ggml_type(result)
    return MixChoice(tuple(_condition(word) for word in conditions), result)


def _condition(word: str) -> str:
    if word.removeprefix("!") not in WORDS and not COMPARISON.fullmatch(word):
        raise RuntimeError(f"unknown condition {word!r}")
    return word


def step_up(base: GGMLType, step: str) -> GGMLType:
    """Return the type that `step` replaces `base` with."""
    for entry in STEPS[step].split(";"):
        better, _, names = entry.partition(":")
        if base.name in names.split():
            return ggml_type(better.strip())
    return base


@dataclass(frozen=True)
class RuleSet:
    """The mixes of one tool, and its rules for single tensors.

    presets: the presets it has, None for all. embeddings: rules by tensor; those in `tied` take the
    output's rule in models without an output matrix. chains: by preset, for those that do not use
    the general chain. value_parts: parts of the names of value projections. need_preset, need_type:
    presets and types that are refused without an importance matrix, in addition to
    `GGMLType.needs_importance`. no_need: tensors that never need one. short_rows: fallbacks by type
    for rows that are not a multiple of its block. protected: parts of the names of tensors that are
    kept; protected_in: the same by architecture. sorted_by_layer: rules that count see the tensors
    by layer and name, those without a layer first, instead of in the order of the file.
    """

    name: str
    output: MixRule
    embeddings: Mapping[str, MixRule]
    general: tuple[MixRule, ...]
    chains: Mapping[str, tuple[MixRule, ...]]
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

    def chain_of(self, preset: str) -> tuple[MixRule, ...]:
        """Return the rules of a preset in the order in which they are tried."""
        return self.chains.get(preset, self.general)

    def in_order(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return the tensors in the order in which rules count them."""
        return sorted(tensors, key=_layer_and_name) if self.sorted_by_layer else list(tensors)


def _layer_and_name(tensor: TensorInfo) -> tuple[int, bytes]:
    layer = TensorName.parse(tensor.name).layer
    return -1 if layer is None else layer, tensor.name.encode(errors="surrogateescape")


def by_preset(chains: Mapping[str, tuple[MixRule, ...]]) -> dict[str, tuple[MixRule, ...]]:
    """Split chains whose key names several presets into one entry per preset."""
    return {name: chain for names, chain in chains.items() for name in names.split()}


_SAME = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def preset_name(name: str) -> str:
    """Return the name that rules use for a preset: `Q4_K` is short for `Q4_K_M`."""
    return _SAME.get(name, name)
