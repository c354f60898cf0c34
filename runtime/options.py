"""All options of loading a model together. Imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .device_options import DeviceOptions, check_layers
from .layer_options import LayerOptions
from .parallel.device_list import chosen_by_shares
from .parallel.modes import MOST_TIMEOUT, Split, planned_split, split_notes
from .parallel.options import SplitOptions

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class LoadOptions(LayerOptions, SplitOptions, DeviceOptions):
    """Where and how a model is loaded. In the help, flags of the last base come first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expert_reduction", "cache_type_k", "cache_type_v", "tensor_split"):
            if getattr(self, name) == "":
                raise UsageError(f"{name} ({self.flag_of(name).names[0]}) is empty")
        for name, value in chosen_by_shares(self).items():
            object.__setattr__(self, name, value)  # as dataclasses do in frozen ones

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

    def split(self, device: torch.device) -> Split:
        """Return how the model is split over devices like `device`. UsageError for devices that are
        not there, and for options that contradict the split.
        """
        import torch

        from .parallel.ranks import Ranks

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
