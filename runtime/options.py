"""Options of loading a model. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..formats.flags import Constant
from ..formats.options import Options, option
from .parallel.modes import (
    DEFAULT_TIMEOUT,
    EXPERT_CHOICES,
    MODES,
    MOST_TIMEOUT,
    REDUCE_TYPES,
    Split,
    planned_split,
    split_notes,
)
from .parallel.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from ..formats.tools.lora_source import AdapterFile
    from .state.cache import CacheSettings
    from .weights.placement import Request
    from .weights.switches import Switches

DEFAULT_MARGIN = 1024  # MiB that --fit leaves free
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class LoadOptions(Options):
    """Where and how a model is loaded."""

    device: str = option(
        "cpu",
        "--device",
        metavar="D",
        help="cpu, cuda, cuda:N, or auto: the first GPU, or the CPU where there is none",
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
        kind=int,
        optional=DEFAULT_MARGIN,
        metavar="MIB",
        help="choose what stays on the CPU by the GPU's free memory, and leave MIB of it free"
        f" (default: {DEFAULT_MARGIN})",
    )
    split_mode: str | None = option(
        None,
        "-sm",
        "--split-mode",
        choices=MODES,
        metavar="MODE",
        help="graph: a part of every layer on each GPU, one process per GPU; layer: some whole"
        " layers on each, for slow links; data: the whole model on each, with other chunks of a"
        " text; none: one GPU (default); row, attn and tensor mean graph",
    )
    tensor_split: str | Sequence[float] | None = option(
        None,
        "-ts",
        "--tensor-split",
        kind=str,
        metavar="A,B,..",
        help="shares of the GPUs, such as 3,1 (default: equal); with --device cpu and -sm graph,"
        " layer or data so many processes",
    )
    main_gpu: int | None = option(
        None,
        "-mg",
        "--main-gpu",
        kind=int,
        least=0,
        metavar="N",
        help="the GPU of the first rank, and of a model on one GPU",
    )
    max_gpu: int | None = option(
        None, "--max-gpu", kind=int, least=1, metavar="N", help="use at most N GPUs"
    )
    reduce_type: str | None = option(
        None,
        "-grt",
        "--graph-reduce-type",
        choices=REDUCE_TYPES,
        metavar="TYPE",
        help="what moves between GPUs for the sums of prompts: f32, bf16, f16 or q8_0 (default: as"
        " --precision); generated tokens move in f32",
    )
    split_experts: str | None = option(
        None,
        "--split-experts",
        choices=EXPERT_CHOICES,
        metavar="HOW",
        help="with -sm graph, give ranks hidden columns of all experts, or whole experts: columns,"
        " whole or auto, whatever is predicted to be faster (default: auto)",
    )
    timeout: float = option(
        DEFAULT_TIMEOUT,
        "--timeout",
        least=1,
        metavar="SECONDS",
        help="end a rank that waits so long for another one",
    )
    ubatch: int | None = option(
        None,
        "-ub",
        "--ubatch-size",
        kind=int,
        least=1,
        metavar="N",
        help="most tokens that go through the model at a time (default: 512)",
    )
    cache_size: int = option(
        512,
        "--cache-size",
        least=0,
        metavar="MIB",
        help="memory for decoded weights on the CPU",
    )
    cache_type_k: str | None = option(
        None,
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="type of cached keys: f32, f16, bf16, q8_0, q6_0, q5_1, q5_0, q4_1, q4_0, iq4_nl,"
        " q8_kv (keys only); default: f16; no cache for perplexity and imatrix",
    )
    cache_type_v: str | None = option(
        None, "-ctv", "--cache-type-v", metavar="TYPE", help="type of cached values (same choices)"
    )
    k_cache_hadamard: bool = option(
        False,
        "-khad",
        "--k-cache-hadamard",
        help="apply a Hadamard transform to quantized keys",
    )
    v_cache_hadamard: bool = option(
        False, "-vhad", "--v-cache-hadamard", help="apply a Hadamard transform to quantized values"
    )
    swa_full: bool = option(
        False,
        "--swa-full",
        help="keep all positions in layers with a sliding window, so that a sequence can be cut"
        " back to any length",
    )
    flash_attn: bool | str = option(
        True,
        "-fa",
        "--flash-attn",
        kind=str,
        optional=True,
        metavar="on|off",
        constants=(
            Constant(("-no-fa", "--no-fa", "--no-flash-attn"), False, "the same as -fa off"),
        ),
        help="flash attention (default: on)",
    )
    attention_max_batch: int = option(
        0,
        "-amb",
        "--attention-max-batch",
        metavar="MIB",
        help="most memory for scores with -fa off, and for keys and values of latent attention"
        " (default: no bound, and 512)",
    )
    expert_reduction: str | None = option(
        None,
        "-ser",
        "--smart-expert-reduction",
        metavar="K,t",
        help="use the K best experts, and others only if they are more than t times as probable as"
        " the best (changes the model)",
    )
    merge_gate_up: bool = option(
        False,
        "-muge",
        "--merge-up-gate-experts",
        help="multiply by gate and up of experts as one matrix",
    )
    mla: int = option(
        3,
        "-mla",
        "--mla-use",
        metavar="N",
        help="latent attention (DeepSeek): 1: the absorbed form, for few tokens; 0: the naive form,"
        " for many; 2, 3: naive where a sequence has 128 new tokens or more",
    )
    sparse_attention: bool | str = option(
        True,
        "-dsa",
        "--dsa",
        kind=str,
        optional=True,
        metavar="on|off",
        constants=(Constant(("--no-dsa",), False, "the same as --dsa off"),),
        help="sparse attention (GLM-5): tokens see only the positions that the model's indexer"
        " chooses (default: on)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expert_reduction", "cache_type_k", "cache_type_v", "tensor_split"):
            if getattr(self, name) == "":
                raise UsageError(f"{name} ({self.flag_of(name).names[0]}) is empty")

    def adapters(self) -> list[AdapterFile]:
        """Return the adapters to merge into the model. UsageError for a scale that is no number."""
        from ..formats.tools.lora_source import parse_adapter

        return [one for text in (*self.lora, *self.lora_scaled) for one in parse_adapter(text)]

    def check_sizes(self) -> None:
        """UsageError for numbers that no model can have."""
        if self.ubatch is not None and self.ubatch > MOST_TOKENS:
            raise UsageError(f"ubatch (-ub) is {self.ubatch}, expected at most {MOST_TOKENS}")
        if self.timeout > MOST_TIMEOUT:
            raise UsageError(
                f"timeout (--timeout) is {self.timeout:g}, expected at most {MOST_TIMEOUT:.0f}"
                " seconds"
            )
        check_layers(self.gpu_layers or 0, "n_cpu_moe (--n-cpu-moe)", self.n_cpu_moe or 0)

    def check(self) -> None:
        """UsageError for what contradicts itself on every device."""
        from .weights.placement import parse_overrides

        self.check_sizes()
        self._switches()
        self._cache()
        for text in self.override_tensor:
            parse_overrides(text)

    def settings(self, device: torch.device) -> dict[str, Any]:
        """Return the keywords of `runtime.model.Model`. UsageError for what contradicts itself."""
        self.check_sizes()
        chosen = {
            "precision": self.precision,
            "placement": self._placement(device),
            "switches": self._switches(),
            "cache": self._cache(),
            "cache_bytes": self.cache_size * 2**20,
        }
        return chosen if self.ubatch is None else chosen | {"ubatch": self.ubatch}

    def set_threads(self) -> None:
        """Let torch use `threads` CPU threads, or leave its number as it is for 0 and -1."""
        if self.threads > 0:
            import torch

            torch.set_num_threads(min(self.threads, os.cpu_count() or 1))  # more get in the way

    def split(self, device: torch.device) -> Split:
        """Return how the model is split over devices like `device`. UsageError for devices that are
        not there, and for options that contradict the split.
        """
        import torch

        on_gpu = device.type == "cuda"
        n_gpus = torch.cuda.device_count() if on_gpu else 0
        return planned_split(self, on_gpu, n_gpus, Ranks.here())

    def notes(self, device: torch.device) -> list[tuple[str, str]]:
        """Return (flags, why) of what was given and changes nothing."""
        notes = split_notes(self, self.split(device), device.type == "cuda")
        given = [
            flag
            for flag, value in (
                ("-ngl", self.gpu_layers),
                ("--n-cpu-moe", self.n_cpu_moe),
                ("--cpu-moe", self.cpu_moe or None),
                ("--fit", self.fit),
                ("-ot", self.override_tensor or None),
            )
            if value is not None
        ]
        if given and device.type == "cpu":
            named = f" with --device {self.device}" if self.device != "auto" else ""
            notes.append((", ".join(given), f"everything is on the CPU{named}"))
        settings = self._cache()
        if settings is None:
            turned = (("-khad", self.k_cache_hadamard), ("-vhad", self.v_cache_hadamard))
            if flags := [flag for flag, is_given in turned if is_given]:
                notes.append((", ".join(flags), "the cache is not quantized"))
            return notes
        return notes + [
            (flag, f"the cache stores {type.name.lower()}")
            for flag, turned, type in (
                ("-khad", settings.hadamard_k, settings.k),
                ("-vhad", settings.hadamard_v, settings.v),
            )
            if turned and not type.is_quantized
        ]

    def _placement(self, device: torch.device) -> Request:
        from .weights.placement import ALL, Request, parse_overrides

        layers = ALL if self.gpu_layers is None or self.gpu_layers < 0 else self.gpu_layers
        overrides = tuple(one for text in self.override_tensor for one in parse_overrides(text))
        request = Request(layers, overrides, ALL if self.cpu_moe else self.n_cpu_moe or 0, self.fit)
        request.check(device)
        return request

    def _switches(self) -> Switches:
        from .weights.switches import Switches, parse_on_off, parse_ser

        ser = parse_ser(self.expert_reduction) if self.expert_reduction else None
        flash = parse_on_off("-fa", self.flash_attn)
        return Switches(
            flash,
            self.attention_max_batch,
            ser,
            self.merge_gate_up,
            mla=self.mla,
            sparse_attention=parse_on_off("-dsa", self.sparse_attention),
            swa_full=self.swa_full,
        )

    def _cache(self) -> CacheSettings | None:
        """Return None where no option is about the cache."""
        from .state.cache import CacheSettings
        from .weights.switches import parse_on_off

        if self.cache_type_k is None and self.cache_type_v is None:
            return None
        settings = CacheSettings(
            self.cache_type_k or "f16",
            self.cache_type_v or "f16",
            self.k_cache_hadamard,
            self.v_cache_hadamard,
        )
        if settings.v.is_quantized and not parse_on_off("-fa", self.flash_attn):
            raise UsageError(
                f"values of a cache cannot be quantized ({self.cache_type_v}) without flash"
                " attention: flash_attn (-fa) is off"
            )
        return settings


SPLIT_FIELDS = (
    "device",
    "fit",
    "split_mode",
    "tensor_split",
    "main_gpu",
    "max_gpu",
    "reduce_type",
    "split_experts",
    "timeout",
    "lora",
    "lora_scaled",
)


def split_options(args: argparse.Namespace) -> LoadOptions:
    """Return the options of the parsed flags that say which devices a model is on, and which
    adapters it has. Also for commands that take lists of other options.
    """
    return LoadOptions.from_flags(argparse.Namespace(**{n: getattr(args, n) for n in SPLIT_FIELDS}))


def check_layers(gpu_layers: int, cpu_flag: str, cpu_experts: int) -> None:
    """UsageError for numbers of layers that cannot be: on the GPU (-ngl), or with experts on the
    CPU (`cpu_flag`).
    """
    if gpu_layers < -1:
        raise UsageError(f"gpu_layers (-ngl) is {gpu_layers}, expected -1 (all) or more")
    if cpu_experts < 0:
        raise UsageError(f"{cpu_flag} is {cpu_experts}, expected 0 or more")
