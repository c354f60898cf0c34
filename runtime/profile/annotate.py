"""Names for what runs: while a model is profiled, its modules and the operations of the fast path
run within named ranges.

A range is a torch.profiler record_function whose name is `iqforge|layer|kind|bytes`: the layer as
in tensor names (`blk.3`), what it is, and the bytes of weights that it reads, 0 where that is not
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ...formats.tensor_names import TensorName
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import Rope
from ..linear import Embedding, ExpertLinear, Linear

PREFIX = "iqforge|"


def range_name(layer: str, kind: str, n_bytes: float = 0) -> str:
    return f"{PREFIX}{layer}|{kind}|{n_bytes:.0f}"


class Named:
    """A callable that runs within a range. All else is as before."""

    def __init__(self, inner, layer: str, kind: str, n_bytes: float = 0):
        self._inner, self._name = inner, range_name(layer, kind, n_bytes)

    def __call__(self, *args, **options):
        with torch.profiler.record_function(self._name):
            return self._inner(*args, **options)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


@contextmanager
def annotated(model) -> Iterator[None]:
    """While the context is open, everything that `model` runs has a name.

    Prompts are neither captured nor replayed: a graph would run its kernels without names.
    """
    engine = model.engine  # made before, as it looks at the classes of modules
    with ExitStack() as undo:
        sizes = {tensor.name: tensor for tensor in model.source.tensors}
        for layer, block in enumerate(model.network.blocks):
            for branch in block.branches:
                _name_parts(branch, f"blk.{layer}", sizes, undo)
        _name_parts(model.network, "", sizes, undo)
        if engine is not None:
            _name_engine(engine, undo)
        yield


def _name_parts(owner, layer: str, sizes: dict, undo: ExitStack) -> None:
    """Name the modules that are attributes of `owner`, and their modules."""
    for attribute, part in list(vars(owner).items()):
        if isinstance(part, (Linear, ExpertLinear, Embedding)):
            name = TensorName.parse(part.name)
            where, kind = (part.role, part.role) if name.layer is None else (name.prefix, name.stem)
            # What an embedding or experts read depends on the tokens.
            n_bytes = (
                sizes[part.name].n_bytes if isinstance(part, Linear) and part.name in sizes else 0
            )
            _replace(owner, attribute, Named(part, where, kind, n_bytes), undo)
        elif isinstance(part, (RMSNorm, LayerNorm)):
            kind = TensorName.parse(part.name).stem
            _replace(owner, attribute, Named(part, layer or "output", kind), undo)
        elif (
            callable(part)
            and type(part).__module__.startswith(_PACKAGE)
            and not isinstance(part, Rope)
        ):
            _name_parts(part, layer, sizes, undo)
            _replace(owner, attribute, Named(part, layer, type(part).__name__), undo)


_PACKAGE = Linear.__module__.rpartition(".")[0]  # of everything that runs a model


def _name_engine(engine, undo: ExitStack) -> None:
    """Executors of the fast path, which hold their modules' weights themselves, and the operations
    that they are made of.
    """
    prompt, steps = engine.prompt, engine.steps
    _replace(
        prompt,
        "_steps",
        [(layer, Named(step, f"blk.{layer}", _kind(step))) for layer, step in prompt._steps],
        undo,
    )
    _replace(prompt, "_embedded", Named(prompt._embedded, "token_embd", "token_embd"), undo)
    if prompt._output is not None:
        _replace(prompt, "_output", Named(prompt._output, "output", "output"), undo)
    if steps is not None:
        from ...cuda_kernels import matvec

        _replace(
            steps,
            "_branches",
            [Named(step, f"blk.{step.branch.layer}", _kind(step)) for step in steps._branches],
            undo,
        )
        _replace(steps, "_embedding", Named(steps._embedding, "token_embd", "token_embd"), undo)
        _replace(steps, "_output", Named(steps._output, "output", "output"), undo)
        for name in ("norm_matvec", "gate_up", "matvec_add", "expert_gate_up", "expert_down_add"):
            _replace(matvec, name, _named_operation(getattr(matvec, name), name), undo)


def _named_operation(function, name: str):
    def named(*args, **options):
        with torch.profiler.record_function(
            range_name("", name, _bytes_read([*args, *options.values()]))
        ):
            return function(*args, **options)

    return named


def _bytes_read(args: list) -> float:
    """Bytes of the packed matrices among the arguments; of experts, as many as there are ids, if
    these all differ.
    """
    matrices = []
    for arg in args:
        matrices += [
            m
            for m in (arg if isinstance(arg, (list, tuple)) else [arg])
            if hasattr(m, "n_matrices")
        ]
    ids = next((x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.int32), None)
    return sum(
        m.nbytes
        * (min(1.0, ids.numel() / m.n_matrices) if ids is not None and m.n_matrices > 1 else 1.0)
        for m in matrices
    )


def _kind(step) -> str:
    branch = getattr(step, "branch", None)
    return type(step if branch is None else branch.module).__name__


def _replace(owner, attribute: str, value, undo: ExitStack) -> None:
    before = getattr(owner, attribute)
    object.__setattr__(owner, attribute, value)  # a frozen dataclass is one of the owners
    undo.callback(object.__setattr__, owner, attribute, before)
