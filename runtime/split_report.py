"""What a split plan means for each rank: units, bytes, cache, what moves, and predicted speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..formats.source import Source, TensorInfo
from ..formats.tensor_names import TOKEN_EMBEDDING
from .layers.absent import AbsentMixer
from .layers.block import Mixer
from .layers.mla import MLA
from .layers.recurrent.delta_net import DeltaNet
from .layers.recurrent.kimi_delta import KimiDelta
from .layers.recurrent.selective import Selective
from .layers.recurrent.short_conv import ShortConv
from .layers.recurrent.state_space import StateSpace
from .network.network import Network
from .parallel.expert_mode import ExpertChoice
from .parallel.planner import NoPlanError, plan_split
from .parallel.share import NoMeeting, Share
from .parallel.simulate import H200, Costs, Prediction, Work, simulate
from .split_model import exchanges_of, make_plan, network_of, sums_of
from .split_roles import RoleSplit, roles_of
from .state.cache import CacheSettings
from .weights.hyperparameters import Hyperparameters
from .weights.split_plan import SplitPlan
from .weights.switches import Switches

_ONE = SplitPlan((1.0,), {}, ())  # all on one GPU
# What they cost has not been measured.
_AS_DELTA = {
    StateSpace: "state-space layers",
    Selective: "selective state spaces",
    ShortConv: "short convolutions",
    KimiDelta: "Kimi delta attention",
}


@dataclass(frozen=True)
class Fewer:
    """The same model over fewer GPUs, with equal shares. weights, cache: bytes of the GPU that has
    most of both. fits: whether they fit it.
    """

    n_gpus: int
    weights: int
    cache: int
    fits: bool
    prediction: Prediction


@dataclass(frozen=True)
class SplitReport:
    """A plan for a model, and what it means.

    weights: bytes of each rank, the sum over `roles`. copied: those of them that every rank has.
    whole: bytes of the model. context: tokens of the sequence whose cache takes `cache` bytes on
    each rank. prediction: for `len(weights)` GPUs, whether there are any or not. fewer: 1 GPU, 2,
    4 and so on. as_delta: kinds of layers that are predicted to cost what delta nets do.
    """

    model: str
    architecture: str
    plan: SplitPlan
    roles: tuple[RoleSplit, ...]
    weights: tuple[int, ...]
    copied: int
    whole: int
    context: int
    cache: tuple[int, ...]
    costs: Costs
    prediction: Prediction
    fewer: tuple[Fewer, ...]
    as_delta: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Return whether weights and cache fit the GPUs that the prediction is for."""
        both = zip(self.weights, self.cache, strict=True)
        return max(map(sum, both)) <= self.costs.memory

    @property
    def alone(self) -> Prediction:
        """What is predicted for one GPU."""
        return self.fewer[0].prediction

    @property
    def fastest(self) -> int:
        """Return how many GPUs, of those here that the model fits, are predicted to generate
        fastest: fewer of them if they are not slower.
        """
        rates = {len(self.weights): self.prediction.step_rate} if self.fits else {}
        rates |= {few.n_gpus: few.prediction.step_rate for few in self.fewer if few.fits}
        best = max(rates.values(), default=0.0)
        return min((n for n, rate in rates.items() if rate == best), default=len(self.weights))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can have it."""
        found: dict[str, Any] = asdict(self)
        found |= {"fits": self.fits, "fastest": self.fastest}
        plan = found.pop("plan")
        found["shares"], found["layers"] = plan["shares"], plan["layers"]
        found["tensors"] = plan["tensors"]
        predicted = [(found, self.prediction)]
        predicted += zip(found["fewer"], (few.prediction for few in self.fewer), strict=True)
        for shown, one in predicted:
            rates = {"step_rate": one.step_rate, "prompt_rate": one.prompt_rate}
            shown["prediction"] |= rates
        return found


def split_report(
    source: Source,
    shares: Sequence[float],
    *,
    experts: ExpertChoice = "auto",
    reference: bool = False,
    switches: Switches = Switches(),
    settings: CacheSettings = CacheSettings(),
    context: int = 8192,
    n_past: int = 0,
    n_prompt: int = 2048,
    reduce_bytes: float = 2.0,
    n_hosts: int = 1,
    costs: Costs = H200,
) -> SplitReport:
    """Plan a split and say what it means. context: tokens of the cache; 0 for those that the model
    was trained for. n_past: tokens before those whose speed is predicted. Other arguments: see
    `plan_split` and `simulate`.
    """
    plan = make_plan(source, shares, switches, experts=experts, reference=reference)
    settings = replace(settings, swa_full=True)  # as kernels need
    whole = network_of(source, switches)
    if context == 0:
        hyperparameters = Hyperparameters(source.metadata, str(source.path))
        context = hyperparameters.integer("context_length")
    tensors = _used(source, plan)
    roles = roles_of(tensors, plan)

    def predict(plan: SplitPlan, n_hosts: int) -> tuple[list[int], Prediction]:
        """Return the bytes of the cache of each rank, and speeds."""
        ranks = [whole]
        if plan.n_ranks > 1:
            shares = [Share(plan, rank, NoMeeting()) for rank in range(plan.n_ranks)]
            ranks = [network_of(source, switches, share) for share in shares]
        work = _work(whole, ranks, n_past, settings, n_prompt)
        speeds = simulate(
            tensors,
            plan,
            work,
            n_prompt=n_prompt,
            reduce_bytes=reduce_bytes,
            n_hosts=n_hosts,
            costs=costs,
        )
        return [network.state_bytes(context, settings, n_prompt) for network in ranks], speeds

    local, prediction = predict(plan, n_hosts)
    fewer = []
    for n in _fewer(plan.n_ranks):
        other = _ONE
        if n > 1:
            equal = (1.0,) * n
            other = make_plan(source, equal, switches, experts=experts, reference=reference)
        cache, speeds = predict(other, 1)
        both = zip(_weights(tensors, other), cache, strict=True)
        weights, most = max(both, key=sum)
        fewer.append(Fewer(n, weights, most, weights + most <= costs.memory, speeds))
    return SplitReport(
        str(source.path),
        str(source.metadata["general.architecture"].data),
        plan,
        roles,
        tuple(_weights(tensors, plan)),
        sum(t.n_bytes for t in tensors if plan.of(t.name).kind == "copy"),
        sum(t.n_bytes for t in tensors),
        context,
        tuple(local),
        costs,
        prediction,
        tuple(fewer),
        tuple(
            name
            for kind, name in _AS_DELTA.items()
            if any(isinstance(m, kind) for block in whole.blocks for m in block.mixers)
        ),
    )


def faster_with_fewer(
    source: Source,
    network: Network,
    plan: SplitPlan,
    room: float,
    experts: ExpertChoice = "auto",
) -> str | None:
    """Say that fewer GPUs (1, 2, 4 and so on) are predicted to generate faster than those of the
    plan, and how many are fastest; None if they are not, or have less than `room` bytes for the
    weights. network: the whole one, from which all plans are made.
    """
    tensors = _used(source, plan)
    alone = _work(network, [network], 0, CacheSettings())

    def predict(plan: SplitPlan) -> Prediction:
        # No token is in the cache yet, so that ranks do not differ in it.
        n = plan.n_ranks
        work = replace(alone, cache_read=alone.cache_read * n, attended=alone.attended * n)
        return simulate(tensors, plan, work)

    split = predict(plan)
    best, n_best = split, plan.n_ranks
    for n in _fewer(plan.n_ranks):
        try:
            equal = (1.0,) * n
            other = _ONE if n == 1 else plan_split(network, source.tensors, equal, experts=experts)
        except NoPlanError:
            continue
        if max(_weights(tensors, other)) > room:
            continue
        found = predict(other)
        if found.step < best.step:
            best, n_best = found, n
    if n_best == plan.n_ranks:
        return None
    slower = "slower" if best.prompt > split.prompt else "not slower"
    return (
        f"{'one GPU is' if n_best == 1 else f'{n_best} GPUs are'} predicted to generate faster than"
        f" {plan.n_ranks} ({best.step_rate:.0f} and {split.step_rate:.0f} t/s on H200s), and"
        f" prompts {slower} ({best.prompt_rate:,.0f} and {split.prompt_rate:,.0f})"
    )


def _fewer(n_gpus: int) -> list[int]:
    """Return the powers of two below a number of GPUs, of 2 and more."""
    return [1 << i for i in range(n_gpus.bit_length()) if 1 << i < n_gpus]


def _weights(tensors: Sequence[TensorInfo], plan: SplitPlan) -> list[int]:
    """Return the bytes of each rank."""
    if plan.n_ranks == 1:
        return [sum(tensor.n_bytes for tensor in tensors)]
    roles = roles_of(tensors, plan)
    return [sum(role.n_bytes[rank] for role in roles) for rank in range(plan.n_ranks)]


def _used(source: Source, plan: SplitPlan) -> list[TensorInfo]:
    """Return the tensors that the model uses."""
    return [t for t in source.tensors if t.name in plan.tensors or t.name == TOKEN_EMBEDDING]


def _work(
    whole: Network,
    networks: Sequence[Network],
    n_past: int,
    settings: CacheSettings,
    n_prompt: int = 2048,
) -> Work:
    """Return what a model has besides tensors. networks: of every rank."""
    used, experts = zip(*(_experts(block.row_layers) for block in whole.blocks), strict=True)
    return Work(
        whole.width,
        whole.n_vocab,
        used,
        experts,
        tuple(sums_of(block) for block in whole.blocks),
        tuple(exchanges_of(block) for block in whole.blocks),
        tuple(tuple(map(_mixer, block.mixers)) for block in whole.blocks),
        n_past,
        tuple(
            sum(block.mixer.read_bytes(n_past, 1, settings) for block in network.blocks)
            for network in networks
        ),
        tuple(
            sum(_attended(block.mixer, n_past, n_prompt) for block in network.blocks)
            for network in networks
        ),
    )


def _attended(mixer: Mixer, n_past: int, n_prompt: int) -> float:
    """Return the operations that a prompt takes because of the tokens before."""
    return mixer.flop(n_past, n_prompt) - mixer.flop(0, n_prompt)


def _mixer(mixer: Any) -> str:
    return (
        "latent"
        if isinstance(mixer, MLA)
        else "delta"
        if isinstance(mixer, (DeltaNet, *_AS_DELTA))
        else "none"
        if isinstance(mixer, AbsentMixer)
        else "attention"
    )


def _experts(layers: Sequence[Any]) -> tuple[int, int]:
    """Return how many experts a token uses in a block, and how many there are."""
    for layer in layers:
        if layer.expert_share < 1 or layer.experts_used > 1:
            return layer.experts_used, round(layer.experts_used / layer.expert_share)
    return 0, 0
