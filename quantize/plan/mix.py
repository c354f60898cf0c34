"""Applies a set of rules to the tensors of a model, one after another."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

from ...formats.ftypes import FileType
from ...formats.source import TensorInfo
from ...formats.types import GGMLType, ggml_type
from .roles import OUTPUT, ModelFacts, layer_of
from .rules import COMPARISON, STEPS, VALUES, Row, RuleSet, preset_name, step_up

_COMPARE = {">=": operator.ge, "<": operator.lt, "=": operator.eq}


def more_bits(i: int, n: int) -> bool:
    """Whether layer `i` of `n` is one of those that some presets spend more on: the first and last
    eighth, every third between.
    """
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


class Mix:
    """The types a preset mixes. `type_of` is asked once for every tensor that is quantized, in
    `rules.in_order`, as some rules count.

    imatrix: there is an importance matrix with entries. flags: types the user gives to roles, by
    the names that rows have for them; `used` collects the flags that counted.
    """

    def __init__(
        self,
        rules: RuleSet,
        preset: FileType,
        facts: ModelFacts,
        imatrix: bool,
        flags: Mapping[str, GGMLType] | None = None,
    ):
        self.rules = rules
        self.preset, self.base, self.facts, self.imatrix = (
            preset_name(preset.name),
            preset.base,
            facts,
            imatrix,
        )
        self.flags, self.used = flags or {}, set()
        self._chain = rules.chain_of(self.preset)
        self._seen: Counter[str] = Counter()  # tensors so far, by what rows count

    def type_of(self, tensor: TensorInfo) -> tuple[GGMLType, str]:
        """The type for `tensor`, not yet asked whether its rows can have it, and the flag that gave
        it, if one did.

        UsageError if a rule needs a layer that its name lacks.
        """
        row = self._row(tensor)
        if row is None:
            return self.base, ""
        chosen = self._choose(row, tensor)
        if row.count:
            self._seen[row.count] += 1
        return chosen, row.flag if row.flag in self.flags else ""

    def _row(self, tensor: TensorInfo) -> Row | None:
        if tensor.name == OUTPUT or (self.facts.tied and tensor.name in self.rules.tied):
            return self.rules.output
        if tensor.name in self.rules.embeddings:
            return self.rules.embeddings[tensor.name]
        return next(
            (
                row
                for row in self._chain
                if row.part in tensor.name and self._all(row.when, row, tensor)
            ),
            None,
        )

    def _choose(self, row: Row, tensor: TensorInfo) -> GGMLType:
        if row.flag in self.flags:
            self.used.add(row.flag)
            return self.flags[row.flag]
        for choice in row.choices(self.preset):
            if self._all(choice.conditions, row, tensor):
                if choice.result in STEPS:
                    return step_up(self.base, choice.result)
                return self.base if choice.result == "base" else ggml_type(choice.result)
        return self.base

    def _all(self, conditions: tuple[str, ...], row: Row, tensor: TensorInfo) -> bool:
        return all(self._holds(word, row, tensor) for word in conditions)

    def _holds(self, word: str, row: Row, tensor: TensorInfo) -> bool:
        if word.startswith("!"):
            return not self._holds(word[1:], row, tensor)
        if compared := COMPARISON.fullmatch(word):
            value = {
                "E": self.facts.n_experts,
                "G": self.facts.heads_per_kv,
                "v": self._seen[VALUES],
            }[compared[1]]
            return _COMPARE[compared[2]](value, int(compared[3]))
        facts, n = self.facts, self.facts.n_layers
        match word:
            case "first/8":
                return self._layer(row, tensor) < n // 8
            case "first/16":
                return self._layer(row, tensor) < n // 16
            case "middle":
                return n // 8 <= self._layer(row, tensor) < 7 * n // 8
            case "more":
                return more_bits(self._layer(row, tensor), n)
            case "more_v":
                return more_bits(self._seen[VALUES], facts.n_values)
            case "imatrix":
                return self.imatrix
            case "70B":
                return facts.size_class == word
            case "big_vocabulary":
                return facts.big_vocabulary
            case "tied":
                return facts.tied
            case "ragged":
                return tensor.n_cols % 256 != 0
            case "unfit":
                return tensor.n_cols % self.base.block_size != 0
            case "experts":
                return tensor.n_matrices > 1 and (
                    facts.architecture != "bailingmoe3" or "ffn_" in tensor.name
                )
            case _:
                return facts.architecture == word

    def _layer(self, row: Row, tensor: TensorInfo) -> int:
        if self.facts.n_experts > 1 and not row.by_count:
            return layer_of(tensor.name, self.facts.n_layers)
        return self._seen[row.count]
