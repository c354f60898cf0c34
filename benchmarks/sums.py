"""Time the sum of one token's hidden vector over GPUs within a CUDA graph, and sums of prompts.

    python benchmarks/sums.py --ranks 4

Every rank is a process with one GPU. First the results are checked against the sum in the order of
ranks. Then, for each way, the microseconds of one sum in a graph of many, and the same bits in all
runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from iqforge.cuda_kernels.peer.links import PeerLinks
from iqforge.cuda_kernels.peer.rows import PeerRows
from iqforge.runtime.parallel.group import Group
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.ranks import Ranks

IN_GRAPH = 64  # sums


def main() -> int:
    """Start the ranks, or measure in one of them. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    args = parser.parse_args()
    ranks = Ranks.here()
    if ranks is None:
        return run_ranks([sys.executable, *sys.argv], args.ranks)
    measure(ranks, args)
    return 0


def say(group: Group, text: str) -> None:
    """Print a line, in the first rank only."""
    if group.rank == 0:
        print(text, flush=True)


def measure(ranks: Ranks, args: argparse.Namespace) -> None:
    """Check the sums and the gathering, then time them and print the times."""
    device = torch.device("cuda", ranks.local_rank)
    group = Group(ranks, device, timeout=60)
    elements = max(8 * args.width, 8 * (args.vocabulary // ranks.size + 16))
    begun = time.perf_counter()
    links = PeerLinks(ranks.rank, ranks.size, elements, device, group.exchange, timeout=20)
    say(group, f"links in {time.perf_counter() - begun:.2f} s")
    check_sums(group, links, args.width)
    check_gather(group, links, args.vocabulary)
    for rows in (1, 2, 4, 8):
        time_ways(group, links, rows, args.width)
    time_gather(group, links, args.vocabulary)
    time_prompts(group, args.tokens, args.width)
    rows = [
        PeerRows(
            ranks.rank, ranks.size, [(n, torch.float32)], args.width, device, group.exchange, 20
        )
        for n in (args.tokens, 40)
    ]
    check_rows(group, rows[1], 96)
    for moved in (torch.bfloat16, torch.float32):
        for width in (2048, args.width):
            time_rows(group, rows[0], args.tokens, width, moved)
    group.wait()
    for some in rows:
        some.close()
    links.close()
    group.close()


def parts(group: Group, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the parts of all ranks, the same on each."""
    made = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=made).to(group.device) for _ in range(group.size)]


def check_sums(group: Group, links: PeerLinks, width: int) -> None:
    """Check `PeerLinks.sum` on float32[rows, width] against the sum in the order of ranks, bit for
    bit. Raise AssertionError otherwise.
    """
    for rows in (1, 3, 8):
        found = parts(group, (rows, width))
        start = torch.linspace(-1, 1, rows * width, device=group.device).view(rows, width)
        total = found[0].clone()
        for part in found[1:]:
            total += part
        for assign in (False, True):
            for _ in range(5):
                x, h = found[group.rank].clone(), start.clone()
                links.sum(x, h, assign=assign)
                torch.cuda.synchronize()
                wanted = total if assign else start + total
                assert torch.equal(h, wanted), (rows, assign, (h - wanted).abs().max())
                assert not x.any()
    say(group, "sums: the bits of the sum in order of ranks")


def check_gather(group: Group, links: PeerLinks, vocabulary: int) -> None:
    """Check that `PeerLinks.gather` joins unequal parts of float32[rows, vocabulary] exactly. Raise
    AssertionError otherwise.
    """
    ends = [vocabulary * (r + 1) // group.size // 16 * 16 for r in range(group.size)]
    ends[0] = ends[0] // 2 // 16 * 16
    ends[-1] = vocabulary
    own = slice(ends[group.rank - 1] if group.rank else 0, ends[group.rank])
    for rows in (1, 2):
        whole = torch.arange(rows * vocabulary, device=group.device).float().view(rows, -1)
        out = torch.zeros_like(whole)
        for _ in range(3):
            out.zero_()
            links.gather(whole[:, own].contiguous(), out, ends)
            torch.cuda.synchronize()
            assert torch.equal(out, whole)
    say(group, "gather: right")


def timed(group: Group, call, repetitions: int = 50) -> float:
    """Microseconds of one of IN_GRAPH calls in a graph: the best of several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            call()
    times = []
    for _ in range(repetitions):
        group.wait()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / IN_GRAPH)
    times.sort()
    return times[len(times) // 2]


def time_ways(group: Group, links: PeerLinks, rows: int, width: int) -> None:
    """Print microseconds of the sum of float32[rows, width] over GPUs: with the residual, and
    NCCL's with and without it.
    """
    x, h = (torch.zeros(rows, width, device=group.device) for _ in range(2))
    mine = timed(group, lambda: links.sum(x, h))

    def nccl() -> None:
        dist.all_reduce(x)
        h.add_(x)

    other = timed(group, nccl)
    only = timed(group, lambda: dist.all_reduce(x))
    say(
        group,
        f"{group.size} GPUs, {rows} x {width} f32 in a graph: {mine:.2f} us with the residual;"
        f" NCCL {only:.2f} us, with the residual {other:.2f} us",
    )


def time_gather(group: Group, links: PeerLinks, vocabulary: int) -> None:
    """Print microseconds of gathering logits float32[1, vocabulary] from all GPUs."""
    ends = [vocabulary * (r + 1) // group.size for r in range(group.size)]
    n = ends[group.rank] - (ends[group.rank - 1] if group.rank else 0)
    x = torch.zeros(1, n, device=group.device)
    out = torch.zeros(1, vocabulary, device=group.device)
    found = timed(group, lambda: links.gather(x, out, ends))
    say(group, f"{group.size} GPUs, logits of {vocabulary}: {found:.2f} us")


def check_rows(group: Group, rows: PeerRows, tokens: int) -> None:
    """Sums of more rows than fit at a time, of plain rows and of experts', with each way to move
    them.
    """
    half, made = torch.bfloat16, torch.Generator().manual_seed(7)
    for width, moved in ((512, half), (2048, torch.float16), (3072, torch.float32), (8192, half)):
        parts = [torch.randn(tokens, width, generator=made).to(half) for _ in range(group.size)]
        extras = [torch.randn(tokens, width, generator=made).to(half) for _ in range(group.size)]
        slots = torch.randint(-1, tokens, (tokens, 4), generator=made, dtype=torch.int32)
        shares = torch.rand(tokens, 4, generator=made)
        of_extra = torch.randn(tokens, generator=made)  # before the sigmoid
        weight, start = (
            torch.rand(width, generator=made),
            torch.randn(tokens, width, generator=made),
        )
        for kind in ("plain", "experts", "nothing", "post norm"):
            total = torch.zeros(tokens, width)
            for rank, (part, extra) in enumerate(zip(parts, extras, strict=True)):
                y = part.float()
                if kind == "experts":
                    y = extra.float() * of_extra.sigmoid()[:, None]
                    for k in range(4):
                        chosen = part.float()[slots[:, k].long().clamp(0)] * shares[:, k : k + 1]
                        y = y + chosen.masked_fill(slots[:, k : k + 1] < 0, 0)
                if kind == "nothing" and rank:
                    y = torch.zeros_like(y)
                total += y.to(moved).float()
            total = total if group.size == 2 else total.to(moved).float()
            if kind == "post norm":
                total = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-5) * weight
            wanted = start + total
            normed = wanted * torch.rsqrt(wanted.square().mean(1, keepdim=True) + 1e-5) * weight
            here = {"delta": parts[group.rank]}
            if kind == "experts":
                here |= {"rows": slots, "weights": shares}
                here |= {"extra": extras[group.rank], "shares": of_extra}
            if kind == "nothing" and group.rank:
                here = {}
            given: dict[str, Any] = {name: x.to(group.device) for name, x in here.items()}
            if kind == "post norm":
                given |= {"post_weight": weight.to(group.device), "post_eps": 1e-5}
            digits = set()
            for _ in range(3):
                h = start.to(group.device)
                out = torch.zeros(tokens, width, dtype=half, device=group.device)
                first, columns = out, {}
                if kind == "experts":  # columns in the order of products with packed experts, too
                    first, columns = torch.empty_like(out), {"permuted": True, "plain": out}
                rows.add_norm(
                    h,
                    weight.to(group.device),
                    1e-5,
                    first,
                    moved=moved,
                    half=half,
                    **columns,
                    **given,
                )
                torch.cuda.synchronize()
                error = float((h.cpu() - wanted).abs().max() / wanted.abs().max())
                # A rounding of the sum of experts or of all ranks may go the other way.
                most = 1e-5 if moved == torch.float32 or kind == "plain" else 2e-2
                assert error < most, (kind, width, moved, error)
                error = float((out.cpu().float() - normed).abs().max() / normed.abs().max())
                assert error < 2e-2, (kind, width, moved, error)
                digits.add(int(h.view(torch.int32).sum()))
            found = group.exchange(sorted(digits))
            assert len(digits) == 1 and all(x == found[0] for x in found), (kind, width, moved)
    say(group, "rows: the sum in order of ranks, the same bits on all")


def time_rows(group: Group, rows: PeerRows, tokens: int, width: int, moved: torch.dtype) -> None:
    """Print microseconds of the prompt's sum of [tokens, width] with residual and norm, and GB/s
    each way, if values move as `moved`.
    """
    half, weight = torch.bfloat16, torch.ones(width, device=group.device)
    h = torch.zeros(tokens, width, device=group.device)
    delta, out = (torch.zeros(tokens, width, dtype=half, device=group.device) for _ in range(2))
    found = timed(
        group,
        lambda: rows.add_norm(h, weight, 1e-5, out, moved=moved, half=half, delta=delta),
        20,
    )
    sent = 2 * (group.size - 1) / group.size * tokens * width * moved.itemsize
    say(
        group,
        f"{group.size} GPUs, {tokens} x {width} {moved}: {found:.1f} us with residual, norm and"
        f" rounding, {sent / found / 1e3:.0f} GB/s each way",
    )


def time_prompts(group: Group, tokens: int, width: int) -> None:
    """Print microseconds and GB/s of NCCL's all-reduce of [tokens, width] in float32 and
    bfloat16.
    """
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(tokens, width, device=group.device, dtype=dtype)
        for _ in range(3):
            dist.all_reduce(x)
        torch.cuda.synchronize()
        group.wait()
        begun = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(x)
        torch.cuda.synchronize()
        each = (time.perf_counter() - begun) / 20
        moved = 2 * (group.size - 1) / group.size * x.nbytes / each
        say(
            group,
            f"{group.size} GPUs, {tokens} x {width} {dtype}: NCCL {1e6 * each:.0f} us,"
            f" {moved / 1e9:.0f} GB/s each way",
        )


if __name__ == "__main__":
    sys.exit(main())
