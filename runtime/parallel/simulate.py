"""Predict what a split plan takes and how fast it runs, from what products and sums cost.

The model is simple on purpose. A step reads the used weights once and launches one kernel for each
product; a prompt multiplies; after each partial result ranks wait for the slowest and add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName
from ..weights.shard import local_tensor
from ..weights.split_plan import SplitPlan, length
from .expert_mode import busiest_share

DEEP = 4096  # tokens, from which on several blocks of a GPU share a head's cache
SUM_WIDTH = 8192  # elements


@dataclass(frozen=True)
class Costs:
    """What work costs on a kind of GPU.

    read, read_experts: bytes per second that products of a step read; those of experts read fewer.
    product: seconds that each such product takes besides. delta, latent:
    seconds that a step takes besides for each mixer that is a delta net or latent attention. cache:
    bytes per second of caches that steps read. deep: seconds besides for each mixer with a cache,
    after DEEP tokens or more. multiply: operations per second of products of prompts; attend,
    attend_latent: of their attention to the tokens before. experts: elements per second of all
    experts, which a prompt reads and decodes besides. row, expert_row: seconds for each element of
    the residual stream in a layer of a prompt, and for each expert that it goes to; split_row:
    those that ranks share. delta_row, latent_row: seconds for each token of a prompt and such
    mixer, on every rank and those that ranks share. step_sum: seconds of a sum of one token's row
    over 2 ranks, with what ranks wait for each other, and what each further rank adds for SUM_WIDTH
    elements; for others in proportion. link: bytes per second that a rank sends. prompt_sum:
    seconds that starting a sum of a prompt takes. host_sum, host_link: as step_sum and link,
    between hosts. memory: bytes.
    """

    name: str
    memory: float
    read: float
    read_experts: float
    product: float
    delta: float
    latent: float
    cache: float
    deep: float
    multiply: float
    attend: float
    attend_latent: float
    experts: float
    row: float
    split_row: float
    expert_row: float
    delta_row: tuple[float, float]
    latent_row: tuple[float, float]
    step_sum: tuple[float, float]
    link: float
    prompt_sum: float
    host_sum: float
    host_link: float


# Fitted to pp2048 and tg64 of 26 models and depths on one H200 and on two (2026-11-28) and of 13 on
# four (2026-11-27), all in IQ4_K but for gpt-oss-20b in MXFP4: steps within 12 %, prompts within
# 15 % (`tests/test_plan_split_command.py`). The speed of a link is that of sums of prompts. Links
# between hosts (400 Gbit/s) are assumed.
H200 = Costs(
    "H200",
    memory=139 * 2**30,
    read=3.63e12,
    read_experts=2.1e12,
    product=1.15e-6,
    delta=3.4e-6,
    latent=4.8e-6,
    cache=4.2e12,
    deep=7.0e-6,
    multiply=650e12,
    attend=316e12,
    attend_latent=232e12,
    experts=6.3e12,
    row=8.6e-12,
    split_row=7.2e-12,
    expert_row=4.1e-12,
    delta_row=(0.11e-6, 0.29e-6),
    latent_row=(0.05e-6, 0.05e-6),
    step_sum=(5.0e-6, 2.5e-6),
    link=280e9,
    prompt_sum=22e-6,
    host_sum=25e-6,
    host_link=45e9,
)


@dataclass(frozen=True)
class Work:
    """What a model has besides its tensors.

    width: of the residual stream. n_vocab: logits of a row. n_used, n_experts: of each layer; 0 for
    layers without experts. sums: partial results of each layer; exchanges: those in which a step
    adds them up. mixers: of each layer, the kinds of its mixers: `attention`, `delta`, `latent` or
    `none`. n_past: tokens before.
    cache_read, attended: bytes of the cache that a step reads, and operations of attention that a
    prompt takes because of these tokens, by rank.
    """

    width: int
    n_vocab: int
    n_used: tuple[int, ...]
    n_experts: tuple[int, ...]
    sums: tuple[int, ...]
    exchanges: tuple[int, ...]
    mixers: tuple[tuple[str, ...], ...]
    n_past: int
    cache_read: tuple[float, ...]
    attended: tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """step: seconds of one token; sums_of_step: those in sums. prompt: seconds of `n_prompt`
    tokens; sums_of_prompt: those in sums. step_moved, prompt_moved: bytes that each rank sends.
    n_sums: sums of a pass.
    """

    step: float
    sums_of_step: float
    prompt: float
    sums_of_prompt: float
    n_prompt: int
    step_moved: float
    prompt_moved: float
    n_sums: int

    @property
    def step_rate(self) -> float:
        """Tokens per second, one after the other."""
        return 1 / self.step

    @property
    def prompt_rate(self) -> float:
        """Tokens of a prompt per second."""
        return self.n_prompt / self.prompt


def simulate(
    tensors: Sequence[TensorInfo],
    plan: SplitPlan,
    work: Work,
    *,
    n_prompt: int = 2048,
    reduce_bytes: float = 2.0,
    n_hosts: int = 1,
    costs: Costs = H200,
) -> Prediction:
    """Predict the speed of a plan. reduce_bytes: of an element that is moved for a sum of a prompt;
    those of steps have 4.
    """
    n_ranks, n_layers = plan.n_ranks, len(work.sums)
    steps, prompts = (
        [[0.0] * n_ranks for _ in range(n_layers + 1)],
        [[0.0] * n_ranks for _ in range(n_layers + 1)],
    )
    has_output = any(tensor.name == OUTPUT for tensor in tensors)
    for tensor in tensors:
        name = TensorName.parse(tensor.name)
        is_output = tensor.name == (OUTPUT if has_output else TOKEN_EMBEDDING)
        if len(tensor.shape) < 2 or (name.layer is None and not is_output):
            continue
        layer = n_layers if name.layer is None else name.layer
        if layer > n_layers:  # predicts further tokens
            continue
        split = plan.of(OUTPUT if is_output else tensor.name)
        stacked = name.expert_layer is not None and len(tensor.shape) == 3
        for rank in range(n_ranks):
            local = local_tensor(tensor, split, rank)
            if local is None:
                continue
            used, share, read = 1.0, 1.0, costs.read
            if stacked:
                used, read = _used(plan, work, layer, rank), costs.read_experts
                share = work.n_used[layer] / work.n_experts[layer]
                prompts[layer][rank] += local.n_elements / costs.experts
            rows = 1 if is_output else n_prompt
            steps[layer][rank] += costs.product + used * local.n_bytes / read
            prompts[layer][rank] += 2.0 * share * local.n_elements * rows / costs.multiply
    for rank in range(n_ranks):
        for layer in range(n_layers):
            steps[layer][rank] += work.cache_read[rank] / n_layers / costs.cache
            steps[layer][rank] += _step_besides(work, layer, costs)
            latent = any("latent" in kinds for kinds in work.mixers)
            attend = costs.attend_latent if latent else costs.attend
            prompts[layer][rank] += work.attended[rank] / n_layers / attend
            prompts[layer][rank] += n_prompt * _row_besides(work, layer, n_ranks, costs)
    n_sums = sum(work.sums) if n_ranks > 1 else 0
    sent = 2 * (n_ranks - 1) / n_ranks
    link = costs.host_link if n_hosts > 1 else costs.link
    first, more = costs.step_sum
    step_sum = first + more * work.width / SUM_WIDTH * max(0, n_ranks // n_hosts - 2)
    step_sum += costs.host_sum if n_hosts > 1 else 0.0
    row_bytes = n_prompt * work.width * reduce_bytes
    # And one that joins the logits.
    sums_of_step = (sum(work.exchanges) + 1) * step_sum if n_sums else 0.0
    sums_of_prompt = n_sums * (costs.prompt_sum + sent * row_bytes / link)
    logits = 4.0 * work.n_vocab * (n_ranks - 1) / n_ranks
    return Prediction(
        step=sum(map(max, steps)) + sums_of_step,
        sums_of_step=sums_of_step,
        prompt=sum(map(max, prompts)) + sums_of_prompt,
        sums_of_prompt=sums_of_prompt,
        n_prompt=n_prompt,
        step_moved=n_sums * sent * work.width * 4.0 + logits,
        prompt_moved=n_sums * sent * row_bytes + logits,
        n_sums=n_sums,
    )


def _step_besides(work: Work, layer: int, costs: Costs) -> float:
    """Return the seconds that a layer of a step takes besides products."""
    deep = costs.deep * min(1.0, work.n_past / DEEP)
    of_kind = {"delta": costs.delta, "latent": costs.latent + deep, "attention": deep}
    return sum(of_kind.get(kind, 0.0) for kind in work.mixers[layer])


def _row_besides(work: Work, layer: int, n_ranks: int, costs: Costs) -> float:
    """Return the seconds that a layer takes for a token of a prompt besides products."""
    seconds = work.width * (costs.row + costs.expert_row * work.n_used[layer])
    split = work.width * costs.split_row
    of_mixer = {"delta": costs.delta_row, "latent": costs.latent_row}
    for kind in work.mixers[layer]:
        own, own_split = of_mixer.get(kind, (0.0, 0.0))
        seconds, split = seconds + own, split + own_split
    return seconds + split / n_ranks


def _used(plan: SplitPlan, work: Work, layer: int, rank: int) -> float:
    """Return the part of a rank's expert tensors that a token reads: on average if each rank has
    columns of all experts, on the busiest rank if it has whole ones.
    """
    n_used, n_experts = work.n_used[layer], work.n_experts[layer]
    parts = plan.layers[layer] if plan.layers else ()
    if not parts or parts[rank].expert_mode != "whole":
        return n_used / n_experts
    counts = tuple(length(part.experts) for part in parts)
    return min(1.0, busiest_share(counts, n_used) * n_used / max(1, counts[rank]))
