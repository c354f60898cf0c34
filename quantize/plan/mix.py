"""Apply the mix rules of a preset to the tensors of a model, one after another."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

from ...formats.ftypes import FileType
from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT
from ...formats.types import GGMLType, ggml_type
from .mix_rules import COMPARISON, STEPS, VALUES, MixRule, RuleSet, preset_name, step_up
from .roles import ModelFacts, layer_of

_COMPARE = {">=": operator.ge, "<": operator.lt, "=": operator.eq}


def more_bits(i: int, n: int) -> bool:
    """Return whether some presets spend more bits on layer `i` of `n`: the first and last eighth,
    and every third layer between.
    """
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


class Mix:
    """The mix of a preset. Call `type_of` once for every tensor that is quantized, in the order of
    `RuleSet.in_order`, as some rules count tensors.

    imatrix: there is an importance matrix with entries. flags: types that the user gives to roles,
    by the flag names of the rules. `used` collects the flags that had an effect.
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
        self._seen: Counter[str] = Counter()  # tensors so far, by the key that rules count

    def type_of(self, tensor: TensorInfo) -> tuple[GGMLType, str]:
        """Return the type for `tensor`, and the flag that gave it, or "". Whether the rows of the
        tensor can have the type is not checked here.

        Raise UsageError if a rule needs a layer and the name has none.
        """
        rule = self._rule(tensor)
        if rule is None:
            return self.base, ""
        chosen = self._choose(rule, tensor)
        if rule.count:
            self._seen[rule.count] += 1
        return chosen, rule.flag if rule.flag in self.flags else ""

    def _rule(self, tensor: TensorInfo) -> MixRule | None:
        if tensor.name == OUTPUT or (self.facts.tied and tensor.name in self.rules.tied):
            return self.rules.output
        if tensor.name in self.rules.embeddings:
            return self.rules.embeddings[tensor.name]
        return next(
            (
                rule
                for rule in self._chain
                if rule.part in tensor.name and self._all(rule.when, rule, tensor)
            ),
            None,
        )

    def _choose(self, rule: MixRule, tensor: TensorInfo) -> GGMLType:
        if rule.flag in self.flags:
            self.used.add(rule.flag)
            return self.flags[rule.flag]
        for choice in rule.choices(self.preset):
            if self._all(choice.conditions, rule, tensor):
                if choice.result in STEPS:
                    return step_up(self.base, choice.result)
                return self.base if choice.result == "base" else ggml_type(choice.result)
        return self.base

    def _all(self, conditions: tuple[str, ...], rule: MixRule, tensor: TensorInfo) -> bool:
        return all(self._holds(word, rule, tensor) for word in conditions)

    def _holds(self, word: str, rule: MixRule, tensor: TensorInfo) -> bool:
        if word.startswith("!"):
            return not self._holds(word[1:], rule, tensor)
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
                return self._layer(rule, tensor) < n // 8
            case "first/16":
                return self._layer(rule, tensor) < n // 16
            case "middle":
                return n // 8 <= self._layer(rule, tensor) < 7 * n // 8
            case "more":
                return more_bits(self._layer(rule, tensor), n)
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

    def _layer(self, rule: MixRule, tensor: TensorInfo) -> int:
        if self.facts.n_experts > 1 and not rule.by_count:
            return layer_of(tensor.name, self.facts.n_layers)
        return self._seen[rule.count]
