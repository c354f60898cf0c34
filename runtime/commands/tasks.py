"""The tasks of `iqforge perplexity` with several answers: their flags, and a score printed in the
reference's words.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..options import LoadOptions
from ..text_options import HELLASWAG_TASKS, ChunkOptions, PerplexityOptions
from .flags import open_model

if TYPE_CHECKING:
    from ..evaluate.tasks import TaskItem

TASKS = {
    "hellaswag": "HellaSwag",
    "winogrande": "Winogrande",
    "multiple-choice": "multiple choice",
}


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add --hellaswag, --winogrande, --multiple-choice and how many tasks of each are drawn."""
    group = parser.add_argument_group("tasks with several answers, read from -f")
    for kind, name in TASKS.items():
        default = HELLASWAG_TASKS if kind == "hellaswag" else "all"
        group.add_argument(f"--{kind}", action="store_true", help=f"count right answers in {name}")
        group.add_argument(
            f"--{kind}-tasks",
            type=int,
            metavar="N",
            help="draw N of them at random, always the same ones; 0: take all (default:"
            f" {default})",
        )
    group.add_argument(
        "-bf", "--binary-file", metavar="FILE", help="the file of --multiple-choice, instead of -f"
    )


def task_kind(args: argparse.Namespace, options: PerplexityOptions, texts: list[str]) -> str | None:
    """Return the kind of tasks that the flags ask for. UsageError for flags that exclude each
    other, and for numbers of tasks that cannot be.
    """
    given = [kind for kind in TASKS if getattr(args, kind.replace("-", "_"))]
    for one in TASKS:
        n = _number_of_tasks(args, one)
        if n is not None and n < 0:
            raise UsageError(f"--{one}-tasks is {n}, expected 0 (all) or more")
        if n is not None and one not in given:
            raise UsageError(f"--{one}-tasks needs --{one}")
    if not given:
        return None
    kind = given[0]
    others = [f"--{other}" for other in given[1:]]
    others += ["--kl-divergence"] * options.kl_divergence
    others += ["--kl-divergence-against"] * (args.kl_divergence_against is not None)
    others += ["--kl-divergence-base"] * (options.kl_divergence_base is not None)
    others += ["--ppl-stride"] * (options.ppl_stride > 0)
    if others:
        raise UsageError(f"--{kind} and {others[0]} cannot be given together")
    files = texts + [args.binary_file] * (args.binary_file is not None)
    if len(files) != 1 or args.prompt is not None:
        raise UsageError(f"--{kind} needs one file of tasks: -f FILE")
    if args.binary_file and kind != "multiple-choice":
        raise UsageError("-bf is the file of --multiple-choice")
    return kind


def _number_of_tasks(args: argparse.Namespace, kind: str) -> int | None:
    return getattr(args, f"{kind.replace('-', '_')}_tasks")


def score_tasks(args: argparse.Namespace, api, kind: str) -> int:
    """Score the tasks of `kind`, print each as it is answered and the sum of them, and return 0."""
    from ..evaluate import report

    options, load = ChunkOptions.from_flags(args), LoadOptions.from_flags(args)
    rows = options.tokens_per_pass(load.ubatch)
    line = report.winogrande_line if kind == "winogrande" else report.choice_line

    def show(index: int, item: TaskItem) -> None:
        if index == 0 and kind != "winogrande":
            print(report.TASK_HEADER)
        print(line(index, item), flush=True)

    with open_model(args, api, rows=rows, chunk=options.n_ctx) as model:
        score = api.measure_tasks(
            model,
            args.binary_file or args.file[0],
            kind,
            _number_of_tasks(args, kind),
            options=options,
            on_task=show,
        )
    for one in report.task_summary(kind, score):
        print(one)
    return 0
