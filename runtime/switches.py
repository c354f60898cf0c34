"""The reference's runtime switches: what they change here, or one line why they change nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError, printable


@dataclass(frozen=True)
class Switches:
    """What can be chosen about how a network is evaluated.

    flash_attention: attention without a matrix of scores; without it, values of a cache cannot be quantized.
    attention_buffer: MiB that the scores of attention without flash_attention may take at a time (groups of heads one after
    another); 0: no bound. ser: smart expert reduction (K, t): the K most probable experts always, of the other selected ones
    those whose probability is more than t times the largest. merge_gate_up: gate and up experts as one matrix.
    """

    flash_attention: bool = True
    attention_buffer: int = 0
    ser: tuple[int, float] | None = None
    merge_gate_up: bool = False

    def __post_init__(self):
        if self.attention_buffer < 0:
            raise UsageError(f"-amb is {self.attention_buffer} MiB, expected 0 (no bound) or more")
        if self.ser is not None and not (self.ser[0] >= 1 and 0 <= self.ser[1] <= 1):
            raise UsageError(f"-ser is {self.ser[0]},{self.ser[1]}, expected at least one expert and a threshold of 0 to 1")


def parse_ser(text: str) -> tuple[int, float] | None:
    """`K,t` of -ser; None for what switches it off (`0,0` or a negative K, as in the reference)."""
    found = re.fullmatch(r"\s*(-?\d+)\s*,\s*(\d*\.?\d+)\s*", text)
    if not found:
        raise UsageError(f"-ser is '{printable(text, 40)}', expected K,t such as 6,0.4")
    k, t = int(found[1]), float(found[2])
    return None if k < 1 else (k, t)


def parse_on_off(name: str, value: object) -> bool:
    """`-fa`, `-fa on|off|auto|1|0`."""
    known = {True: True, "on": True, "1": True, "auto": True, "-1": True, "enabled": True, "off": False, "0": False, "disabled": False}
    if value not in known:
        raise UsageError(f"{name} is '{printable(value, 40)}', expected on, off or auto")
    return known[value]


# Switches that change nothing here, and why. Of their values only that of -mla is checked.
WITHOUT_EFFECT = {
    "-mla": "this architecture has no latent attention",
    "-fmoe": "on a GPU experts run fused wherever there are kernels for that (--verbose says where not), on the CPU nothing is",
    "-no-fmoe": "on a GPU experts run fused wherever there are kernels for them (--precision f32 has them apart)",
    "-rtr": "interleaved rows are undone for GPUs, and on the CPU products use decoded values: `iqforge repack` writes them to a file",
    "-mqkv": "on a GPU query, key and value always go in one launch, on the CPU one matrix would be as fast as three",
    "-ger": "it is about group-limited routing of architectures that are not supported yet",
    "-gr": "on a GPU a step is one graph unless a layer takes a slower path (--verbose), on the CPU there are none",
    "-no-gr": "on a GPU a step is one graph unless a layer takes a slower path (--verbose), on the CPU there are none",
    "-sm": "one GPU and the CPU share a model by -ngl and -ot",
    "-ts": "one GPU and the CPU share a model by -ngl and -ot",
    "-grt": "one GPU and the CPU share a model by -ngl and -ot",
    "-smgs": "one GPU and the CPU share a model by -ngl and -ot",
    "-sas": "one GPU and the CPU share a model by -ngl and -ot",
    "-cuda": "kernels are chosen by type and shape, there is nothing to tune",
    "-no-fug": "on a GPU gate and up always go together (--precision f32 has them apart)",
    "-no-mmad": "on a GPU weighted sums of experts are always fused (--precision f32 has them apart)",
    "-mg": "--device cuda:N names the GPU",
    "-tb": "-t holds for prompts, too",
    "-nkvo": "a cache is where its layer is",
    "--mlock": "weights on the CPU are read through the page cache",
    "--no-mmap": "weights on the CPU are read through the page cache",
}
