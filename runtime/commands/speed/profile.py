"""`iqforge profile`: where the time of a prompt and of a token goes, by kernel and by layer."""

from __future__ import annotations

import argparse

from ....errors import UsageError, printable
from ..watch import Runs, passes, watched
from .bench import add_model_flags, add_setting_flags
from .settings import cache_settings, only_setting, open_model


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge profile` to its parser."""
    parser.description = (
        "Run prompts and single tokens under torch.profiler and print time per kernel (on the CPU:"
        " per module) and per layer. Prompts run kernel by kernel, without CUDA graphs, so the"
        " host's share is not that of generate or bench; tokens replay their graph. -o draws a"
        " typical pass as SVG: a row per layer, a box per kernel. With -sm graph all ranks run, and"
        " the first is shown."
    )
    add_model_flags(parser)
    parser.add_argument(
        "-p",
        "--n-prompt",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a prompt, 0: none (default: 512)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        type=int,
        default=16,
        metavar="N",
        help="tokens to generate, 0: none (default: 16)",
    )
    parser.add_argument(
        "-d",
        "--n-depth",
        type=int,
        default=0,
        metavar="N",
        help="tokens in the context before those (default: 0)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.svg", help="draw a typical prompt and a typical token"
    )
    add_setting_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Profile the passes, print the tables, and write the drawing. Return 0. Raise UsageError for
    lengths below 0 or all 0.
    """
    from ....formats.output import PartFile, check_output, refuse_same_file
    from ...profile.report import tables, typical
    from ...profile.svg import timeline
    from ...start_ranks import is_first

    if min(args.n_prompt, args.n_gen, args.n_depth) < 0 or not args.n_prompt + args.n_gen:
        raise UsageError("-p, -n and -d cannot be negative, and -p and -n not both 0")
    if args.output is not None:
        check_output(args.output)  # fails before the work, not after it
    if args.output and not args.output.lower().endswith(".svg"):
        raise UsageError(
            f"-o is '{printable(args.output, 80)}', expected FILE.svg: the drawing is SVG"
        )
    device, setting = only_setting(args, "a profile")
    context = max(args.n_prompt, args.n_depth + args.n_gen)
    with open_model(
        api,
        args.model or args.synthetic,
        args.model is None,
        device,
        setting,
        context=context,
        verbose=args.verbose,
    ) as model:
        if args.output:
            refuse_same_file(args.output, model.source.files)
        plan = _plan(args.n_prompt, args.n_gen, args.n_depth, model.ubatch)
        with watched(model, "profiling", plan):
            profiles = api.profile_model(
                model,
                args.n_prompt,
                args.n_gen,
                n_depth=args.n_depth,
                cache=cache_settings(setting),
            )
    what = "kernel" if device.type == "cuda" else "module"
    name = args.model or args.synthetic
    headings = {label: f"{name} {label}{_how(label, model.is_fast)}" for label in profiles}
    print("\n\n".join(tables(headings[label], found, what) for label, found in profiles.items()))
    if args.output and is_first():
        chosen = [(label, typical(found)) for label, found in profiles.items()]
        drawing = timeline(
            [(f"{name} {label}, {p.duration / 1e3:.3f}\u00a0ms", p) for label, p in chosen]
        )
        with PartFile(args.output) as file:
            file.write(drawing.encode(errors="backslashreplace"))
    return 0


def _plan(n_prompt: int, n_gen: int, n_depth: int, ubatch: int) -> Runs:
    """Return the passes that `profile_model` makes, in order."""
    from ...profile.profile import PROMPTS, WARM_PROMPTS, WARM_TOKENS

    runs: Runs = []
    for prompts, tokens in ((WARM_PROMPTS, min(n_gen, WARM_TOKENS)), (PROMPTS, n_gen)):
        runs += passes(n_depth, ubatch) if n_gen else []
        runs += passes(n_prompt, ubatch) * prompts + [(1, tokens)]
    return runs


def _how(label: str, is_fast: bool) -> str:
    """Return how recording changes passes of this kind, for the heading of a table."""
    return " without graphs" if label != "tg" and is_fast else ""
