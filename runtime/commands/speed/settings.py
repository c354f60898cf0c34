"""The settings that `iqforge bench` and its companions measure a model with."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....errors import UsageError
from ...device_options import check_layers
from ...options import MOST_TOKENS, LoadOptions, split_options
from ..flags import chosen_device, model_notes, note
from ..loading import load_and_say
from ..slow_paths import SlowPaths
from . import flags as bench_flags

if TYPE_CHECKING:
    import torch

    from ...model import Model
    from ...state.cache import CacheSettings


def planned_settings(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return the matrix of settings with defaults filled in. UsageError for one that cannot be,
    before anything is measured.
    """
    import torch

    from ...precision import fastest_precision, precisions_of

    settings = list(bench_flags.settings_matrix(args))
    for setting in settings:
        setting["precision"] = setting["precision"] or fastest_precision(device)
        check_layers(setting["n_gpu_layers"], "-ncmoe", setting["n_cpu_moe"])
        if cache_settings(setting).v.is_quantized and not setting["flash_attn"]:
            raise UsageError(
                f"values of a cache cannot be quantized ({setting['type_v']}) without flash"
                " attention (-fa 0)"
            )
        if setting["precision"] not in precisions_of(device):
            raise UsageError(f"--precision {setting['precision']} is not known on {device.type}")
        for flag, field in (("-b", "n_batch"), ("-ub", "n_ubatch")):
            if not 1 <= setting[field] <= MOST_TOKENS:
                raise UsageError(f"{flag} is {setting[field]} tokens, expected 1 to {MOST_TOKENS}")
        asked = setting["n_threads"]
        if asked < -1:
            raise UsageError(f"-t is {asked}, expected 1 or more, or 0 or -1: one thread per core")
        setting["split"] = split_options(args)
        load_options(setting, device).settings(device)
        setting["n_threads"] = min(
            asked if asked > 0 else torch.get_num_threads(), os.cpu_count() or 1
        )
    return settings


def load_options(setting: dict[str, Any], device: torch.device) -> LoadOptions:
    """Return how a model is loaded for one setting; without `split` on one device."""
    layers = setting["n_gpu_layers"]
    return replace(
        setting.get("split", LoadOptions()),
        device=str(device),
        precision=setting["precision"],
        gpu_layers=None if layers in (-1, 99) else layers,
        override_tensor=(setting["override_tensor"],) if setting["override_tensor"] else (),
        n_cpu_moe=setting["n_cpu_moe"],
        ubatch=setting["n_ubatch"],
        cache_type_k=setting["type_k"],
        cache_type_v=setting["type_v"],
        k_cache_hadamard=setting["k_cache_hadamard"],
        v_cache_hadamard=setting["v_cache_hadamard"],
        flash_attn="on" if setting["flash_attn"] else "off",
        attention_max_batch=setting["attn_max_batch"],
        expert_reduction=setting["ser"] or None,
        merge_gate_up=setting["muge"],
        mla=setting["mla_attn"],
        sparse_attention=setting["dsa"],
        swa_full=setting["swa_full"],
        cache_size=setting["cache_size"],
    )


def only_setting(args: argparse.Namespace, what: str) -> tuple[torch.device, dict[str, Any]]:
    """Return (device, setting) of a command that takes one model and no lists; says on stderr which
    flags change nothing, and sets the number of threads. `what` names the command's measurement in
    the UsageError for several settings.
    """
    import torch

    if (args.model is None) == (args.synthetic is None):
        raise UsageError("one of -m MODEL and --synthetic SHAPE:TYPE is needed")
    device = chosen_device(split_options(args))
    settings = planned_settings(args, device)
    if len(settings) > 1:
        raise UsageError(f"{what} takes one setting; only `iqforge bench` accepts lists")
    for line in bench_flags.notes(args, device.type == "cpu"):
        print(line, file=sys.stderr)
    torch.set_num_threads(settings[0]["n_threads"])
    return device, settings[0]


def cache_settings(setting: dict[str, Any]) -> CacheSettings:
    """Return the `CacheSettings` of a setting."""
    from ...state.cache import CacheSettings

    return CacheSettings(
        setting["type_k"],
        setting["type_v"],
        setting["k_cache_hadamard"],
        setting["v_cache_hadamard"],
    )


def open_model(
    api,
    which: str,
    synthetic: bool,
    device: torch.device,
    setting: dict[str, Any],
    *,
    context: int = 0,
    verbose: bool = False,
    said: set[tuple[str, str]] | None = None,
    name: str = "",
) -> Model:
    """Return the model of one setting, loaded; the caller closes it. `context`: tokens for which
    memory is planned. stderr gets a line for switches that change nothing with this model, unless
    that was `said` (which is added to), and the table of memory of a model that goes to a GPU.
    `name` stands above that, for a command with several models. DeviceError if that is more than
    there is.
    """
    model = (api.random_model if synthetic else api.load_model)(
        which,
        options=load_options(setting, device),
        context=context,
        verbose=SlowPaths(everything=verbose),
    )
    try:
        said = set() if said is None else said
        for flag, why in model_notes(model):
            if (flag, why) not in said:
                note(flag, why)
                said.add((flag, why))
        load_and_say(model, name=name)
    except BaseException:
        model.close()
        raise
    return model
