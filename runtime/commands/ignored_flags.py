"""Flags of the reference that choose hardware or change nothing here: accepted, their values
checked, and why they change nothing.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UsageError, printable

_PREFIX = "without effect "


@dataclass(frozen=True)
class Ignored:
    """One flag. `expected`: what its values are, in words, None for a flag without a value, or with
    0 or 1 in commands that take lists; `fits`: whether a text is one. `bare`: the value of the flag
    without a word, None where one is needed.
    """

    spellings: tuple[str, ...]
    why: str
    expected: str | None = None
    fits: Callable[[str], bool] | None = None
    bare: str | None = None

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        return self.spellings[0]

    def check(self, value: object) -> None:
        """UsageError for a value that the reference would not take either."""
        if self.fits is None:
            expected = "0 or 1"
            fits = not isinstance(value, str) or {*value.split(",")} <= {"0", "1"}
        else:
            expected, fits = self.expected, self.fits(str(value))
        if not fits:
            raise UsageError(f"{self.flag} is '{printable(value, 40)}', expected {expected}")


def _number(low: int, high: int) -> tuple[str, Callable[[str], bool]]:
    shown = f"{low} to {high}" if high < _MOST else f"a number from {low} on"
    return shown, lambda text: bool(re.fullmatch(r"-?\d{1,10}", text)) and low <= int(text) <= high


def _one_of(*names: str) -> tuple[str, Callable[[str], bool]]:
    return "one of " + ", ".join(names), lambda text: text in names


def _matching(pattern: str, expected: str) -> tuple[str, Callable[[str], bool]]:
    return expected, lambda text: bool(re.fullmatch(pattern, text))


_MOST = 2**31 - 1
_SWITCH = _one_of("on", "off", "auto")
_PART = r"(\d+(\.\d*)?|\.\d+)"
_RANKS = "with -sm graph every GPU has its own process, and its own graphs"
_PAGES = "weights on the CPU are read through the page cache"
_THREADS = "the system places and ranks threads"
_GRAPHS = (
    "on a GPU a step is one graph unless a layer takes a slower path (--verbose), on the CPU there"
    " are none"
)
_SEQUENCE = "there is one sequence"
_NO_SHIFT = "a context is never shifted"
_THERE = "a layer computes where its weights are"
_TEXT_ONLY = "only text is read"
_CUDA = "fusion|offload-batch-size|mmq-id-size|fa-offset|graphs|enable-p2p"

IGNORED = (
    Ignored(
        ("-fmoe", "--fused-moe"),
        "on a GPU experts run fused wherever there are kernels for that (--verbose says where not),"
        " on the CPU nothing is",
    ),
    Ignored(
        ("-no-fmoe", "--no-fmoe", "--no-fused-moe"),
        "on a GPU experts run fused wherever there are kernels for them (--precision f32 has them"
        " apart)",
    ),
    Ignored(
        ("-rtr", "--run-time-repack"),
        "interleaved rows are undone for GPUs, and on the CPU products use decoded values: `iqforge"
        " repack` writes them to a file",
    ),
    Ignored(
        ("-nr", "--no-repack", "--repack"), "nothing is rearranged on the CPU, and for GPUs always"
    ),
    Ignored(
        ("-mqkv", "--merge-qkv"),
        "on a GPU query, key and value always go in one launch, on the CPU one matrix would be as"
        " fast as three",
    ),
    Ignored(
        ("-ger", "--grouped-expert-routing"),
        "groups of experts are used wherever the model has them",
    ),
    Ignored(("-gr", "--graph-reuse"), _GRAPHS),
    Ignored(("-no-gr", "--no-gr", "--no-graph-reuse"), _GRAPHS),
    Ignored(
        ("-gap", "--graph-attn-precision"),
        "attention adds up in float32 on every rank",
        *_one_of("f16", "f32"),
    ),
    Ignored(("-smgs", "--split-mode-graph-scheduling"), _RANKS),
    Ignored(("-sas", "--scheduler-async", "--scheduler_async"), _RANKS),
    Ignored(
        ("-cuda", "--cuda-params"),
        "kernels are chosen by type and shape, there is nothing to tune",
        *_matching(
            rf"({_CUDA})={_PART}(,({_CUDA})={_PART})*",
            "NAME=NUMBER,.. of " + _CUDA.replace("|", ", "),
        ),
    ),
    Ignored(
        ("-no-fug", "--no-fug", "--no-fused-up-gate"),
        "on a GPU gate and up always go together (--precision f32 has them apart)",
    ),
    Ignored(
        ("-no-mmad", "--no-mmad", "--no-fused-mul-multiadd"),
        "on a GPU weighted sums of experts are always fused (--precision f32 has them apart)",
    ),
    Ignored(("-tb", "--threads-batch"), "-t holds for prompts, too", *_number(-1, _MOST)),
    Ignored(
        ("-tgb", "--threads-gen-batch"),
        "-t holds for prompts, too",
        *_matching(r"\d{1,5},\d{1,5}", "two numbers such as 8,16"),
    ),
    Ignored(("-s", "--seed"), "nothing is drawn at random", *_number(-1, 2**32 - 1)),
    Ignored(("-c", "--ctx-size"), "a context has as many tokens as are needed", *_number(0, _MOST)),
    Ignored(
        ("-b", "--batch-size"),
        "-ub says how many tokens go through the model at a time",
        *_number(1, _MOST),
    ),
    Ignored(("--no-warmup",), "nothing is warmed up"),
    Ignored(("--warmup",), "benchmarks warm up unless --no-warmup is given, and nothing else does"),
    Ignored(("-nkvo", "--no-kv-offload"), "a cache is where its layer is"),
    Ignored(("-kvo", "--kv-offload"), "a cache is where its layer is"),
    Ignored(("--no-op-offload", "-nopo", "--op-offload"), _THERE),
    Ignored(
        ("-op", "--offload-policy"),
        _THERE,
        *_matching(r"-?\d{1,5},[01](,-?\d{1,5},[01])*", "pairs such as -1,0"),
    ),
    Ignored(
        ("-ooae", "--offload-only-active-experts", "-no-ooae", "--no-offload-only-active-experts"),
        "experts on the CPU are copied to the GPU layer by layer, and for prompts only",
    ),
    Ignored(("--mlock",), _PAGES),
    Ignored(("-dio", "--direct-io", "-ndio", "--no-direct-io"), _PAGES),
    Ignored(("--no-host",), _THERE),
    Ignored(
        ("-lm", "--load-mode"),
        _PAGES,
        *_one_of("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
    ),
    Ignored(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), _SEQUENCE),
    Ignored(
        ("-np", "--parallel", "-ns", "--sequences"),
        _SEQUENCE,
        *_matching("0*1", f"1: {_SEQUENCE}"),
    ),
    Ignored(("-cb", "--cont-batching", "-nocb", "--no-cont-batching"), _SEQUENCE),
    Ignored(("--no-mmap", "--mmap"), _PAGES),
    Ignored(
        ("--numa",), _THREADS, *_one_of("distribute", "isolate", "numactl", "interleave", "mirror")
    ),
    Ignored(("--prio", "--prio-batch"), _THREADS, *_number(-1, 3)),
    Ignored(("--poll", "--poll-batch"), "threads that wait do not poll", *_number(0, 100)),
    Ignored(
        ("-C", "--cpu-mask", "-Cb", "--cpu-mask-batch"),
        _THREADS,
        *_matching(r"(0[xX])?[0-9a-fA-F]{1,256}", "a hexadecimal mask"),
    ),
    Ignored(
        ("-Cr", "--cpu-range", "-Crb", "--cpu-range-batch"),
        _THREADS,
        *_matching(r"(?=.*\d)\d{0,5}-\d{0,5}", "a range such as 0-7"),
    ),
    Ignored(("--cpu-strict", "--cpu-strict-batch"), _THREADS, *_number(0, 1)),
    Ignored(("-thp", "--transparent-huge-pages"), "that is up to the system"),
    Ignored(("--simple-io",), "lines are read as they come"),
    Ignored(
        ("--no-perf", "--perf", "--show-timings", "--no-show-timings"),
        "times are always printed at the end",
    ),
    Ignored(("--no-context-shift",), _NO_SHIFT),
    Ignored(
        ("--context-shift",),
        _NO_SHIFT,
        *_matching("off|0", f"off: {_NO_SHIFT}"),
        bare="on",
    ),
    Ignored(("--keep",), _NO_SHIFT, *_number(-1, _MOST)),
    Ignored(("-fitc", "--fit-ctx"), "--fit does not change the context", *_number(0, _MOST)),
    Ignored(
        ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        "what is kept to cut a sequence back is up to the model",
        *_number(0, _MOST),
    ),
    Ignored(("-cram", "--cache-ram"), "only one conversation is kept", *_number(-1, _MOST)),
    Ignored(("-bs", "--backend-sampling"), "on a GPU the usual samplers run there anyway"),
    Ignored(
        ("--spec-type",),
        "a token is generated at a time",
        *_matching("none", "none: there is no speculative decoding"),
    ),
    Ignored(("--no-mmproj", "--no-mmproj-auto", "--mmproj-auto"), _TEXT_ONLY),
    Ignored(("--mmproj-offload", "--no-mmproj-offload"), _TEXT_ONLY),
    Ignored(("--skip-chat-parsing",), "answers are printed as they come"),
    Ignored(("--display-prompt", "--no-display-prompt"), "only `iqforge generate` prints a prompt"),
    Ignored(("-rcache", "--rope-cache"), "angles are computed once for all layers anyway"),
    Ignored(
        ("-dt", "--defrag-thold"),
        "a cache has no holes",
        *_matching("-?" + _PART, "a number such as 0.1"),
    ),
    Ignored(
        ("--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"),
        "messages are printed as they are",
    ),
    Ignored(
        ("--log-colors",), "only errors have colours: NO_COLOR=1 turns them off", *_SWITCH, "auto"
    ),
    Ignored(("--log-disable",), "only results go to stdout: redirect stderr"),
    Ignored(
        ("-lv", "--verbosity", "--log-verbosity"),
        "messages have no levels: --verbose adds some",
        *_number(-1, _MOST),
    ),
    Ignored(("-ptc", "--print-token-count"), "tokens are counted at the end", *_number(-1, _MOST)),
    Ignored(("-co", "--color"), "text is printed without colours", *_SWITCH, "auto"),
)
BY_FLAG = {ignored.flag: ignored for ignored in IGNORED}


def add_ignored_flags(parser: argparse._ActionsContainer, *, with_values: bool = False) -> None:
    """Every flag of the table, but those that the parser has already. with_values: switches may be
    followed by 0 or 1.
    """
    known = set(parser._option_string_actions)
    for ignored in IGNORED:
        if ignored.flag in known:
            continue
        parser.add_argument(
            *(spelling for spelling in ignored.spellings if spelling not in known),
            action=_Given,
            **_taken(ignored, with_values),
            dest=_PREFIX + ignored.flag,
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
        )


def _taken(ignored: Ignored, with_values: bool) -> dict[str, Any]:
    """Return how many words follow the flag, and what it stands for without one."""
    if ignored.bare is not None:
        return {"nargs": "?", "const": ignored.bare}
    if ignored.expected:
        return {}
    return {"nargs": "?" if with_values else 0}


def given(args: argparse.Namespace) -> Iterator[Ignored]:
    """Those that were given, with the spelling that was given as the only one. UsageError for a
    value that is none.
    """
    for name, value in vars(args).items():
        if name.startswith(_PREFIX):
            spelled, text = value
            ignored = replace(BY_FLAG[name.removeprefix(_PREFIX)], spellings=(spelled,))
            ignored.check(text)
            yield ignored


class _Given(argparse.Action):
    """Stores (spelling, value)."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, (option_string, values))
