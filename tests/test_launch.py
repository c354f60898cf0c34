"""Launching kernels on torch's streams. A CUDA device is needed."""

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.compile import spec as spec_module
from iqforge.cuda_kernels.compile.launch import function, launch
from iqforge.cuda_kernels.compile.spec import KernelSpec
from iqforge.errors import DeviceError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SOURCE = """\
extern "C" __global__ void add(
    long long* out, const int* in, int n, long long far, double factor, const int* nothing) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && !nothing) out[i] = (long long)(in[i] * factor) + far;
}
extern "C" __global__ void reverse(int* out) {
  extern __shared__ int stage[];
  const int n = blockDim.x * 32;
  for (int i = threadIdx.x; i < n; i += blockDim.x) stage[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[blockIdx.x * n + i] = stage[n - 1 - i];
}
extern "C" __global__ void ranks(int* out) {
  unsigned rank = 0, count = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank; mov.u32 %1, %%cluster_nctarank;" : "=r"(rank), "=r"(count));
#endif
  out[blockIdx.x] = rank + 100 * count;
}
"""
SPEC = KernelSpec("launching", ("launching.cu",), (), ("add", "reverse", "ranks"))


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    (tmp_path / "launching.cu").write_text(SOURCE)
    monkeypatch.setattr(spec_module, "FOLDER", tmp_path)


def test_arguments_keep_their_widths():
    x = torch.arange(1000, dtype=torch.int32, device="cuda")
    out = torch.full((1000,), -1, device="cuda")
    kernel = function(SPEC, "add", "cuda")
    launch(kernel, 4, 256, out, x, np.int32(900), np.int64(1 << 40), np.float64(2.5), None)
    assert torch.equal(out.cpu()[:900], (torch.arange(900) * 2.5).long() + (1 << 40)) and bool(
        (out[900:] == -1).all()
    )
    for number in (5, 2.0, True):
        with pytest.raises(TypeError, match="numpy scalar"):
            launch(kernel, 1, 1, out, x, number, np.int64(0), np.float64(1), None)
    assert function(SPEC, "add", x.device) is kernel


def test_in_a_graph_one_after_the_other():
    """Each launch reads what the previous one wrote, although it may start early."""
    kernel, x = (
        function(SPEC, "add", "cuda"),
        torch.zeros(1 << 16, dtype=torch.int64, device="cuda"),
    )
    low = x.view(torch.int32)[: 1 << 16]

    def steps():
        for n in range(20):
            launch(
                kernel,
                256,
                256,
                x,
                x.view(torch.int32),
                np.int32(1),
                np.int64(1),
                np.float64(1),
                None,
                pdl=n > 0,
            )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steps()
    stream.synchronize()
    assert low[0].item() == 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert low[0].item() == 60


def test_large_shared_memory():
    kernel, out = (
        function(SPEC, "reverse", "cuda"),
        torch.zeros(2 * 512 * 32, dtype=torch.int32, device="cuda"),
    )
    launch(kernel, 2, 512, out, shared=4 * 512 * 32)  # 64 KB
    assert torch.equal(
        out.cpu().view(2, -1), torch.arange(512 * 32 - 1, -1, -1, dtype=torch.int32).expand(2, -1)
    )
    with pytest.raises(DeviceError, match="cuda:"):
        launch(kernel, 1, 32, out, shared=1 << 20)
    with pytest.raises(DeviceError, match="could not be launched"):
        launch(kernel, 1, 2048, out)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="no clusters before sm_90",
)
def test_clusters():
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    launch(function(SPEC, "ranks", "cuda"), 8, 32, out, cluster=2)
    assert out.tolist() == [200, 201] * 4
