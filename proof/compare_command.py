"""`iqforge compare`: how much models lose against the one that they were made of."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace

from ..errors import UsageError, printable
from ..runtime.commands.flags import (
    MODEL_HELP,
    RunningOutput,
    add_load_flags,
    chosen_device,
    note_unused,
    on_one_device,
)
from ..runtime.options import LoadOptions
from ..runtime.text_options import CompareOptions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge compare` to its parser."""
    parser.description = (
        "Compare models with the one that they were made of: size, memory, speed, perplexity, KL"
        " divergence, and the tokens whose predictions differ most. An interrupted run resumes in"
        " DIR; files appear only when they are whole."
    )
    parser.add_argument("base", metavar="BASE", help=MODEL_HELP)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a model to compare with it")
    parser.add_argument(
        "-f",
        "--file",
        metavar="TEXT",
        action="append",
        required=True,
        help="UTF-8 text to evaluate (repeatable)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page to publish next to the models")
    parser.add_argument("--json", metavar="FILE", help="write all figures; -: print them")
    parser.add_argument(
        "--work",
        metavar="DIR",
        default="iqforge-compare",
        help="folder for what an interrupted run resumes from (default: iqforge-compare)",
    )
    CompareOptions.add_flags(parser)
    add_load_flags(parser)


def run(args: argparse.Namespace, api) -> int:
    """Compare the models, write and print the results, and return 0. Raise UsageError if JSON and
    HTML both go to standard output.
    """
    from ..formats.output import PartFile, check_output, refuse_same_file
    from .compare_page import html_page
    from .figures import text_table

    if args.json == "-" and args.html == "-":
        raise UsageError("--html needs a file")
    if not args.work:
        raise UsageError("--work is empty, expected a folder")
    outputs = [path for path in (args.html, args.json) if path not in (None, "-")]
    adapters = [adapter.path for adapter in LoadOptions.from_flags(args).adapters()]
    for path in outputs:  # an error before anything is measured
        refuse_same_file(path, [args.base, *args.models, *args.file, *adapters])
        check_output(path)
    on_one_device(args, "models are compared by one process")
    load = LoadOptions.from_flags(args)
    device = chosen_device(load)
    note_unused(args, load, device)
    load = replace(load, device=str(device))
    options = CompareOptions.from_flags(args)
    rows = options.tokens_per_pass(load.ubatch)

    def progress(what: str) -> RunningOutput:
        print(f"measuring {printable(what, 200)}", file=sys.stderr)
        return RunningOutput(max(1, rows // options.n_ctx), values=False)

    def on_model(figures, resumed: bool) -> None:
        if resumed:
            print(f"{printable(figures.name, 200)}: already measured", file=sys.stderr)

    comparison = api.compare_models(
        args.base,
        args.models,
        args.file,
        args.work,
        options=options,
        load=load,
        progress=progress,
        on_model=on_model,
    )
    found = json.dumps(comparison.to_json(), indent=1, ensure_ascii=False) + "\n"
    if args.json == "-":
        print(found, end="")
    else:
        print(text_table(comparison))
    contents = {args.html: html_page(comparison) if args.html else "", args.json: found}
    for path in outputs:
        with PartFile(path) as file:
            file.write(contents[path].encode())
    if outputs and args.json != "-":
        print(f"\nwritten: {', '.join(printable(os.fspath(path), 400) for path in outputs)}")
    return 0
