"""Samplers against their formulas, written plainly in float64, and against shares that were worked
out by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from iqforge.errors import EvaluationError, UsageError
from iqforge.runtime.network.sampling import Sampling, sample, uniform
from iqforge.runtime.sampling import filters
from iqforge.runtime.sampling.chain import SamplerChain, _second_uniform
from iqforge.runtime.sampling.dry import Dry
from iqforge.runtime.sampling.filters import Candidates
from iqforge.runtime.sampling.mirostat import Mirostat
from iqforge.runtime.sampling.options import SamplerOptions
from iqforge.runtime.sampling.settings import (
    DEFAULT_ORDER,
    SamplerSettings,
    read_biases,
    sampler_order,
    sampler_sequence,
)

NEUTRAL = SamplerSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def of(probabilities: list[float]) -> Candidates:
    return Candidates.of(np.log(np.array(probabilities)))


def kept(c: Candidates) -> dict[int, float]:
    return dict(zip(c.ids.tolist(), c.probabilities().round(6).tolist(), strict=True))


def chain_of(settings: SamplerSettings, texts: list[str] | None = None, **others) -> SamplerChain:
    texts = texts or [f"t{i}" for i in range(1000)]
    return SamplerChain(settings, lambda token: texts[token].encode(), 4096, **others)


def softmax(x: list[float]) -> list[float]:
    weights = [math.exp(v - max(x)) for v in x]
    return [w / sum(weights) for w in weights]


def random_logits(seed: int, n: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32).astype(np.float64)


# ---- filters, by hand


def test_top_k():
    c = of([0.1, 0.2, 0.3, 0.4])
    filters.top_k(c, 2)
    assert kept(c) == {3: pytest.approx(4 / 7, abs=1e-6), 2: pytest.approx(3 / 7, abs=1e-6)}
    c = Candidates.of(np.array([1.0, 2, 2, 2]))
    filters.top_k(c, 2)
    assert c.ids.tolist() == [1, 2]  # the lower id first among equals


def test_top_p():
    for p, ids in ((0.1, [3]), (0.4, [3]), (0.5, [3, 2]), (0.75, [3, 2, 1]), (1, [0, 1, 2, 3])):
        c = of([0.1, 0.2, 0.3, 0.4])
        filters.top_p(c, p)
        assert sorted(c.ids.tolist()) == sorted(ids), p


def test_min_p():
    for p, ids in ((0.1, 4), (0.26, 3), (0.49, 3), (0.51, 2), (0.76, 1), (1.0, 1)):
        c = of([0.1, 0.2, 0.3, 0.4])
        filters.min_p(c, p)
        assert len(c) == ids, p


def test_typical():
    # The entropy of 0.97, 0.01, 0.01, 0.01 is 0.168, the surprises are 0.030 and 4.6.
    c = of([0.97, 0.01, 0.01, 0.01])
    filters.typical(c, 0.5)
    assert c.ids.tolist() == [0]
    # 0.4, 0.2, 0.2, 0.2: entropy 1.332, surprises 0.916 and 1.609, so the less probable ones first.
    c = of([0.4, 0.2, 0.2, 0.2])
    filters.typical(c, 0.5)
    assert c.ids.tolist() == [1, 2, 3]


def test_top_n_sigma():
    logits = np.array([0.0, 1, 2, 3, 10])
    deviation = math.sqrt(sum((x - 3.2) ** 2 for x in logits) / 5)  # 3.54
    for n, ids in ((1.0, [4]), (2.0, [3, 4]), (7.01 / deviation, [3, 4]), (6.99 / deviation, [4])):
        c = Candidates.of(logits)
        filters.top_n_sigma(c, n)
        assert c.ids.tolist() == ids, n


def test_xtc():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    for threshold, ids in ((0.1, [3]), (0.15, [2, 3]), (0.25, [1, 2, 3]), (0.35, [0, 1, 2, 3])):
        c = of(probabilities)
        filters.xtc(c, 0.5, threshold, 0.4)
        assert c.ids.tolist() == ids, threshold
    for probability, threshold, chance in ((0.5, 0.1, 0.6), (0.0, 0.1, 0.0), (1.0, 0.51, 0.0)):
        c = of(probabilities)
        filters.xtc(c, probability, threshold, chance)
        assert len(c) == 4


def test_temperature():
    c = Candidates.of(np.array([1.0, 3.0, 2.0]))
    filters.temperature(c, 0.5)
    assert c.logits.tolist() == [2, 6, 4]
    c = Candidates.of(np.array([3.0, 1.0, 3.0]))
    filters.temperature(c, 0)
    assert c.ids.tolist() == [0]


def test_dynamic_temperature():
    c = of([0.25] * 4)  # the largest entropy: t + range
    filters.temperature(c, 1.0, 0.5)
    np.testing.assert_allclose(c.logits, np.log(0.25) / 1.5)
    c = of([0.7, 0.1, 0.1, 0.1])
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1)) / math.log(4)
    expected = 0.5 + 1.0 * entropy**2
    filters.temperature(c, 1.0, 0.5, 2.0)
    np.testing.assert_allclose(c.logits, np.log([0.7, 0.1, 0.1, 0.1]) / expected)


def test_penalties():
    logits = np.array([2.0, -2.0, 1.0, 0.5])
    c = Candidates.of(logits.copy())
    filters.penalize(c, [0, 0, 1, 99], 2.0, 0.25, 0.5)
    np.testing.assert_allclose(c.logits, [2 / 2 - 0.5 - 0.5, -2 * 2 - 0.25 - 0.5, 1.0, 0.5])
    c = Candidates.of(logits)  # after another sampler
    filters.top_k(c, 3)
    filters.penalize(c, [0, 0, 1, 99], 2.0, 0.25, 0.5)
    assert dict(zip(c.ids.tolist(), c.logits.tolist())) == {0: 0.0, 2: 1.0, 3: 0.5}


# ---- DRY


def dry(texts: list[str], breakers: tuple[str, ...] = ("\n", ":"), allowed: int = 2) -> Dry:
    return Dry(0.8, 1.75, allowed, breakers, lambda token: texts[token].encode())


def repetitions_plainly(history: list[int], limit: int) -> dict[int, int]:
    """The definition: of every earlier position, how many tokens up to it are the last ones."""
    found: dict[int, int] = {}
    for end in range(len(history) - 1):
        n = 0
        while n <= end and history[end - n] == history[-1 - n] and n < limit:
            n += 1
        if n:
            found[history[end + 1]] = max(found.get(history[end + 1], 0), n)
    return found


def test_dry_against_its_definition():
    rng = np.random.default_rng(3)
    for trial in range(60):
        history = rng.integers(0, 3 + trial % 4, 5 + trial).tolist()
        found = dry(["a"] * 10, (), allowed=1).repetitions(history)
        assert found == repetitions_plainly(history, len(history)), history


def test_dry_penalties():
    texts = ["a", "b", "c", "\n", "x:y"]
    one = dry(texts)
    # "a b c" came before "c", and the last two tokens are "a b".
    assert one.penalties([0, 1, 2, 2, 0, 1]) == {2: pytest.approx(0.8)}
    assert one.penalties([0, 0, 1, 2, 2, 0, 0, 1]) == {2: pytest.approx(0.8 * 1.75)}
    assert one.penalties([0, 1, 2, 2, 1]) == {}  # one token is not enough
    # Breakers: in the way, and as the token itself.
    assert one.penalties([0, 3, 1, 2, 2, 0, 3, 1]) == {}
    assert one.penalties([0, 1, 3, 2, 0, 1]) == {}
    assert one.penalties([0, 4, 1, 2, 2, 0, 4, 1]) == {}
    assert one.penalties([3, 0, 1, 2, 3, 0, 1]) == {2: pytest.approx(0.8)}
    c = Candidates.of(np.zeros(5))
    one(c, [0, 1, 2, 2, 0, 1])
    np.testing.assert_allclose(c.logits, [0, 0, -0.8, 0, 0])


def test_dry_breakers_of_several_tokens():
    texts = ["a", "b", "<en", "d>", "c"]
    one = dry(texts, ("<end>",))
    assert one.since_breaker([0, 2, 3, 1, 1]) == 2
    assert one.since_breaker([0, 2, 3] + [1] * 100) == 100  # longer than what is scanned at once
    assert one.since_breaker([0, 2, 1, 3]) == 4
    assert one.since_breaker([2, 3]) == 0


def test_dry_does_not_overflow():
    history = [0] * 4000
    assert dry(["a"] * 2, ()).penalties(history)[0] < 1e40


# ---- Mirostat


def test_mirostat_2():
    one = Mirostat(2, 3.0, 0.1)
    assert one.mu == 6
    one.mu = 2.0  # surprises of 1/2, 1/4, 1/8, 1/8: 1, 2, 3, 3 bits
    c = of([0.125, 0.5, 0.25, 0.125])
    one.truncate(c)
    assert c.ids.tolist() == [1, 2]
    one.update(2 / 3)
    assert one.mu == pytest.approx(2.0 - 0.1 * (-math.log2(2 / 3) - 3.0))
    one.mu = -5.0
    c = of([0.125, 0.5, 0.25, 0.125])
    one.truncate(c)
    assert c.ids.tolist() == [1]


def mirostat_1_plainly(probabilities: list[float], mu: float) -> float:
    p = sorted(probabilities, reverse=True)
    above = below = 0.0
    for i in range(min(100, len(p)) - 1):
        t = math.log((i + 2) / (i + 1))
        above += t * math.log(p[i] / p[i + 1])
        below += t * t
    s = above / below
    epsilon = s - 1
    return ((epsilon * 2**mu) / (1 - len(p) ** -epsilon)) ** (1 / s)


@pytest.mark.parametrize("mu", [1.0, 4.0, 6.0, 9.0])
def test_mirostat_1(mu):
    probabilities = softmax(random_logits(1).tolist())
    one = Mirostat(1, 5.0, 0.1)
    one.mu = mu
    c = of(probabilities)
    one.truncate(c)
    expected = max(1, min(300, int(mirostat_1_plainly(probabilities, mu))))
    assert len(c) == expected
    assert c.ids.tolist() == np.argsort(-np.array(probabilities), kind="stable")[:expected].tolist()


# ---- the chain


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_k": 0, "top_p": 0.6, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 7, "top_p": 1.0, "min_p": 0.2},
    ],
)
def test_the_chain_draws_as_kernels_do(values):
    settings = SamplerSettings(**values, seed=11)
    plain = settings.plain()
    assert plain is not None
    for position in range(200):
        logits = torch.from_numpy(random_logits(position).astype(np.float32))
        drawn = chain_of(settings).sample(logits, position)
        assert drawn == sample(logits, plain, position)


def test_what_a_kernel_can_draw():
    assert SamplerSettings().plain() == Sampling()
    assert SamplerSettings(order=("top_k", "temperature")).plain() == Sampling(0.8, 40, 1, 0)
    assert SamplerSettings(order=("top_p",), seed=3).plain() == Sampling(1, 0, 0.95, 0, 3)
    assert SamplerSettings(top_k=0, order=("top_p", "top_k", "temperature")).plain() is not None
    for other in (
        {"order": ("temperature", "top_k")},
        {"order": ("top_p", "top_k", "temperature")},
        {"order": ("top_k", "temperature", "top_k")},
        {"repeat_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"dry_multiplier": 0.8},
        {"typical_p": 0.9},
        {"xtc_probability": 0.5},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.5},
        {"mirostat": 2},
        {"logit_bias": ((1, 1.0),)},
    ):
        assert SamplerSettings(**other).plain() is None, other


def plainly(
    logits: np.ndarray, settings: SamplerSettings, history: list[int], position: int
) -> int:
    """The default order, all over again with lists."""
    s, tokens = settings, list(range(len(logits)))
    x = {t: float(logits[t]) for t in tokens}
    last = history[-s.repeat_last_n :]
    for t in set(last):
        x[t] = x[t] / s.repeat_penalty if x[t] > 0 else x[t] * s.repeat_penalty
        x[t] -= last.count(t) * s.frequency_penalty + s.presence_penalty
    for t, n in repetitions_plainly(history, len(history)).items():
        if n >= s.dry_allowed_length:
            x[t] -= s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length)
    values = [x[t] for t in tokens]
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    tokens = [t for t in tokens if x[t] >= max(values) - s.top_n_sigma * sigma]
    tokens = sorted(tokens, key=lambda t: (-x[t], t))[: s.top_k]
    p = softmax([x[t] for t in tokens])
    entropy = -sum(q * math.log(q) for q in p)
    order = sorted(range(len(p)), key=lambda i: (abs(-math.log(p[i]) - entropy), i))
    total, chosen = 0.0, []
    for i in order:
        chosen.append(i)
        total += p[i]
        if total > s.typical_p:
            break
    tokens = [tokens[i] for i in sorted(chosen)]
    p = softmax([x[t] for t in tokens])
    total = 0.0
    for i, q in enumerate(p):
        total += q
        if total >= s.top_p:
            tokens = tokens[: i + 1]
            break
    tokens = [t for t in tokens if math.exp(x[t] - x[tokens[0]]) >= s.min_p]
    p = softmax([x[t] for t in tokens])
    large = [i for i, q in enumerate(p) if q >= s.xtc_threshold]
    if len(large) > 1 and _second_uniform(s.seed, position) <= s.xtc_probability:
        tokens = tokens[large[-1] :]
    p = softmax([x[t] for t in tokens])
    t = s.temperature
    if len(tokens) > 1:
        share = -sum(q * math.log(q) for q in p) / math.log(len(p))
        low, high = max(0.0, t - s.dynatemp_range), t + s.dynatemp_range
        t = low + (high - low) * share**s.dynatemp_exponent
    p = softmax([x[one] / t for one in tokens])
    u, total = uniform(s.seed, position), 0.0
    for one, q in zip(tokens, p):
        total += q
        if u < total:
            return one
    return tokens[-1]


def test_all_samplers_together():
    settings = SamplerSettings(
        temperature=0.9,
        top_k=30,
        top_p=0.97,
        min_p=0.01,
        seed=5,
        typical_p=0.98,
        top_n_sigma=2.5,
        xtc_probability=0.5,
        xtc_threshold=0.1,
        dynatemp_range=0.4,
        dynatemp_exponent=1.3,
        repeat_last_n=20,
        repeat_penalty=1.3,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        dry_multiplier=0.8,
        dry_breakers=(),
    )
    chain = chain_of(settings)
    history = np.random.default_rng(0).integers(0, 8, 40).tolist()
    chain.accept(history)
    changed = 0
    for position in range(150):
        logits = random_logits(position, 60)
        expected = plainly(logits, settings, history, position)
        assert chain.sample(torch.from_numpy(logits.astype(np.float32)), position) == expected
        changed += expected != plainly(
            logits, replace(settings, xtc_probability=0.0), history, position
        )
        history.append(expected)
    assert chain.history == history
    assert 10 < changed < 140


def test_order_matters():
    """After a high temperature top-p keeps more tokens."""
    logits = torch.log(torch.tensor([0.6, 0.25, 0.1, 0.05]))
    hot = replace(NEUTRAL, temperature=5.0, top_p=0.5)
    first = replace(hot, order=("top_p", "temperature"))
    last = replace(hot, order=("temperature", "top_p"))
    assert {chain_of(first).sample(logits, p) for p in range(200)} == {0}
    assert {chain_of(last).sample(logits, p) for p in range(200)} == {0, 1}


def test_logit_bias():
    logits = torch.zeros(4)
    settings = replace(NEUTRAL, logit_bias=((0, -math.inf), (1, -math.inf), (2, 1.0)))
    drawn = [chain_of(replace(settings, seed=s)).sample(logits, 0) for s in range(2000)]
    share = drawn.count(2) / 2000
    assert set(drawn) == {2, 3} and abs(share - math.e / (1 + math.e)) < 0.03
    with pytest.raises(UsageError, match="the vocabulary has 4 tokens"):
        chain_of(replace(NEUTRAL, logit_bias=((9, 1.0),))).sample(logits, 0)
    every = tuple((token, -math.inf) for token in range(4))
    with pytest.raises(EvaluationError, match="no token is possible"):
        chain_of(replace(NEUTRAL, logit_bias=every)).sample(logits, 0)


def test_mirostat_has_a_fixed_temperature():
    """As in llama-cli, which does without the range of --dynatemp-range."""
    chosen = replace(NEUTRAL, mirostat=2, temperature=0.7, seed=3)
    texts = []
    for settings in (chosen, replace(chosen, dynatemp_range=0.6)):
        chain = chain_of(settings)
        logits = [torch.from_numpy(random_logits(i, 50).astype(np.float32)) for i in range(60)]
        texts.append([chain.sample(one, i) for i, one in enumerate(logits)])
    assert texts[0] == texts[1]


def test_mirostat_keeps_the_surprise_near_its_target():
    for version in (1, 2):
        settings = replace(NEUTRAL, mirostat=version, mirostat_ent=3.0, seed=1)
        chain, surprises = chain_of(settings), []
        for position in range(800):
            logits = torch.from_numpy(random_logits(position, 500).astype(np.float32))
            token = chain.sample(logits, position)
            surprises.append(-math.log2(float(logits.double().softmax(0)[token])))
        assert abs(np.mean(surprises[100:]) - 3.0) < 0.8, version


def test_logits_that_are_not_finite():
    with pytest.raises(EvaluationError, match="position 7 are not finite"):
        chain_of(NEUTRAL).sample(torch.tensor([1.0, float("nan")]), 7)


# ---- names and values


def test_orders():
    assert sampler_order("top_k;temp; Typical-P;min-p") == (
        "top_k",
        "temperature",
        "typ_p",
        "min_p",
    )
    assert sampler_sequence("edskypmxt") == DEFAULT_ORDER
    assert SamplerOptions(samplers="top_k").settings().order == ("top_k",)
    assert SamplerOptions(sampling_seq="tk").settings().order == ("temperature", "top_k")
    assert SamplerOptions().settings() == SamplerSettings()
    with pytest.raises(UsageError, match="did you mean 'top_k'"):
        sampler_order("topk")
    with pytest.raises(UsageError, match="letters are e penalties"):
        sampler_sequence("q")
    with pytest.raises(UsageError, match="both say"):
        SamplerOptions(samplers="top_k", sampling_seq="k").settings()


def test_biases():
    assert read_biases(["5+1", "7-inf", "5-0.25"]) == ((5, 0.75), (7, -math.inf))
    for bad in ("5", "5+", "x+1", "5+nan", "5+inf", "-5+1"):
        with pytest.raises(UsageError, match="expected"):
            read_biases([bad])


def test_breakers():
    assert SamplerOptions(dry_sequence_breaker=("\\n", "x")).settings().dry_breakers == ("\n", "x")
    assert SamplerOptions(dry_sequence_breaker=("none",)).settings().dry_breakers == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"typical_p": 1.5},
        {"xtc_probability": -0.1},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -2},
        {"mirostat": 3},
        {"dry_base": math.nan},
        {"dynatemp_range": -1.0},
        {"seed": -1},
    ],
)
def test_values_out_of_range(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplerSettings(**bad)
