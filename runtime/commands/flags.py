"""What commands that run a model share: flags, opening the model, and what is printed meanwhile.
Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, printable
from ...formats.commands.progress import count_of, duration, line_break, print_result
from ..options import LoadOptions
from ..text_options import ChunkOptions
from . import ignored_flags
from .ignored_flags import add_ignored_flags
from .loading import load_and_say
from .slow_paths import SlowPaths

if TYPE_CHECKING:
    import torch

    from ...formats.source import Source
    from ..evaluate.chunks import ChunkProgress
    from ..model import Model

MODEL_HELP = "GGUF file, first shard of a split model, or checkpoint folder"


def add_model_flag(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add -m MODEL to a parser."""
    parser.add_argument("-m", "--model", required=required, metavar="MODEL", help=MODEL_HELP)


def add_chunk_flags(
    parser: argparse.ArgumentParser,
    *,
    several_texts: bool = False,
    default_text: bool = False,
    **defaults: Any,
) -> None:
    """-f, -c, -b and --chunks of commands that evaluate chunks of a text.

    several_texts: -f may be repeated, and `file` is a list (or None). default_text: the command
    takes `default` for the calibration text of the package.
    """
    parser.add_argument(
        "-f",
        "--file",
        metavar="TEXT",
        action="append" if several_texts else "store",
        help="UTF-8 text to evaluate"
        + (" (repeatable)" if several_texts else "")
        + (", or 'default', five texts that come with iqforge" if default_text else ""),
    )
    ChunkOptions.add_flags(parser, only=("n_ctx", "chunks", "batch_tokens"), **defaults)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where and how the model is loaded, the last group of the help, after
    all others.
    """
    group = parser.add_argument_group("where and how the model runs")
    LoadOptions.add_flags(group, device="auto")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="say what runs on a slower path"
    )
    add_ignored_flags(parser)


def chosen_device(options: LoadOptions, *, say: bool = True) -> torch.device:
    """Return the torch device of `--device`, of a rank its own, and `say` on stderr which one
    `auto` has chosen. UsageError for one that is not there.
    """
    from ..start_ranks import device_here

    device = device_here(options)
    if say and options.device == "auto":
        why = " (there is no GPU)" if device.type == "cpu" else ""
        print(f"device: {device}{why}", file=sys.stderr)
    return device


def note(flags: str, why: str) -> None:
    """Print one line on stderr about flags that change nothing."""
    changes = "change" if "," in flags else "changes"
    print(f"note: {flags} {changes} nothing here: {why}", file=sys.stderr)


def note_unused(args: argparse.Namespace, load: LoadOptions, device: torch.device) -> None:
    """Print a line on stderr for each flag of loading that changes nothing with any model."""
    for ignored in ignored_flags.given(args):
        note(ignored.flag, ignored.why)
    for flag, why in load.notes(device):
        note(flag, why)


def on_one_device(
    args: argparse.Namespace, why: str = "this command looks at products of the whole model"
) -> None:
    """Undo -sm graph and data in a command that runs in one process, and say so and why. UsageError
    for several devices.
    """
    from ..parallel.device_list import listed_gpus
    from ..parallel.modes import has_ranks

    if listed_gpus(args.device):
        raise UsageError(f"-dev {args.device} names several GPUs, expected one: {why}")
    if has_ranks(args.split_mode):
        note(f"-sm {args.split_mode}", why)
        args.split_mode = args.tensor_split = args.max_gpu = None


def open_model(
    args: argparse.Namespace,
    api,
    *,
    source: Source | None = None,
    context: int = 0,
    rows: int = 0,
    chunk: int = 0,
    generates: bool = False,
    collects: bool = False,
    name: str = "",
    is_first: bool = True,
) -> Model:
    """Return the model that the flags ask for, of `source` or else of -m, loaded.

    Says on stderr which flags change nothing here, and why; for a GPU also what the model takes on
    each device, for a sequence of `context` tokens and `rows` of them at a time, or for `rows` in
    chunks of `chunk` tokens. DeviceError if that is more than there is. generates: the default
    precision is the fastest one. collects: it is the one for statistics of inputs. name: stands
    above what is said of the model, for a command with several; only for the first one (`is_first`)
    it says what holds for all.
    """
    if is_first:
        for ignored in ignored_flags.given(args):
            note(ignored.flag, ignored.why)
    load = LoadOptions.from_flags(args)
    load.check_sizes()
    device = chosen_device(load, say=is_first)
    if generates and load.precision is None:
        from ..precision import fastest_precision

        load = replace(load, precision=fastest_precision(device))
    if collects and load.precision is None:
        from ..precision import collecting_precision

        load = replace(load, precision=collecting_precision(device))
    model = api.load_model(
        args.model,
        options=replace(load, device=str(device)),
        source=source,
        context=context,
        verbose=SlowPaths(everything=args.verbose),
    )
    try:
        of_all = load.notes(device) if is_first else []
        for flag, why in dict([*of_all, *model_notes(model)]).items():
            note(flag, why)
        load_and_say(model, rows, chunk, name)
    except BaseException:
        model.close()
        raise
    return model


NO_SCORES = ("-amb", "flash attention has no matrix of scores")


def model_notes(model: Model) -> list[tuple[str, str]]:
    """Return (flag, why) of the switches about experts and attention, and of the overrides, that
    change nothing with this model.
    """
    unused = (
        model.weights.placement.unused(tensor.name for tensor in model.source.tensors)
        if model.device.type != "cpu"
        else []
    )
    return [*_expert_notes(model), *_attention_notes(model)] + [
        (f"-ot '{printable(pattern, 80)}'", "no tensor has such a name") for pattern in unused
    ]


def _expert_notes(model: Model) -> list[tuple[str, str]]:
    from ..layers.moe import MoE

    chosen, notes = model.weights.switches, []
    if model.hyperparameters.integer("expert_count", 0) <= 0:
        return [
            (flag, "the model has no experts")
            for flag, given in (("-ser", chosen.ser), ("-muge", chosen.merge_gate_up))
            if given
        ]
    used = model.hyperparameters.integer("expert_used_count")
    if chosen.ser is not None and chosen.ser[0] >= used:
        why = f"the model uses {used} experts, and {chosen.ser[0]} are always kept"
        notes.append(("-ser", why))
    experts = [
        layer.experts
        for block in model.network.blocks
        for layer in block.row_layers
        if isinstance(layer, MoE)
    ]
    if chosen.merge_gate_up and experts and not any(part.spec.gated for part in experts):
        notes.append(("-muge", "the model's experts have no gate"))
    return notes


def _attention_notes(model: Model) -> list[tuple[str, str]]:
    from ..layers.mla import MLA
    from ..weights.switches import Switches

    chosen, usual, notes = model.weights.switches, Switches(), []
    latent = [block.mixer for block in model.network.blocks if isinstance(block.mixer, MLA)]
    if not latent and chosen.mla != usual.mla:
        notes.append(("-mla", "the model has no latent attention"))
    if not latent and chosen.attention_buffer and chosen.flash_attention:
        notes.append(NO_SCORES)
    if latent and model.is_fast and chosen.flash_attention:
        why = "kernels of latent attention take the form that is faster for so many tokens"
        given = (("-mla", chosen.mla != usual.mla), ("-amb", chosen.attention_buffer))
        notes += [(flag, why) for flag, is_given in given if is_given]
    if chosen.swa_full and not any(block.mixer.window for block in model.network.blocks):
        notes.append(("--swa-full", "the model has no sliding window"))
    if not chosen.sparse_attention and not model.hyperparameters.has("attention.indexer.top_k"):
        notes.append(("--dsa", "the model has no sparse attention"))
    if len(latent) == len(model.network.blocks) and model.cache is not None:
        given = (("-ctv", model.cache.type_v != "f16"), ("-vhad", model.cache.hadamard_v))
        why = "latent attention keeps no values: -ctk is the type of what it keeps"
        notes += [(flag, why) for flag, is_given in given if is_given]
    return notes


class RunningOutput:
    """A progress callback: `[n]P,` on stdout after each chunk as the reference prints it; pace and
    time left on stderr.

    The pace is right only at the end of a pass, which covers several chunks: it is shown after the
    first, then now and then.
    """

    def __init__(self, per_pass: int, values: bool = True, every_seconds: float = 60):
        self.per_pass = per_pass
        self.values, self.every, self.next = values, every_seconds, 0.0

    def __call__(self, p: ChunkProgress) -> None:
        if self.values and p.perplexity is not None:
            print_result(f"[{p.chunk}]{p.perplexity:.4f}," + ("" if p.chunk < p.n_chunks else "\n"))
        if p.chunk == p.n_chunks:
            print(
                f"{count_of(p.n_chunks, 'chunk')} of {p.n_ctx} tokens in {p.seconds:.2f} s,"
                f" {p.tokens_per_second:.0f} tokens/s",
                file=sys.stderr,
            )
        elif p.chunk % self.per_pass == 0 and p.seconds >= self.next:
            print(
                line_break() + f"{count_of(p.n_chunks, 'chunk')} of {p.n_ctx} tokens,"
                f" {p.tokens_per_second:.0f} tokens/s,"
                f" ETA {duration(p.seconds_left)}",
                file=sys.stderr,
            )
            self.next = p.seconds + self.every


def chunks_per_pass(options: ChunkOptions, load: LoadOptions | None) -> int:
    """Return how many chunks go through the model at a time."""
    return options.tokens_per_pass(load.ubatch if load else None) // max(1, options.n_ctx)
