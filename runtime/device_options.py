"""Options that say where a model is loaded, and what is merged into it. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..formats.options import Options, option

if TYPE_CHECKING:
    import torch

    from ..formats.tools.lora_source import AdapterFile
    from .weights.placement import Request

DEFAULT_MARGIN = 1024  # MiB that --fit leaves free
_DEVICES = {"none": "cpu"} | {f"CUDA{n}": f"cuda:{n}" for n in range(64)}  # of llama.cpp


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `LoadOptions` has these
class DeviceOptions(Options):
    """The device of a model, tensors that stay on the CPU, and adapters."""

    device: str = option(
        "cpu",
        "--device",
        aliases=("-dev",),
        named=_DEVICES,
        metavar="D",
        help="cpu, cuda, cuda:N, or auto: the first GPU, or the CPU where there is none; with -sm"
        " graph, layer or data also several, as cuda:0,cuda:2",
    )
    precision: str | None = option(
        None,
        "--precision",
        choices=("f32", "bf16", "f16", "int8"),
        help="f32: the reference path; bf16: the default on a GPU; f16: that of imatrix and hessian"
        " there; int8: on the CPU, products with quantized weights in 8 bits, the default of"
        " generate, chat and bench there (others: f32); on a GPU, bf16 with the dense products of"
        " prompts in 8 bits",
    )
    threads: int = option(
        0,
        "-t",
        "--threads",
        least=-1,
        metavar="N",
        help="CPU threads, 0 or -1: all (default: all)",
    )
    gpu_layers: int | None = option(
        None,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        kind=int,
        named={"all": None, "auto": None},
        metavar="N",
        help="put the last N layers on the GPU; with more than the model has, also embedding and"
        " output (default: all)",
    )
    lora: tuple[str, ...] = option(
        (),
        "--lora",
        kind=str,
        many=True,
        metavar="FILE[:SCALE]",
        help="an adapter in GGUF that is merged into the weights in memory, times SCALE"
        " (repeatable, or with commas between)",
    )
    lora_scaled: tuple[str, ...] = option(
        (),
        "--lora-scaled",
        kind=str,
        many=True,
        metavar="FILE:SCALE",
        help="the same; also FILE SCALE as two words",
    )
    override_tensor: tuple[str, ...] = option(
        (),
        "-ot",
        "--override-tensor",
        kind=str,
        many=True,
        metavar="REGEX=D,..",
        help="put tensors whose names match on CPU or CUDAn",
    )
    n_cpu_moe: int | None = option(
        None,
        "-ncmoe",
        "--n-cpu-moe",
        kind=int,
        metavar="N",
        help="keep the experts of the first N layers on the CPU",
    )
    cpu_moe: bool = option(False, "-cmoe", "--cpu-moe", help="keep all experts on the CPU")
    fit: int | None = option(
        None,
        "--fit",
        aliases=("-fit", "-fitt", "--fit-target", "--fit-margin"),
        kind=int,
        optional=DEFAULT_MARGIN,
        named={"on": DEFAULT_MARGIN, "off": None},
        metavar="MIB",
        help="choose what stays on the CPU by the GPU's free memory, and leave MIB of it free"
        f" (default: {DEFAULT_MARGIN})",
    )

    def adapters(self) -> list[AdapterFile]:
        """Return the adapters to merge into the model. UsageError for a scale that is no number."""
        from ..formats.tools.lora_source import parse_adapter

        return [one for text in (*self.lora, *self.lora_scaled) for one in parse_adapter(text)]

    def set_threads(self) -> None:
        """Let torch use `threads` CPU threads, or leave its number as it is for 0 and -1."""
        if self.threads > 0:
            import torch

            torch.set_num_threads(min(self.threads, os.cpu_count() or 1))  # more get in the way

    def _placement(self, device: torch.device) -> Request:
        from .weights.placement import ALL, Request, parse_overrides

        layers = ALL if self.gpu_layers is None or self.gpu_layers < 0 else self.gpu_layers
        overrides = tuple(one for text in self.override_tensor for one in parse_overrides(text))
        request = Request(layers, overrides, ALL if self.cpu_moe else self.n_cpu_moe or 0, self.fit)
        request.check(device)
        return request


def check_layers(gpu_layers: int, cpu_flag: str, cpu_experts: int) -> None:
    """UsageError for numbers of layers that cannot be: on the GPU (-ngl), or with experts on the
    CPU (`cpu_flag`).
    """
    if gpu_layers < -1:
        raise UsageError(f"gpu_layers (-ngl) is {gpu_layers}, expected -1 (all) or more")
    if cpu_experts < 0:
        raise UsageError(f"{cpu_flag} is {cpu_experts}, expected 0 or more")
