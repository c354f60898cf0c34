"""The settings that `iqforge bench` takes lists of, and the matrix of runs that they make. Imports
nothing heavy.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....errors import UsageError
from ....formats.flags import Constant
from ....formats.options import Options
from ...bench.options import BenchOptions
from ...options import LoadOptions, split_options
from ...parallel.modes import split_notes
from ...text_options import ChunkOptions
from ...weights.switches import parse_on_off
from ..ignored_flags import BY_FLAG, add_ignored_flags
from ..ignored_flags import given as given_flags

_ON = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}


@dataclass(frozen=True)
class Option:
    """One setting. `field`: its name in outputs; `column`: in the md table; `reload`: the model is
    loaded again where it changes. `constants`: flags that stand for a word. `named`: as in `Flag`.
    """

    field: str
    flags: tuple[str, ...]
    kind: type
    default: Any
    column: str
    help: str
    reload: bool = False
    between: str = ","
    constants: tuple[Constant, ...] = ()
    named: Mapping[str, Any] | None = None

    def parse(self, word: str) -> Any:
        """Return the value of a word. UsageError for an invalid value."""
        if self.field in ("flash_attn", "dsa"):
            return parse_on_off(self.flags[0], word.lower())
        if self.kind is bool:
            if word.lower() not in _ON:
                raise UsageError(f"{self.flags[0]} takes 0 or 1, got '{word}'")
            return _ON[word.lower()]
        if (ignored := BY_FLAG.get(self.flags[0])) is not None:
            ignored.check(word)
        if self.named is not None and word in self.named:
            return self.default if self.named[word] is None else self.named[word]
        try:
            return self.kind(word)
        except ValueError:
            raise UsageError(f"{self.flags[0]} takes numbers, got '{word}'") from None


def _setting(
    field: str,
    name: str,
    column: str,
    *,
    default: Any = None,
    reload: bool = True,
    between: str = ",",
    of: type[Options] = LoadOptions,
    declared: type[Options] | None = None,
    constants: tuple[Constant, ...] = (),
) -> Option:
    """Return the setting that every other command has one value for: field `name` of `of`, with its
    flags. Kind, help and default are those of the same field, or of `field` in `declared`.

    default: what an output says where the field's default is None, which leaves it to the model.
    """
    flag = of.flag_of(name)
    shared = flag if declared is None else declared.flag_of(field)
    found = of.default_of(name) if declared is None else declared.default_of(field)
    value = found if default is None else default
    kind = bool if isinstance(value, bool) else shared.kind
    form = "" if shared.metavar in (None, "N") else f"{shared.metavar}: "  # of one value
    help = form + shared.help + ("" if between == "," else f"; lists with {between}")
    constants += tuple(replace(one, value=str(int(one.value))) for one in flag.constants)
    return Option(
        field, flag.names, kind, value, column, help, reload, between, constants, flag.named
    )


_CPU_MOE = LoadOptions.flag_of("cpu_moe")
_ALL_EXPERTS = Constant(_CPU_MOE.names, "999", _CPU_MOE.help)  # more layers than any model has

# In the order of loops, outermost first; columns of the md table come in this order, too.
OPTIONS = (
    _setting("precision", "precision", "precision", default=""),
    _setting("n_gpu_layers", "gpu_layers", "ngl", default=99),
    _setting("n_cpu_moe", "n_cpu_moe", "ncmoe", default=0, constants=(_ALL_EXPERTS,)),
    _setting("override_tensor", "override_tensor", "ot", default="", between=";"),
    _setting("muge", "merge_gate_up", "muge"),
    _setting("flash_attn", "flash_attn", "fa"),
    _setting("attn_max_batch", "attention_max_batch", "amb"),
    _setting("mla_attn", "mla", "mla"),
    _setting("dsa", "sparse_attention", "dsa"),
    _setting("swa_full", "swa_full", "swa_full"),
    _setting("ser", "expert_reduction", "ser", default="", between=";"),
    _setting("cache_size", "cache_size", "cache_size"),
    _setting("n_ubatch", "ubatch", "n_ubatch", default=512),
    _setting(
        "n_batch", "batch_tokens", "n_batch", reload=False, of=ChunkOptions, declared=BenchOptions
    ),
    _setting("type_k", "cache_type_k", "type_k", default="f16", reload=False),
    _setting("type_v", "cache_type_v", "type_v", default="f16", reload=False),
    _setting("k_cache_hadamard", "k_cache_hadamard", "khad", reload=False),
    _setting("v_cache_hadamard", "v_cache_hadamard", "vhad", reload=False),
    Option("no_kv_offload", ("-nkvo", "--no-kv-offload"), bool, False, "nkvo", ""),
    Option("repack", ("-rtr", "--run-time-repack"), bool, False, "rtr", ""),
    Option("mqkv", ("-mqkv", "--merge-qkv"), bool, False, "mqkv", ""),
    Option("reuse", ("-gr", "--graph-reuse"), bool, True, "gr", ""),
    Option("use_mmap", ("-mmp", "--mmap"), bool, True, "mmap", ""),
    Option("embeddings", ("-embd", "--embeddings"), bool, False, "embd", ""),
    Option("fused_moe", ("-fmoe", "--fused-moe"), bool, True, "fmoe", ""),
    Option("grouped_er", ("-ger", "--grouped-expert-routing"), bool, False, "ger", ""),
    Option("use_thp", ("-thp", "--transparent-huge-pages"), bool, False, "thp", ""),
    _setting("n_threads", "threads", "threads", reload=False),
)
# Accepted because scripts for the reference's tool pass them. `ignored_flags.py` has the others.
_WITHOUT_EFFECT = {
    "-mmp": "weights on the CPU are read through the page cache",
    "-embd": "logits are always computed",
}
_MOST_NUMBERS = 10_000  # of a range, so that a typing error is not a list without end
_ALL_ON_CPU = "everything is on the CPU"


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add a flag for every option; values are lists, from commas and from repeating the flag. A
    switch without a value is on, as in tools that take no lists.
    """
    for option in OPTIONS:
        shown = option.help and f"{option.help}" + (
            f" (default: {int(option.default) if option.kind is bool else option.default})"
            if "default" not in option.help and option.default != ""
            else ""
        )
        parser.add_argument(
            *option.flags,
            dest=option.field,
            action="append",
            nargs="?" if option.kind is bool else None,
            const="1" if option.kind is bool else None,
            metavar="LIST",
            help=shown or argparse.SUPPRESS,
        )
        for one in option.constants:
            sets = {"dest": option.field, "action": "append_const", "const": one.value}
            parser.add_argument(*one.names, **sets, help=one.help)
    add_ignored_flags(parser, with_values=True)


