"""`iqforge plan-split`: what each GPU would hold and compute of a model, without any GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..parallel.modes import EXPERT_CHOICES, parse_shares
from .flags import MODEL_HELP, note

if TYPE_CHECKING:
    from ..split_report import SplitReport

_MIB = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `iqforge plan-split` to its parser."""
    parser.description = (
        "Print how -sm graph splits a model: for every tensor role the units and bytes of each"
        " rank, the cache, and what ranks send each other. Needs no GPU and reads no matrix."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "-m", "--model", dest="named_model", metavar="MODEL", help="another way to name MODEL"
    )
    parser.add_argument(
        "--synthetic",
        metavar="SHAPE:TYPE",
        help="a model of a known shape instead, such as llama-70b:IQ4_K",
    )
    parser.add_argument(
        "-ts",
        "--tensor-split",
        required=True,
        metavar="A,B,...",
        help="the share of each GPU, such as 1,1 or 3,1",
    )
    parser.add_argument(
        "--simulate",
        nargs="?",
        const="",
        metavar="SHAPE:TYPE",
        help="predict speeds on H200s as well, of the model or of a known shape",
    )
    parser.add_argument("--hosts", type=int, default=1, help="hosts of the GPUs (default: 1)")
    parser.add_argument(
        "--split-experts",
        choices=EXPERT_CHOICES,
        default="auto",
        help="split experts by hidden columns, or give whole ones to each rank (default: auto,"
        " for every layer what is faster)",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="distribute as ik_llama.cpp does, which corrects shares by bytes",
    )
    parser.add_argument(
        "-muge", "--merge-up-gate-experts", action="store_true", help="merge gate and up of experts"
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=8192,
        help="tokens of the cache; 0: as many as the model was trained for (default: 8192)",
    )
    parser.add_argument("-ctk", "--cache-type-k", default="f16", help="type of keys (default: f16)")
    parser.add_argument(
        "-ctv", "--cache-type-v", default="f16", help="type of values (default: f16)"
    )
    parser.add_argument(
        "-d",
        "--n-depth",
        type=int,
        default=0,
        help="tokens before those whose speed is predicted (default: 0)",
    )
    parser.add_argument(
        "-ub", "--ubatch-size", type=int, default=2048, help="tokens of a prompt (default: 2048)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace, api) -> int:
    """Print the plan as text or JSON, and return 0. Raise UsageError for sizes below 1 or unless
    exactly one model is named.
    """
    spec = args.simulate or args.synthetic
    if sum(given is not None for given in (args.model, args.named_model, spec)) != 1:
        raise UsageError("exactly one of MODEL and --synthetic SHAPE:TYPE is needed")
    args.model = args.model or args.named_model
    if args.simulate and args.synthetic:
        raise UsageError("--simulate and --synthetic both name a model")
    for flag, value, least in (
        ("-c", args.ctx_size, 0),
        ("-ub", args.ubatch_size, 1),
        ("-d", args.n_depth, 0),
        ("--hosts", args.hosts, 1),
    ):
        if value < least:
            raise UsageError(f"{flag} is {value}, expected at least {least}")
    shares = parse_shares(args.tensor_split)
    if args.hosts == 1 and (zeros := shares.count(0)):
        print(
            f"note: {zeros} of {len(shares)} shares of -ts are 0: these GPUs are left out, as by"
            " -sm graph (processes of torchrun keep what every rank has)",
            file=sys.stderr,
        )
        shares = tuple(share for share in shares if share)
        if len(shares) == 1:
            raise UsageError(f"-ts is '{args.tensor_split}': one GPU alone has a share")
    if args.simulate is None:
        given = {"--hosts": args.hosts != 1, "-d": args.n_depth != 0}
        if flags := ", ".join(flag for flag, one in given.items() if one):
            note(flags, "only the speeds that --simulate predicts depend on that")
    if len(shares) % args.hosts:
        raise UsageError(f"{len(shares)} ranks cannot be on {args.hosts} hosts with as many each")
    report = api.plan_split(
        spec if args.model is None else args.model,
        shares,
        synthetic=args.model is None,
        experts=args.split_experts,
        reference=args.reference,
        merge_gate_up=args.merge_up_gate_experts,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        context=args.ctx_size,
        n_past=args.n_depth,
        n_prompt=args.ubatch_size,
        n_hosts=args.hosts,
    )
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
        return 0
    for line in _lines(report, args.simulate is not None):
        print(line)
    return 0


def _lines(report: SplitReport, with_speed: bool) -> list[str]:
    plan, ranks = report.plan, range(report.plan.n_ranks)
    shares = ", ".join(f"{100 * share:.1f} %" for share in plan.shares)
    lines = [f"{report.model}: {report.architecture} over {plan.n_ranks} ranks ({shares})", ""]
    head = ["role", "split", "of", "unit", *(f"rank {rank}" for rank in ranks)]
    rows = []
    for role in report.roles:
        cells = [role.role, role.kind, str(role.whole or ""), str(role.unit or "")]
        for (low, high), n_bytes in zip(role.sizes, role.n_bytes, strict=True):
            size = "" if not role.whole else f"{low}" if low == high else f"{low}-{high}"
            cells.append(f"{size} {_mib(n_bytes)}".strip())
        rows.append(cells)
    rows.append(["weights", "", "", "", *(_mib(n) for n in report.weights)])
    rows.append([f"cache of {report.context}", "", "", "", *(_mib(n) for n in report.cache)])
    both = [w + c for w, c in zip(report.weights, report.cache, strict=True)]
    rows.append(["sum", "", "", "", *(_mib(n) for n in both)])
    lines += _table(head, rows)
    p = report.prediction
    lines += [
        "",
        f"Every rank has {_mib(report.copied)} of the same weights.",
        f"A token takes {p.n_sums} sums; each rank sends {p.step_moved / 1024:,.0f} KiB.",
        f"A prompt of {p.n_prompt} tokens: each rank sends {_mib(p.prompt_moved)}.",
    ]
    if with_speed:
        lines += ["", *_speeds(report)]
    return lines


def _speeds(report: SplitReport) -> list[str]:
    c = report.costs
    rows = [
        [
            str(n),
            _mib(size),
            f"{p.prompt_rate:,.0f}",
            f"{100 * p.sums_of_prompt / p.prompt:.0f} %",
            f"{p.step_rate:,.1f}",
            f"{100 * p.sums_of_step / p.step:.0f} %",
        ]
        if fits
        else [str(n), _mib(size), "does not fit", "", "does not fit", ""]
        for n, size, p, fits in (
            *((few.n_gpus, few.weights, few.prediction, few.fits) for few in report.fewer),
            (report.plan.n_ranks, max(report.weights), report.prediction, report.fits),
        )
    ]
    n_prompt = report.prediction.n_prompt
    found = [
        f"Predicted from what products and sums cost on {c.name}s ({c.read / 1e12:.1f} TB/s, for"
        f" experts {c.read_experts / 1e12:.1f}, and {c.product * 1e6:.1f} us for a product of a"
        f" step, {c.multiply / 1e12:.0f} TFLOP/s for prompts, from {c.step_sum[0] * 1e6:.1f} us on"
        f" for a sum); weights and cache of {report.context} tokens fit {_mib(c.memory)}:",
        *_table(["GPUs", "weights", f"pp{n_prompt}", "of it sums", "tg", "of it sums"], rows),
    ]
    if report.as_delta:
        found.append(f"Not measured, and predicted as delta nets: {', '.join(report.as_delta)}.")
    if (n := report.fastest) < report.plan.n_ranks:
        found.append("One GPU generates fastest." if n == 1 else f"{n} GPUs generate fastest.")
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the first two columns to the left, others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _mib(n_bytes: float) -> str:
    size: Any = n_bytes / _MIB
    return f"{size:,.1f} MiB" if size < 10000 else f"{size / 1024:,.1f} GiB"
