"""The settings that `iqforge bench` takes lists of, and the matrix of runs that they make. Imports
nothing heavy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...formats.options import Options
from ..options import ChunkOptions, LoadOptions
from .ignored_flags import BY_FLAG, add_ignored_flags
from .ignored_flags import given as given_flags

_ON = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}


@dataclass(frozen=True)
class Option:
    """One setting. `field`: its name in outputs; `column`: in the md table; `reload`: the model is
    loaded again where it changes.
    """

    field: str
    flags: tuple[str, ...]
    kind: type
    default: Any
    column: str
    help: str
    reload: bool = False
    between: str = ","

    def parse(self, word: str) -> Any:
        """Return the value of a word. UsageError for an invalid value."""
        if self.kind is bool:
            if word.lower() not in _ON:
                raise UsageError(f"{self.flags[0]} takes 0 or 1, got '{word}'")
            return _ON[word.lower()]
        if (ignored := BY_FLAG.get(self.flags[0])) is not None:
            ignored.check(word)
        try:
            return self.kind(word)
        except ValueError:
            raise UsageError(f"{self.flags[0]} takes numbers, got '{word}'") from None


def _flags_of(field: str, options: type[Options] = LoadOptions) -> tuple[str, ...]:
    """Return the flags that every other command has for the same setting."""
    return options.flags_of(field)


# In the order of loops, outermost first; columns of the md table come in this order, too.
OPTIONS = (
    Option(
        "precision",
        _flags_of("precision"),
        str,
        "",
        "precision",
        "f32 (the reference path), bf16 or f16 (default: bf16 on a GPU)",
        True,
    ),
    Option("n_gpu_layers", _flags_of("gpu_layers"), int, 99, "ngl", "layers on the GPU", True),
    Option(
        "n_cpu_moe",
        _flags_of("n_cpu_moe"),
        int,
        0,
        "ncmoe",
        "layers whose experts stay on the CPU",
        True,
    ),
    Option(
        "override_tensor",
        _flags_of("override_tensor"),
        str,
        "",
        "ot",
        "REGEX=CPU or CUDAn, also several; lists with ;",
        True,
        ";",
    ),
    Option(
        "muge",
        _flags_of("merge_gate_up"),
        bool,
        False,
        "muge",
        "gate and up experts as one matrix",
        True,
    ),
    Option(
        "flash_attn",
        _flags_of("flash_attn"),
        bool,
        True,
        "fa",
        "attention without a matrix of scores",
        True,
    ),
    Option(
        "attn_max_batch",
        _flags_of("attention_max_batch"),
        int,
        0,
        "amb",
        "most MiB for scores with -fa 0, 0: no bound",
        True,
    ),
    Option(
        "mla_attn",
        _flags_of("mla"),
        int,
        3,
        "mla",
        "form of latent attention: 0 to 3, as for `iqforge generate`",
        True,
    ),
    Option(
        "ser",
        _flags_of("expert_reduction"),
        str,
        "",
        "ser",
        "K,T: K experts, more where p > T * best; lists with ;",
        True,
        ";",
    ),
    Option("n_ubatch", _flags_of("ubatch"), int, 512, "n_ubatch", "tokens in one pass", True),
    Option(
        "n_batch",
        _flags_of("batch_tokens", ChunkOptions),
        int,
        2048,
        "n_batch",
        "tokens in one call",
    ),
    Option("type_k", _flags_of("cache_type_k"), str, "f16", "type_k", "type of cached keys"),
    Option("type_v", _flags_of("cache_type_v"), str, "f16", "type_v", "type of cached values"),
    Option(
        "k_cache_hadamard",
        _flags_of("k_cache_hadamard"),
        bool,
        False,
        "khad",
        "Hadamard transform of quantized keys",
    ),
    Option(
        "v_cache_hadamard",
        _flags_of("v_cache_hadamard"),
        bool,
        False,
        "vhad",
        "Hadamard transform of quantized values",
    ),
    Option("main_gpu", ("-mg", "--main-gpu"), int, 0, "mg", ""),
    Option("split_mode", ("-sm", "--split-mode"), str, "layer", "sm", ""),
    Option("tensor_split", ("-ts", "--tensor-split"), str, "", "ts", ""),
    Option("no_kv_offload", ("-nkvo", "--no-kv-offload"), bool, False, "nkvo", ""),
    Option("repack", ("-rtr", "--run-time-repack"), bool, False, "rtr", ""),
    Option("mqkv", ("-mqkv", "--merge-qkv"), bool, False, "mqkv", ""),
    Option("reuse", ("-gr", "--graph-reuse"), bool, True, "gr", ""),
    Option("use_mmap", ("-mmp", "--mmap"), bool, True, "mmap", ""),
    Option("embeddings", ("-embd", "--embeddings"), bool, False, "embd", ""),
    Option("fused_moe", ("-fmoe", "--fused-moe"), bool, True, "fmoe", ""),
    Option("grouped_er", ("-ger", "--grouped-expert-routing"), bool, False, "ger", ""),
    Option("use_thp", ("-thp", "--transparent-huge-pages"), bool, False, "thp", ""),
    Option(
        "n_threads", _flags_of("threads"), int, 0, "threads", "CPU threads (default: one per core)"
    ),
)
# Accepted because scripts for the reference's tool pass them. `ignored_flags.py` has the others.
_WITHOUT_EFFECT = {
    "-mmp": "weights on the CPU are read through the page cache",
    "-embd": "logits are always computed",
    "-thp": "that is up to the system",
}
_ALL_ON_CPU = "everything is on the CPU"


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add a flag for every option; values are lists, from commas and from repeating the flag."""
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
            metavar="LIST",
            help=shown or argparse.SUPPRESS,
        )
    add_ignored_flags(parser, {flag for option in OPTIONS for flag in option.flags})


