"""`iqforge gguf-hash`: hash the tensors of a GGUF model, or check them against a manifest."""

from __future__ import annotations

import argparse
import sys

from ...errors import printable
from .progress import Meter

_FLAGS = {
    "xxh64": "fast, against damage (the default)",
    "sha1": "SHA-1",
    "sha256": "SHA-256",
    "uuid": "a UUID of version 5 of all tensors together",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge gguf-hash` to its parser."""
    parser.description = (
        "Print a line per tensor and one for all of them: hash, digest, FILE:TENSOR. Metadata is"
        " not hashed, so files that differ only there have the same hashes."
    )
    parser.add_argument(
        "model", metavar="FILE", help="a GGUF file; of a split model the first shard"
    )
    for name, what in _FLAGS.items():
        parser.add_argument(
            f"--{name}", action="append_const", dest="algorithms", const=name, help=what
        )
    parser.add_argument(
        "--all",
        action="store_const",
        dest="algorithms",
        const=["xxh64", "sha1", "sha256"],
        help="xxh64, sha1 and sha256",
    )
    parser.add_argument("--no-layer", action="store_true", help="only the line of all tensors")
    parser.add_argument(
        "-c",
        "--check",
        metavar="MANIFEST",
        help=(
            "compare with the lines of this file, by default with the strongest hash "
            "in it; exit status 1 unless all are equal"
        ),
    )


def run(args: argparse.Namespace, api) -> int:
    """Print the hashes, or the result of every line of a manifest. Return 1 if a line does not
    match, else 0.
    """
    from ..tools.hashes import OK

    bad = 0
    # Lines that go to the terminal show the progress themselves.
    with Meter("hashing", hidden=sys.stdout.isatty()) as progress:
        progress.begin(api.inspect_model(args.model).total.n_bytes)
        layers = not args.no_layer
        if args.check is None:
            algorithms = args.algorithms or ["xxh64"]
            lines = api.hash_model(args.model, algorithms, layers=layers, progress=progress)
        else:
            algorithms = args.algorithms or ()
            lines = api.check_hashes(
                args.model, args.check, algorithms, layers=layers, progress=progress
            )
        for line in lines:
            print(printable(line, 2000))
            bad += line.verdict not in ("", OK)
    if args.check is not None:
        print(
            f"\nVerification results for {printable(args.check, 400)} -"
            f" {'Failure' if bad else 'Success'}"
        )
    return 1 if bad else 0
