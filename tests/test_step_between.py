"""Small kernels between the products of a decode step: compiled by g++ on the CPU, and on a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.step import between as step_between
from iqforge.runtime.layers.ffn import activate as activated
from iqforge.runtime.layers.specs import FFNSpec, Xielu
from torch.nn import functional as F

from .kernels_on_host import library, pointer

RUN = """
extern "C" void run_layer_norm(const float* h, const float* weight, const float* bias, float eps,
                               float* out, int width, int rows) {
    launch_on_host(rows, 1, THREADS, [&] { layer_norm(h, weight, bias, eps, out, width); });
}
extern "C" void run_center(const float* h, float* out, int width, int rows) {
    launch_on_host(rows, 1, THREADS, [&] { center(h, out, width); });
}
extern "C" void run_activate(const float* x, const float* bias, const float* up,
                             const float* up_bias, float* out, int kind, int cols, int n,
                             float alpha_p, float alpha_n, float beta, float eps) {
    launch_on_host((n + THREADS - 1) / THREADS, 1, THREADS,
                   [&] {
        activate(x, bias, up, up_bias, out, kind, cols, n, alpha_p, alpha_n, beta, eps);
    });
}
extern "C" void run_gate_heads(float* x, const float* gates, int length, int n) {
    launch_on_host((n + THREADS - 1) / THREADS, 1, THREADS,
                   [&] { gate_heads(x, gates, length, n); });
}
extern "C" void run_clear(float* x, int n) {
    launch_on_host((n + THREADS - 1) / THREADS, 1, THREADS, [&] { clear(x, n); });
}
"""
ON = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class OnHost:
    """The functions of `step_between`, of kernels that run on the CPU."""

    def __init__(self, folder):
        self.kernels = library(folder, step_between.BETWEEN, RUN)

    def layer_norm(self, h, weight, bias, eps, out):
        n, width = h.shape
        pointers, rest = map(pointer, (h, weight, bias)), (ctypes.c_float(eps), pointer(out))
        self.kernels.run_layer_norm(*pointers, *rest, width, n)

    def center(self, h, out):
        n, width = h.shape
        self.kernels.run_center(pointer(h), pointer(out), width, n)

    def activate(self, x, out, activation, *, bias=None, up=None, up_bias=None, xielu=(0,) * 4):
        kind = step_between.ACTIVATIONS.index(activation)
        pointers = map(pointer, (x, bias, up, up_bias, out))
        self.kernels.run_activate(
            *pointers, kind, x.shape[1], x.numel(), *map(ctypes.c_float, xielu)
        )

    def gate_heads(self, x, gates):
        length = x.shape[1] // gates.shape[1]
        self.kernels.run_gate_heads(pointer(x), pointer(gates), length, x.numel())

    def clear(self, x):
        self.kernels.run_clear(pointer(x), x.numel())


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    return OnHost(tmp_path_factory.mktemp("between"))


def draw(device, *shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("device", ON)
def test_clear(device, on_host):
    x = torch.full((3, 300), float("nan"), device=device)
    (on_host if device == "cpu" else step_between).clear(x[:2])
    assert not x[:2].any() and x[2].isnan().all()


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("width", [96, 6144])
def test_layer_norm(device, width, on_host):
    kernels = on_host if device == "cpu" else step_between
    h, weight, bias = (
        draw(device, *s, seed=i) for i, s in enumerate(((3, width), [width], [width]))
    )
    for offset, given in ((bias, h), (None, h + 30)):  # a mean that is large next to the spread
        out = torch.full_like(h, float("nan"))
        kernels.layer_norm(given, weight, offset, 1e-5, out)
        doubles = (None if x is None else x.double() for x in (weight, offset))
        expected = F.layer_norm(given.double(), (width,), *doubles, 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("width", [96, 6144])
def test_center(device, width, on_host):
    h, out = draw(device, 3, width, seed=1) + 30, torch.full((3, width), float("nan"))
    out = out.to(device)
    (on_host if device == "cpu" else step_between).center(h, out)
    expected = h.double() - h.double().mean(-1, keepdim=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("name", step_between.ACTIVATIONS)
def test_activate(device, name, on_host):
    kernels = on_host if device == "cpu" else step_between
    x, bias, up, up_bias = (
        3 * draw(device, *s, seed=i) for i, s in enumerate(((2, 300), [300], (2, 300), [300]))
    )

    spec, more = FFNSpec(name), {}
    if name == "xielu":
        spec, more = (
            FFNSpec(name, xielu=Xielu(0.75, 0.6, 0.5, -1e-6)),
            {"xielu": (0.75, 0.6, 0.5, -1e-6)},
        )

    def expected(x):
        return activated(spec, x.double())

    for options, wanted in (
        ({}, expected(x.clone())),
        ({"bias": bias}, expected(x + bias)),
        ({"bias": bias, "up": up, "up_bias": up_bias}, expected(x + bias) * (up + up_bias)),
        ({"up": up}, expected(x.clone()) * up),
    ):
        out = torch.full_like(x, float("nan"))
        kernels.activate(x, out, name, **options, **more)
        torch.testing.assert_close(out.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    kernels.activate(x, x, name, **more)  # in place
    torch.testing.assert_close(x.double(), wanted / up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ON)
def test_gate_heads(device, on_host):
    x, gates = draw(device, 3, 5 * 36, seed=1), 4 * draw(device, 3, 5, seed=2)
    expected = (x.double().view(3, 5, -1) * gates.double().sigmoid()[..., None]).flatten(1)
    (on_host if device == "cpu" else step_between).gate_heads(x, gates)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)
