"""The device of every tensor: whole layers by -ngl, single tensors by -ot, experts by --n-cpu-moe,
or as many as fit the memory by --fit.

A layer has its norms and state on its device, and computes there. A matrix can be on another
device: then its product is computed there, and activations are copied there and back.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ...errors import UsageError, printable
from ...formats.tensor_names import TensorName
from .devices import present, usable_device

ALL = 10**6
CPU = torch.device("cpu")
_TARGET = re.compile(r"=\s*(?:(cpu)|(?:cuda|gpu):?(\d*))\s*(?:,|$)", re.IGNORECASE)
_MOST_DEVICES = 128  # torch has no larger numbers


@dataclass(frozen=True)
class Request:
    """A requested placement.

    gpu_layers: how many of the last layers are on the GPU; with more than all layers, the token
    embedding and the output are, too. overrides: (pattern, device) pairs; the first pattern that is
    found in a tensor's name decides. cpu_experts: the experts of so many first layers stay on the
    CPU. fit_margin: choose by memory and leave so many MiB free (None: do not choose).
    """

    gpu_layers: int = ALL
    overrides: tuple[tuple[str, torch.device], ...] = ()
    cpu_experts: int = 0
    fit_margin: int | None = None

    def __post_init__(self):
        if self.fit_margin is not None and replace(self, fit_margin=None) != Request():
            raise UsageError(
                "--fit chooses what is on the CPU: it does not go together with -ngl, -ot,"
                " --n-cpu-moe or --cpu-moe"
            )
        if self.fit_margin is not None and self.fit_margin < 0:
            raise UsageError(f"--fit is {self.fit_margin} MiB, expected 0 or more")

    def check(self, device: torch.device) -> None:
        """UsageError for overrides that are not possible for a model on `device`: to a device that
        does not exist, or to a GPU if `device` is the CPU.
        """
        for _, target in self.overrides:
            if target.type != "cpu" and device.type == "cpu":
                raise UsageError(f"-ot puts tensors on {target}, but --device is cpu")
            usable_device(target)


class Placement:
    """The device of every tensor of a model with `n_layers`, whose GPU is `device` (everything is
    on the CPU if that is the CPU).

    here: the layers that this process evaluates (None: all). Others have their vectors on the CPU,
    and their matrices stay in the file.
    """

    def __init__(
        self,
        device: torch.device,
        n_layers: int,
        request: Request = Request(),
        here: range | None = None,
    ):
        self.device, self.n_layers, self.request, self.here = device, n_layers, request, here
        self._patterns = [(re.compile(pattern), target) for pattern, target in request.overrides]
        self.first_gpu_layer = (
            max(0, n_layers - request.gpu_layers) if device.type != "cpu" else n_layers
        )

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that are found in none of these names."""
        names = list(names)
        return [
            pattern.pattern for pattern, _ in self._patterns if not any(map(pattern.search, names))
        ]

    def is_here(self, name: str) -> bool:
        """Return whether this process uses tensor `name`."""
        layer = TensorName.parse(name).layer
        return self.here is None or layer is None or layer in self.here

    def layer(self, index: int) -> torch.device:
        """The device of layer `index`."""
        if self.here is not None and index not in self.here:
            return CPU
        return self.device if index >= self.first_gpu_layer else CPU

    def home(self, name: str) -> torch.device:
        """The device on which the owner of tensor `name` computes: its layer, or embedding and
        output.
        """
        if (layer := TensorName.parse(name).layer) is not None:
            return self.layer(layer)
        return self.device if self.request.gpu_layers > self.n_layers else CPU

    def of(self, name: str) -> torch.device:
        """The device of the matrix `name`."""
        if not self.is_here(name):
            return CPU
        for pattern, target in self._patterns:
            if pattern.search(name):
                return target
        layer = TensorName.parse(name).expert_layer
        if layer is not None and layer < self.request.cpu_experts:
            return CPU
        return self.home(name)


def parse_overrides(text: str) -> tuple[tuple[str, torch.device], ...]:
    r"""`REGEX=CPU|CUDAn[,REGEX=...]` of -ot, as in `\.ffn_.*_exps=CPU`; a comma ends an override
    only after its device.

    UsageError for anything else, and for a device number that cannot exist.
    """
    found, start = [], 0
    for target in _TARGET.finditer(text):
        pattern, start = text[start : target.start()].strip(), target.end()
        # Names have no "=", so another device was meant.
        if not pattern or pattern[0] == "," or re.search(r"(?<!\?)(?<!\?<)=", pattern):
            raise UsageError(f"-ot '{printable(text, 80)}' is not REGEX=CPU or REGEX=CUDAn")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"-ot '{printable(pattern, 80)}' is not a valid regular expression: {error}"
            ) from None
        if len(number := target[2] or "0") > 4 or int(number) >= _MOST_DEVICES:
            raise UsageError(
                f"-ot puts tensors on cuda:{printable(number, 40)}, which is not there: {present()}"
            )
        found.append((pattern, CPU if target[1] else torch.device("cuda", int(number))))
    if start < len(text) or not found or text.rstrip().endswith(","):
        raise UsageError(
            f"-ot '{printable(text[start:] or text, 80)}' is not REGEX=CPU or REGEX=CUDAn"
        )
    return tuple(found)


def fit(
    device: torch.device,
    n_layers: int,
    margin: int,
    needed: Callable[[Placement], int],
    free: int,
    names: Iterable[str],
) -> Placement:
    """Return the placement that keeps most on the GPU: `needed(placement)` bytes there are at most
    `free` less `margin` MiB.

    Experts of as few first layers as possible go to the CPU; if all experts are not enough, whole
    layers follow, in the end all of them.
    """

    def fits(request: Request) -> bool:
        return needed(Placement(device, n_layers, request)) + (margin << 20) <= free

    if fits(whole := Request()):
        return Placement(device, n_layers, whole)
    layers = [TensorName.parse(name).expert_layer for name in names]
    with_experts = [layer + 1 for layer in layers if layer is not None]
    first, last = min(with_experts, default=1), max(with_experts, default=0)
    # The first layer whose experts are on the CPU may add more than it saves: places to which these
    # are copied. From then on every request needs at most what the one before needs, unless experts
    # of later layers are much larger: then the result may not be the first that fits.
    requests = [Request(cpu_experts=n) for n in range(first, last + 1)]
    requests += [Request(gpu_layers=n, cpu_experts=last) for n in range(n_layers, -1, -1)]
    chosen = bisect_left(requests, True, hi=len(requests) - 1, key=fits)
    return Placement(device, n_layers, requests[chosen])
