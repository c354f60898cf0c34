"""Options of benchmarks. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...formats.options import Options, option

if TYPE_CHECKING:
    from .bench import Test


@dataclass(frozen=True)
class BenchOptions(Options):
    """The tests of a benchmark. On the command line numbers come in lists with commas."""

    prompts: tuple[int, ...] = option(
        (512,),
        "-p",
        "--n-prompt",
        kind=int,
        many=True,
        text=True,
        metavar="LIST",
        least=1,
        help="tokens of a prompt, 0: no such test (default: 512)",
    )
    generations: tuple[int, ...] = option(
        (128,),
        "-n",
        "--n-gen",
        kind=int,
        many=True,
        text=True,
        least=1,
        metavar="LIST",
        help="tokens to generate, 0: no such test (default: 128)",
    )
    prompt_generations: tuple[tuple[int, int], ...] = option(
        (),
        "-pg",
        kind=tuple,
        many=True,
        text=True,
        metavar="P,G",
        help="a prompt and then generation, timed together",
    )
    generations_after: tuple[tuple[int, int], ...] = option(
        (),
        "-gp",
        kind=tuple,
        many=True,
        text=True,
        metavar="P,G",
        help="generation after a prompt whose time does not count",
    )
    depths: tuple[int, ...] = option(
        (0,),
        "-d",
        "--n-depth",
        kind=int,
        many=True,
        text=True,
        least=0,
        metavar="LIST",
        help="tokens in the context before every test (default: 0)",
    )
    repetitions: int = option(
        5, "-r", "--repetitions", least=1, metavar="N", help="times that each test is measured"
    )
    n_batch: int = option(2048, least=1, help="tokens in one call")
    warmup: bool = option(True, "--no-warmup", off=True, help="no warm-up before a test")

    def only(self, test: Test) -> BenchOptions:
        """Return the same options for one test."""
        pair, none = (test.n_prompt, test.n_gen), ()
        after = ((test.before, test.n_gen),) if test.before else none
        return replace(
            self,
            prompts=(test.n_prompt,) if not test.n_gen else none,
            generations=(test.n_gen,) if not test.n_prompt and not after else none,
            prompt_generations=(pair,) if all(pair) else none,
            generations_after=after,
            depths=(test.depth,),
        )

    def tests(self) -> list[Test]:
        """Return the tests: pp, tg, pg, gp, each at every depth."""
        from .bench import Test

        tests = [Test(n_prompt=n, depth=d) for n in self.prompts for d in self.depths]
        tests += [Test(n_gen=n, depth=d) for n in self.generations for d in self.depths]
        tests += [
            Test(n_prompt=p, n_gen=g, depth=d)
            for p, g in self.prompt_generations
            for d in self.depths
        ]
        return tests + [
            Test(n_gen=g, before=p, depth=d) for p, g in self.generations_after for d in self.depths
        ]


@dataclass(frozen=True)
class SweepOptions(Options):
    """How a sweep over the context is measured."""

    tg: int = option(
        0,
        "-n",
        "--n-predict",
        least=0,
        metavar="N",
        help="tokens to generate per line (default: -ub/4)",
    )
    first_repetitions: int = option(
        1, "-nrep", "--n-repetitions", least=1, metavar="N", help="times to measure the first line"
    )
    stride: int = option(
        1, "--sweep-stride", least=1, metavar="N", help="measure every N-th line only"
    )
    warmup: bool = option(True, "--no-warmup", off=True, help="no warm-up before the first line")
