"""Steps on a GPU whose experts are on the CPU, without a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass

import iqforge
import pytest
import torch
from iqforge.cuda_kernels.step_offload import OFFLOAD, Exchange
from iqforge.errors import DeviceError
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cpu.offloaded import OffloadedExperts
from iqforge.runtime.cpu.offloaded_steps import TURN, OffloadedSteps
from iqforge.runtime.cpu.plan import NotPlanned
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import STEP
from iqforge.runtime.cuda.step.layers import SlowBranch
from iqforge.runtime.cuda.step.offloaded import StepOffloadedMoE
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.layers.moe import MoE
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.sampling import GREEDY
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from . import step_on_cpu
from .kernels_on_host import library, pointer
from .step_on_cpu import CPU, Graph, in_pieces, kernel, normed
from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def moes_of(model: Model) -> list[MoE]:
    modules = [branch.module for block in model.network.blocks for branch in block.branches]
    return [module for module in modules if isinstance(module, MoE)]


def offloaded(model: Model, *, rounds: bool = False) -> list[OffloadedExperts]:
    weights = model.weights
    return [OffloadedExperts(x, weights.store, weights.taps, rounds=rounds) for x in moes_of(model)]


@pytest.fixture(scope="module")
def model():
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0")) as model:
        yield model


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def ask(exchange: Exchange, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor):
    """Do what the device does, and return the answer."""
    n = len(x)
    exchange.x[:n], exchange.chosen[:n], exchange.shares[:n] = x, chosen, shares
    exchange.request += 1
    until = time.monotonic() + 20
    while int(exchange.reply) != int(exchange.request):
        assert time.monotonic() < until
        time.sleep(0)
    return exchange.y[:n].clone()


@pytest.mark.parametrize("n", [1, 3])
def test_layers_are_answered_in_order(model, two_threads, n):
    modules, width = moes_of(model), model.network.width
    exchange = Exchange(4, width, modules[0].spec.n_used, CPU)
    steps = OffloadedSteps([(x, exchange) for x in offloaded(model)])
    for _ in range(2):
        inputs, answers = [torch.randn(n, width) for _ in modules], []
        expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
        # Before: the router's product is a program, too, and one program runs at a time.
        routed = [module.router(x) for module, x in zip(modules, inputs, strict=True)]

        def device(inputs=inputs, answers=answers, routed=routed):
            for x, (chosen, shares) in zip(inputs, routed, strict=True):
                answers.append(ask(exchange, x, chosen, shares))

        thread = threading.Thread(target=device)
        thread.start()
        steps.run(n, 2)
        thread.join()
        for found, y in zip(answers, expected, strict=True):
            torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-5)


def test_a_program_that_nobody_asks_can_be_released(model, two_threads, monkeypatch):
    exchange = Exchange(1, model.network.width, moes_of(model)[0].spec.n_used, CPU)
    steps = OffloadedSteps([(x, exchange) for x in offloaded(model)])
    waiting = threading.Thread(target=steps.run, args=(1, 2))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    steps.release()
    waiting.join(10)
    assert not waiting.is_alive()
    steps.begin()
    with pytest.raises(DeviceError, match="has not asked"):
        steps.run(1, 2, 1000)


@kernel
def _hand_over(exchange, h, norm, eps, ids, weights):
    n = len(h)
    exchange.x[:n] = normed(h, norm, eps)
    exchange.chosen[:n], exchange.shares[:n] = ids, weights
    exchange.number += 1
    exchange.request.copy_(exchange.number)


@kernel
def _take_back(exchange, to):
    until = time.monotonic() + 20
    while int(exchange.reply) != int(exchange.number):
        assert time.monotonic() < until
        time.sleep(0)
    to += exchange.y[: len(to)]


class Replays:
    """Graphs that run beside the host, as on a device."""

    def __init__(self, monkeypatch):
        self.n, real, answer = 0, Graph.replay, OffloadedSteps.run
        running: list[threading.Thread] = []

        def replay(graph):
            assert TURN.locked()  # no step of another thread comes between it and its answers
            self.n += 1
            running.append(threading.Thread(target=real, args=(graph,)))
            running[-1].start()

        def run(steps, *arguments):
            answer(steps, *arguments)
            for thread in running:
                thread.join()
            running.clear()

        monkeypatch.setattr(Graph, "replay", replay)
        monkeypatch.setattr(OffloadedSteps, "run", run)
        monkeypatch.setattr(Exchange, "hand_over", _hand_over)
        monkeypatch.setattr(Exchange, "take_back", _take_back)
        monkeypatch.setitem(STEP, MoE, StepOffloadedMoE)


@dataclass(frozen=True)
class Pair:
    """A model on the CPU, and one whose steps are those of a GPU with experts on the CPU."""

    host: Model
    model: Model
    experts: list[OffloadedExperts]
    replays: Replays


@pytest.fixture
def pair(monkeypatch, two_threads):
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0")) as host:
        experts = offloaded(host)
        step_on_cpu.install(monkeypatch)
        replays = Replays(monkeypatch)
        with Model(SyntheticSource("qwen3moe-tiny:Q8_0")) as model:
            for module, found in zip(moes_of(model), experts, strict=True):
                module.few_rows = found
            yield Pair(host, model, experts, replays)


def test_steps_are_the_reference_path(pair):
    steps = StepPath(pair.model.network, Context(CPU))
    assert steps.captures and sum(type(x) is StepOffloadedMoE for x in steps._branches) > 1
    state, rows = pair.model.new_state(64), []
    for token in TOKENS:
        rows.append(steps.extend(torch.tensor([token]), state))
    truth = pair.host.extend(TOKENS, pair.host.new_state(64), all_logits=True)
    torch.testing.assert_close(torch.stack(rows), truth, rtol=1e-3, atol=1e-4)
    assert pair.replays.n == len(TOKENS) - 1
    first = int(truth[-1].argmax())
    drawn = list(steps.follow(first, state, 6, GREEDY))
    expected, again = [], pair.host.new_state(64)
    pair.host.extend(TOKENS, again)
    for token in pair.host.follow(first, again, 6, GREEDY):
        expected.append(token)
    assert drawn == expected


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v2", "qwen3_5_moe"])
def test_other_architectures(monkeypatch, tmp_path, two_threads, name):
    """Shared experts, biases, other routers and activations, recurrent states, several rows."""
    tiny = make_tiny_model(CASES[name], WIDE, tmp_path / name)
    path = tmp_path / f"{name}.gguf"
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    iqforge.quantize_model(tmp_path / "f32.gguf", path, Recipe("Q8_0", pure=True))
    switches, settings = Switches(swa_full=True), CacheSettings("f32", "f32")
    with load_model(path, switches=switches) as host:
        experts = offloaded(host)
        step_on_cpu.install(monkeypatch)
        replays = Replays(monkeypatch)
        with load_model(path, switches=switches) as model:
            for module, found in zip(moes_of(model), experts, strict=True):
                module.few_rows = found
            told: list[str] = []
            steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
            context.report_all()
            assert not told and steps.captures
            tokens = torch.tensor(tiny.tokens)
            expected = host.extend(tokens, host.new_state(64, settings), all_logits=True)
            found = in_pieces(steps, tokens, state := model.new_state(64, settings))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            assert (replays.n > 10) == steps._sequence(state).captures


def test_a_launch_that_fails_leaves_nobody_waiting(monkeypatch, pair):
    steps = StepPath(pair.model.network, Context(CPU))
    last = steps._branches[-1]

    def interrupted(*arguments):
        raise KeyboardInterrupt

    state = pair.model.new_state(64)
    with monkeypatch.context() as patch:
        patch.setattr(type(last), "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.extend(torch.tensor(TOKENS[:1]), state)
    truth = pair.host.extend(TOKENS[:1], pair.host.new_state(64))
    found = steps.extend(torch.tensor(TOKENS[:1]), pair.model.new_state(64))
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)


def test_nothing_is_launched_if_the_host_cannot_plan(monkeypatch, pair):
    """The device would wait for an answer that never comes; the first time, and in a graph."""
    steps = StepPath(pair.model.network, Context(CPU))
    state, asked = pair.model.new_state(64), []

    def unplanned(*arguments):
        raise NotPlanned("no operation")

    monkeypatch.setattr(Exchange, "hand_over", lambda *a: asked.append(a))
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedSteps, "_program", unplanned)
        with pytest.raises(NotPlanned):
            steps.extend(torch.tensor(TOKENS[:1]), state)
    assert not asked
    monkeypatch.setattr(Exchange, "hand_over", _hand_over)
    for token in TOKENS[:3]:
        steps.extend(torch.tensor([token]), state)
    before = pair.replays.n
    assert before > 0
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedSteps, "_program", unplanned)
        with pytest.raises(NotPlanned):
            steps.extend(torch.tensor(TOKENS[:1]), state)
    assert pair.replays.n == before


def test_beside_a_slow_layer_the_host_evaluates_experts_in_turn(pair):
    moes_of(pair.model)[0].few_rows = None
    steps = StepPath(pair.model.network, Context(CPU))
    assert not steps.captures
    slow = [x for x in steps._branches if isinstance(x, SlowBranch)]
    assert len(slow) == len(pair.experts)


RUN = """
extern "C" void run_hand_over(const float* h, const float* norm, float eps, const int* ids,
                              const float* weights, int rows, int width, int used, float* x,
                              long long* chosen, float* shares, u64* request, u64* number) {
    launch_on_host(1, 1, THREADS, [&] {
        hand_over(h, norm, eps, ids, weights, rows, width, used, x, chosen, shares, request,
                  number);
    });
}
extern "C" void run_take_back(const float* y, float* to, int n, const u64* reply,
                              const u64* number, u32* failed, u64 most) {
    launch_on_host(1, 1, THREADS,
                   [&] { take_back(y, to, n, reply, number, failed, most); });
}
"""
BEFORE = """
static u64 clock_of_test = 0;
static bool stopped = false;
inline u64 load_of_host(const u64* from) { return stopped ? 1 : *from; }
inline void store_to_host(u64* to, u64 value) { *to = value; }
inline float4 written_by_host(const float* from) { return {from[0], from[1], from[2], from[3]}; }
inline u64 nanoseconds() { return clock_of_test += 1000; }
inline void stop_with_error() { stopped = true; }
inline void __threadfence_system() {}
"""


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 2052)])
def test_kernels(tmp_path, rows, width):
    used, eps = 4, 1e-5
    loaded = library(tmp_path, OFFLOAD, RUN, BEFORE.replace("u64", "unsigned long long"))
    h, norm = torch.randn(rows, width), torch.rand(width)
    ids = torch.randint(0, 9, (rows, used), dtype=torch.int32)
    weights = torch.rand(rows, used)
    ids[-1, 2] = -1
    exchange = Exchange(rows, width, used, CPU)
    exchange.number[0] = 6
    shared = exchange.x, exchange.chosen, exchange.shares, exchange.request, exchange.number
    loaded.run_hand_over(
        pointer(h),
        pointer(norm),
        ctypes.c_float(eps),
        pointer(ids),
        pointer(weights),
        *(rows, width, used),
        *map(pointer, shared),
    )
    torch.testing.assert_close(exchange.x, normed(h, norm, eps))
    assert torch.equal(exchange.chosen, ids.clamp(0).long())
    assert torch.equal(exchange.shares, weights * (ids >= 0))
    assert int(exchange.request) == int(exchange.number) == 7
    exchange.y.copy_(torch.randn(rows, width))
    exchange.reply[0] = 7
    expected = h + exchange.y
    most, failed = ctypes.c_ulonglong(10**6), exchange.failed
    back = exchange.y, h, rows * width, exchange.reply, exchange.number, failed
    arguments = [pointer(x) if isinstance(x, torch.Tensor) else x for x in back]
    loaded.run_take_back(*arguments, most)
    assert torch.equal(h, expected) and not int(failed)
    exchange.number[0] = 1  # never comes: the kernel stops
    loaded.run_take_back(*arguments, most)
    assert int(failed) == 1
