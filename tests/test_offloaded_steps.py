"""Steps on a GPU whose experts are on the CPU, without a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager
from functools import partial

import iqforge
import pytest
import torch
from iqforge.cuda_kernels.step.offload import OFFLOAD, Exchange
from iqforge.errors import DeviceError
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cpu.offloaded import OffloadedExperts
from iqforge.runtime.cpu.offloaded_steps import TURN, OffloadedSteps
from iqforge.runtime.cpu.plan import NotPlanned
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.step.layers import SlowBranch
from iqforge.runtime.cuda.step.offloaded import StepOffloadedMoE
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.layers.moe import MoE
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.experts import moe_layers
from iqforge.runtime.network.sampling import GREEDY
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.sequence import State
from iqforge.runtime.weights.switches import Switches

from . import step_on_cpu
from .kernels_on_host import library, pointer
from .offloaded_on_cpu import Device
from .step_graphs_on_cpu import CPU
from .step_on_cpu import in_pieces
from .step_rows_on_cpu import normed
from .tiny_cases import CASES, WIDE
from .tiny_model import one_tensor_per_expert
from .tiny_models import make_tiny_model
from .torch_threads import torch_threads

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def moes_of(model: Model) -> list[MoE]:
    return list(moe_layers(model.network))


def offloaded(model: Model, *, rounds: bool = False) -> list[OffloadedExperts]:
    weights = model.weights
    return [OffloadedExperts(x, weights.store, weights.taps, rounds=rounds) for x in moes_of(model)]


@pytest.fixture(scope="module")
def model():
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0")) as model:
        yield model


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


def check(found: torch.Tensor, truth: torch.Tensor) -> None:
    """Rows of logits are the same but for rounding: a cached value that is rounded the other way,
    as another processor may, shows in few logits.
    """
    assert found.shape == truth.shape
    errors = (found - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert errors.max() < 1e-4, errors


def ask(exchange: Exchange, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor):
    """Do what the device does, and return the answer."""
    n = len(x)
    exchange.x[:n], exchange.chosen[:n], exchange.shares[:n] = x, chosen, shares
    exchange.request += 1
    until = time.monotonic() + 240
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
    with pytest.raises(KeyboardInterrupt), steps.turn(lambda: None):
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        steps.release()
        waiting.join(240)
        assert not waiting.is_alive()
        raise KeyboardInterrupt
    with pytest.raises(DeviceError, match=r"has not asked .* in 0\.01 s"), steps.turn(lambda: None):
        steps.run(1, 2, 0.01)
    exchange.failed[0] = 1  # the device has waited for too long
    with pytest.raises(DeviceError, match="within 600 seconds"), steps.turn(lambda: None):
        steps.run(1, 2, 0.01)
    assert not int(exchange.failed)


@contextmanager
def beside(monkeypatch, opened):
    """Give a model on the CPU, and one whose experts alone are there, with its device."""
    with opened() as host:
        experts = offloaded(host)
        step_on_cpu.install(monkeypatch)
        device = Device(monkeypatch)
        with opened() as model:
            for module, found in zip(moes_of(model), experts, strict=True):
                module.few_rows = found
            yield host, model, device


@pytest.fixture
def three(monkeypatch, two_threads):
    with beside(monkeypatch, lambda: Model(SyntheticSource("qwen3moe-tiny:Q8_0"))) as found:
        yield found


def follow(path: StepPath, state: State, tokens: list[int]) -> torch.Tensor:
    return torch.stack([path.extend(torch.tensor([token]), state) for token in tokens])


def test_steps_are_the_reference_path(three):
    host, model, device = three
    steps = StepPath(model.network, Context(CPU))
    assert steps.captures and sum(type(x) is StepOffloadedMoE for x in steps._branches) > 1
    state = model.new_state(64)
    truth = host.extend(TOKENS, host.new_state(64), all_logits=True)
    check(follow(steps, state, TOKENS), truth)
    assert device.n_replays == len(TOKENS) - 1
    first, again = int(truth[-1].argmax()), host.new_state(64)
    host.extend(TOKENS, again)
    expected = list(host.follow(first, again, 6, GREEDY))
    assert list(steps.follow(first, state, 6, GREEDY)) == expected


@pytest.mark.parametrize(
    "name, merged",
    [
        *((x, False) for x in ("qwen2_moe", "gpt_oss", "deepseek_v2", "qwen3_5_moe", "gemma4_moe")),
        *((x, False) for x in ("cohere2_moe", "command_a_plus")),
        ("step35", False),
        ("gpt_oss", True),
    ],
)
def test_other_architectures(monkeypatch, tmp_path, two_threads, name, merged):
    """Shared experts, biases, other routers and activations, limits after these, recurrent states,
    several rows, and experts next to a dense layer. merged: gate and up, with `-muge`.
    """
    tiny = make_tiny_model(CASES[name], WIDE, tmp_path / name)
    path = tmp_path / f"{name}.gguf"
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    iqforge.quantize_model(tmp_path / "f32.gguf", path, Recipe("Q8_0", pure=True))
    settings = CacheSettings("f32", "f32")
    opened = partial(load_model, path, switches=Switches(swa_full=True, merge_gate_up=merged))
    with beside(monkeypatch, opened) as (host, model, device):
        assert not merged or len(moes_of(model)[0].experts.gate_up.tensors) == 2
        told: list[str] = []
        steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
        context.report_all()
        assert not told and steps.captures
        tokens = torch.tensor(tiny.tokens)
        expected = host.extend(tokens, host.new_state(64, settings), all_logits=True)
        found = in_pieces(steps, tokens, state := model.new_state(64, settings))
        check(found, expected)
        assert (device.n_replays > 10) == steps._sequence(state).captures


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError("a reason")])
def test_a_step_that_is_interrupted_leaves_nobody_waiting(three, monkeypatch, replayed, error):
    """While its kernels are launched for the first time, and before its graph is answered."""
    host, model, device = three
    steps = StepPath(model.network, Context(CPU))
    truth = host.extend(TOKENS, host.new_state(64), all_logits=True)
    state, n = model.new_state(64), 3 if replayed else 0
    if replayed:
        follow(steps, state, TOKENS[:n])

    def interrupted(*arguments):
        raise error

    where = (OffloadedSteps, "run") if replayed else (type(steps._branches[-1]), "__call__")
    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            follow(steps, state, TOKENS[n:])
    assert device.seconds < 120 and not TURN.locked()  # it would wait for 240
    found = follow(steps, state if replayed else model.new_state(64), TOKENS[n:])
    check(found, truth[n:])


def test_giving_up_can_be_interrupted(three, monkeypatch):
    host, model, _ = three
    steps, state = StepPath(model.network, Context(CPU)), model.new_state(64)
    follow(steps, state, TOKENS[:3])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("run", "_give_up"):
            patch.setattr(OffloadedSteps, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            follow(steps, state, TOKENS[3:])
    truth = host.extend(TOKENS, host.new_state(64), all_logits=True)[3:]
    check(follow(steps, state, TOKENS[3:]), truth)


def test_nothing_is_launched_if_the_host_cannot_plan(three, monkeypatch):
    """The device would wait for an answer that never comes; the first time, and in a graph."""
    _, model, device = three
    steps, state, asked = StepPath(model.network, Context(CPU)), model.new_state(64), []

    def unplanned(*arguments):
        raise NotPlanned("no operation")

    def refused():
        with monkeypatch.context() as patch:
            patch.setattr(OffloadedSteps, "_program", unplanned)
            patch.setattr(Exchange, "hand_over", lambda *a: asked.append(a))
            with pytest.raises(NotPlanned):
                follow(steps, state, TOKENS[:1])

    refused()
    follow(steps, state, TOKENS[:3])
    before = device.n_replays
    refused()
    assert not asked and device.n_replays == before > 0


def test_beside_a_slow_layer_the_host_evaluates_experts_in_turn(three):
    _, model, _ = three
    modules = moes_of(model)
    modules[0].few_rows = None
    told: list[str] = []
    steps = StepPath(model.network, Context(CPU, verbose=told.append))
    assert not steps.captures
    assert sum(isinstance(x, SlowBranch) for x in steps._branches) == len(modules)
    assert "experts on the CPU next to a layer on a slower path" in told[-1]


def test_experts_without_operations_on_the_cpu_are_named(monkeypatch, tmp_path, two_threads):
    """Experts of very old files, each a tensor of its own, are one such case."""
    path = tmp_path / "old.gguf"
    one_tensor_per_expert(path, SyntheticSource("qwen3moe-tiny:Q8_0"))
    with beside(monkeypatch, partial(load_model, path)) as found:
        told: list[str] = []
        steps = StepPath(found[1].network, Context(CPU, verbose=told.append))
        assert not steps.captures
        assert len(told) == 1 and told[0].startswith("slow path: MoE of ")
        assert "is in several tensors" in told[0]


RUN = """
extern "C" void run_hand_over(const float* h, const float* norm, float eps, const int* ids,
                              const float* weights, int rows, int width, int used, float* x,
                              long long* chosen, float* shares, u64* request, u64* number) {
    launch_on_host(1, 1, THREADS, [&] {
        hand_over(h, norm, eps, ids, weights, rows, width, used, x, chosen, shares, request,
                  number);
    });
}
extern "C" void run_take_back(const float* y, float* to, int n, u64* reply,
                              const u64* number, u32* failed, u64 most) {
    launch_on_host(1, 1, THREADS,
                   [&] { take_back(y, to, n, reply, number, failed, most); });
}
"""
BEFORE = """
static u64 clock_of_test = 0;
inline u64 load_of_host(const u64* from) { return *from; }
inline void store_to_host(u64* to, u64 value) { *to = value; }
inline float4 written_by_host(const float* from) { return {from[0], from[1], from[2], from[3]}; }
inline u64 nanoseconds() { return clock_of_test += 1000; }
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
    assert torch.equal(exchange.chosen, ids.long())
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
    exchange.abandon()  # nobody will answer
    exchange.number[0] = 8
    loaded.run_take_back(*arguments, most)
    assert not int(failed)
    exchange.settle()
    assert int(exchange.reply) == 7
    for _ in range(2):  # the answer never comes; later exchanges do not wait for it
        loaded.run_take_back(*arguments, most)
        assert int(failed) == 1 and int(exchange.reply) == -1
    exchange.settle()
    assert not int(failed)
