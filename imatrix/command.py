"""`iqforge imatrix`: collect an importance matrix."""

from __future__ import annotations

import argparse

from ..errors import UsageError
from ..runtime.flags import RunningOutput, add_model_flags, batch_tokens, note, open_model


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a calibration text through a model and save the mean squared input of every weight column."
    add_model_flags(parser)
    parser.add_argument("-o", "--output", "--output-file", default="imatrix.dat", metavar="OUT", help="file to write (imatrix.dat)")
    parser.add_argument("--output-format", choices=("dat", "gguf"), help="layout (default: gguf if OUT ends in .gguf, else dat)")
    parser.add_argument("--process-output", action="store_true", help="include output.weight")
    parser.add_argument("-ofreq", "--output-frequency", type=int, default=100, metavar="N",
                        help="write what there is after every N windows, 0: only at the end (default: 100)")
    parser.add_argument("--no-ppl", action="store_true", help="do not compute the running perplexity")
    parser.add_argument("--ppl", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, api) -> int:
    from ..formats.output import refuse_same_file
    from ..runtime.evaluate.windows import read_text
    from .collector import collect_imatrix
    from .files import save_imatrix

    if not args.file:
        raise UsageError("-f TEXT is needed")
    refuse_same_file(args.output, (args.model, args.file))
    text = read_text(args.file)
    if args.precision not in (None, "f32"):
        note(f"--precision {args.precision}", "inputs of products are observed in float32")
    args.precision = "f32"

    saved = 0

    def checkpoint(done: int, take) -> None:
        nonlocal saved
        if 0 < args.output_frequency <= done - saved:
            save_imatrix(take().imatrix, args.output, args.output_format)
            saved = done

    with open_model(args, rows=batch_tokens(args), window=args.ctx_size) as model:
        refuse_same_file(args.output, model.source.files)
        imatrix = collect_imatrix(model, text, n_ctx=args.ctx_size, chunks=args.chunks, process_output=args.process_output,
                                  compute_perplexity=not args.no_ppl, dataset=args.file, batch_tokens=batch_tokens(args),
                                  progress=RunningOutput(args), checkpoint=checkpoint)
    save_imatrix(imatrix, args.output, args.output_format)
    print(f"{len(imatrix.entries)} entries from {imatrix.chunk_count} chunks of {imatrix.chunk_size} tokens written to {args.output}")
    return 0
