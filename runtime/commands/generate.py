"""`iqforge generate`: text that follows a prompt, printed as it comes."""

from __future__ import annotations

import argparse
import re
import sys

from ...errors import UsageError, printable
from .flags import add_runtime_flags, open_model

_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a prompt. Candidates are the top-k tokens, of these the fewest that make up"
        " top-p, of these those at least min-p times as probable as the best; temperature then"
        " decides how often the less probable come."
    )
    add_runtime_flags(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="the prompt; \\n, \\t, \\\\ and the like are replaced unless --no-escape",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the prompt")
    parser.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=int,
        metavar="N",
        help="generate at most N tokens; -1: until the context is full (default: 128, if they fit)",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=0,
        metavar="N",
        help="most tokens in all (default: as many as needed)",
    )
    parser.add_argument(
        "-b", "--batch-size", type=int, default=2048, help=argparse.SUPPRESS
    )  # -ub bounds what is evaluated at a time
    parser.add_argument(
        "--temp",
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the most probable token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=40, metavar="K", help="0: all tokens (default: 40)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="1: no bound (default: 0.95)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.05, metavar="P", help="0: no bound (default: 0.05)"
    )
    parser.add_argument(
        "-s",
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the same seed gives the same text, -1: any (default: 0)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on behind tokens that end a text"
    )
    parser.add_argument("--special", action="store_true", help="print control tokens, too")
    parser.add_argument(
        "--no-display-prompt", action="store_true", help="print only what is generated"
    )
    parser.add_argument(
        "--no-escape", action="store_true", help="take backslashes in -p as they are"
    )
    parser.add_argument("-e", "--escape", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, api) -> int:
    from ...formats.gguf.reader import open_gguf
    from ..architectures import declaration
    from ..evaluate.windows import read_text
    from ..generate import (
        Generation,
        TextStream,
        end_tokens,
        generate_tokens,
        plan_length,
        prompt_tokens,
    )
    from ..hyperparameters import Hyperparameters
    from ..tokenizer import Tokenizer

    if (args.prompt is None) == (args.file is None):
        raise UsageError("either -p PROMPT or -f FILE is needed")
    if args.ctx_size < 0:
        raise UsageError(f"-c is {args.ctx_size}, expected 0 (as many as needed) or more")
    sampling = _sampling(args)
    text = (
        read_text(args.file)
        if args.prompt is None
        else args.prompt
        if args.no_escape
        else unescape(args.prompt)
    )
    source = open_gguf(args.model)
    try:
        hyperparameters = Hyperparameters(source.metadata, str(source.path))
        declaration(hyperparameters.architecture, hyperparameters.file)  # before the tokenizer
        tokenizer = Tokenizer.from_metadata(source.metadata, file=str(source.path))
        prompt = prompt_tokens(tokenizer, text)
        context, n = plan_length(prompt, args.predict, args.ctx_size, hyperparameters)
    except BaseException:
        source.close()
        raise
    with open_model(args, source=source, context=context) as model:
        record = Generation(len(prompt))
        end = frozenset() if args.ignore_eos else end_tokens(model)
        stream = TextStream(tokenizer, args.special)
        if not args.no_display_prompt:
            for token in prompt:  # in front of what follows, with which it may share a character
                _show(stream.feed(token))
        for token in generate_tokens(
            model, prompt, n, sampling, context=context, end=end, record=record
        ):
            _show(stream.feed(token))
        _show(stream.end() + "\n")
    n = len(record.tokens)  # the first one is the prompt's result
    speed = (
        f", {n - 1} of them in {record.seconds:.2f} s, {record.per_second:.2f} tokens/s"
        if n > 1
        else ""
    )
    print(
        f"prompt: {record.prompt_tokens} tokens in {record.prompt_seconds:.2f} s,"
        f" {record.prompt_per_second:.2f} tokens/s\ngenerated: {n}"
        f" token{'s' * (n != 1)}{speed}{'; ended by itself' if record.ended else ''}",
        file=sys.stderr,
    )
    return 0


def unescape(text: str) -> str:
    r"""\n, \r, \t, \", \', \\ and \xHH replaced by what they stand for; other backslashes stay.

    \xHH is a byte of UTF-8, as in the reference. UsageError for bytes that are none.
    """

    def meant(found: re.Match[bytes]) -> bytes:
        return _ESCAPES[found[1]] if found[1] else bytes.fromhex(found[2].decode())

    replaced = re.sub(
        rb"\\(?:([nrt'\"\\])|x([0-9a-fA-F]{2}))", meant, text.encode("utf-8", "surrogatepass")
    )
    try:
        return replaced.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"-p is not UTF-8 at byte {error.start}:"
            f" {printable(replaced[error.start : error.end], 40)}"
        ) from None


def _sampling(args: argparse.Namespace):
    import secrets

    from ..sampling import Sampling

    seed = args.seed
    if seed == -1:
        seed = secrets.randbits(32)
        print(f"seed: {seed}", file=sys.stderr)
    # As in the reference, top-k below 0 means all tokens.
    return Sampling(args.temp, max(args.top_k, 0), args.top_p, args.min_p, seed)


def _show(text: str) -> None:
    if text:
        print(text, end="", flush=True)