def values_of(args: argparse.Namespace, option: Option) -> list:
    """Return what the user asked for, or the default."""
    words = [
        word for given in getattr(args, option.field) or () for word in given.split(option.between)
    ]
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
    from ..state.cache_types import CACHE_TYPES

    reasons = {flag: ignored.why for flag, ignored in BY_FLAG.items()} | _WITHOUT_EFFECT
    given = {option.field: values_of(args, option) for option in OPTIONS}
    if on_cpu:
        reasons |= dict.fromkeys(("-ngl", "-ncmoe", "-ot"), _ALL_ON_CPU)
    if all(given["flash_attn"]):
        reasons |= {"-amb": "flash attention has no matrix of scores"}
    for flag, field in (("-khad", "type_k"), ("-vhad", "type_v")):
        if not any(CACHE_TYPES[name.lower()].is_quantized for name in given[field]):
            reasons |= {flag: "the cache is not quantized"}
    lines = [
        f"note: {option.flags[0]} changes nothing here: {reasons[option.flags[0]]}"
        for option in OPTIONS
        if option.flags[0] in reasons and getattr(args, option.field)
    ]
    lines += [
        f"note: {ignored.flag} changes nothing here: {ignored.why}" for ignored in given_flags(args)
    ]
    return lines + (
        [f"note: --fit changes nothing here: {_ALL_ON_CPU}"]
        if on_cpu and args.fit is not None
        else []
    )


def integers(given: list[str] | None, default: list[int], flag: str) -> list[int]:
    """Numbers of a flag that may have been given several times."""
    return [_size(word, flag) for words in given for word in words.split(",")] if given else default


def pairs(given: list[str] | None, flag: str) -> list[tuple[int, int]]:
    """`P,G` of every time the flag was given."""
    found = []
    for text in given or ():
        words = text.split(",")
        if len(words) != 2:
            raise UsageError(f"{flag} takes two numbers P,G, got '{text}'")
        found.append((_size(words[0], flag, 1), _size(words[1], flag, 1)))
    return found


def _size(word: str, flag: str, least: int = 0) -> int:
    if not word.strip().isdecimal() or int(word) < least:
        raise UsageError(f"{flag} takes numbers of tokens, got '{word}'")
    return int(word)