def values_of(args: argparse.Namespace, option: Option) -> list:
    """Return what the user asked for, or the default. UsageError for an empty text instead of a
    list; between others, nothing stands for a run without the flag.
    """
    lists = getattr(args, option.field) or ()
    if "" in lists:
        raise UsageError(f"{option.flags[0]} is empty")
    words = [word for given in lists for word in given.split(option.between)]
    if option.kind is int:
        words = [one for word in words for one in _in_range(word, option.flags[0])]
    return [option.parse(word) for word in words] or [option.default]


def settings_matrix(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All combinations, the last options changing fastest."""
    for values in itertools.product(*(values_of(args, option) for option in OPTIONS)):
        yield dict(zip((option.field for option in OPTIONS), values, strict=True))


def varied(args: argparse.Namespace) -> list[Option]:
    """Options that have several values or one that is not the default: the md table has a column
    for each.
    """
    return [option for option in OPTIONS if values_of(args, option) != [option.default]]


def notes(args: argparse.Namespace, on_cpu: bool) -> list[str]:
    """One line for each option that was given and changes nothing, on this kind of device or beside
    the others.
    """
    import torch

    from ...state.cache_types import CACHE_TYPES

    reasons = {flag: ignored.why for flag, ignored in BY_FLAG.items()} | _WITHOUT_EFFECT
    given = {option.field: values_of(args, option) for option in OPTIONS}
    if on_cpu:
        reasons |= dict.fromkeys(("-ngl", "-ncmoe", "-ot"), _ALL_ON_CPU)
    for flag, field, what in (("-khad", "type_k", "keys"), ("-vhad", "type_v", "values")):
        if not any(CACHE_TYPES[name.lower()].is_quantized for name in given[field]):
            reasons |= {flag: f"{what} are not quantized"}
    lines = [
        f"note: {option.flags[0]} changes nothing here: {reasons[option.flags[0]]}"
        for option in OPTIONS
        if option.flags[0] in reasons and getattr(args, option.field)
    ]
    lines += [
        f"note: {ignored.flag} changes nothing here: {ignored.why}" for ignored in given_flags(args)
    ]
    device = torch.device("cpu" if on_cpu else "cuda")
    chosen = split_options(args)
    lines += [
        f"note: {flags} {'change' if ',' in flags else 'changes'} nothing here: {why}"
        for flags, why in split_notes(chosen, chosen.split(device), not on_cpu)
    ]
    return lines + (
        [f"note: --fit changes nothing here: {_ALL_ON_CPU}"]
        if on_cpu and args.fit is not None
        else []
    )


def integers(given: list[str] | None, default: Sequence[int], flag: str) -> Sequence[int]:
    """Numbers of a flag that may have been given several times."""
    words = [word for text in given or () for word in text.split(",")]
    return [_size(one, flag) for word in words for one in _in_range(word, flag)] or default


def pairs(given: list[str] | None, flag: str) -> list[tuple[int, int]]:
    """`P,G` of every time the flag was given. Raise UsageError for other text."""
    found = []
    for text in given or ():
        words = text.split(",")
        if len(words) != 2:
            raise UsageError(f"{flag} takes two numbers P,G, got '{text}'")
        found.append((_size(words[0], flag, 1), _size(words[1], flag, 1)))
    return found


def _in_range(word: str, flag: str) -> list[str]:
    """Return the numbers of llama-bench's `FIRST-LAST`, `FIRST-LAST+STEP` and `FIRST-LAST*FACTOR`;
    of anything else, the word. UsageError for a range that never ends, or has too many numbers.
    """
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})(?:([+*])(\d{1,9}))?", word.strip())
    if found is None:
        return [word]
    number, last, step = int(found[1]), int(found[2]), int(found[4] or 1)
    numbers: list[str] = []
    while number <= last and len(numbers) <= _MOST_NUMBERS:  # a step may be 0
        numbers.append(str(number))
        number = number * step if found[3] == "*" else number + step
    if not 1 <= len(numbers) <= _MOST_NUMBERS:
        raise UsageError(f"{flag} is '{word}', expected a range of 1 to {_MOST_NUMBERS} numbers")
    return numbers


def _size(word: str, flag: str, least: int = 0) -> int:
    if not word.strip().isdecimal() or int(word) < least:
        raise UsageError(f"{flag} takes numbers of tokens, got '{word}'")
    return int(word)
