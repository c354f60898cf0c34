"""Routed experts: one tensor per expert, or stacked ones, become `ffn_{gate,up,down}_exps` or,
merged, `ffn_gate_up_exps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import ConcatenatedRows, RowRange, StoredRows
from ..tensors.stored import StoredTensor, TensorRows
from .base import Architecture
from .implied import check_flag
from .layout_options import LayoutOptions
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

GATE, UP, DOWN = "gate", "up", "down"


class ExpertStack:
    """Collect the experts of one layer. Shapes: gate (if `has_gates`) and up [n_ff, n_embd] per
    expert, down [n_embd, n_ff].

    Merged, the rows of each expert are its gate rows followed by its up rows: [n_experts, 2 n_ff,
    n_embd].
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        n_experts: int,
        n_ff: int,
        n_embd: int,
        merge_gate_up: bool,
        has_gates: bool = True,
    ):
        self._checkpoint, self._layer, self._merge = checkpoint, layer, merge_gate_up
        self.n_experts, self.n_ff, self.n_embd = n_experts, n_ff, n_embd
        self._parts: dict[str, dict[int, StoredTensor]] = {UP: {}, DOWN: {}}
        self._whole: dict[str, StoredTensor] = {}  # those of all experts in one
        if has_gates:
            self._parts = {GATE: {}, **self._parts}

    def shape(self, part: str) -> tuple[int, int]:
        """Return the shape of one expert's matrix `part`."""
        return (self.n_embd, self.n_ff) if part == DOWN else (self.n_ff, self.n_embd)

    def add(self, part: str, expert: int, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        """Add one expert's tensor; yield the stacked tensors after the last one. Raise
        CheckpointError for an expert that config.json does not count, or a wrong shape.
        """
        if expert >= self.n_experts:
            raise CheckpointError(
                f"belongs to expert {expert}, but config.json has {self.n_experts} experts",
                file=tensor.file,
                tensor=tensor.name,
            )
        check_shape(tensor, self.shape(part))
        self._parts[part][expert] = tensor
        if self.missing() is None:
            yield from self._stacked()

    def missing(self) -> str | None:
        """Describe a projection that has not been added; None if all have."""
        for part, seen in self._parts.items():
            if self._whole:
                if part not in self._whole:
                    return f"no {part} projection"
            elif len(seen) < self.n_experts:
                expert = next(number for number in range(self.n_experts) if number not in seen)
                return (
                    f"expert {expert} has no {part} projection ({len(seen)} of {self.n_experts} do)"
                )
        return None

    def _stacked(self) -> Iterator[ConvertedTensor]:
        rows = {
            part: [StoredRows(self._checkpoint, seen[number]) for number in range(self.n_experts)]
            for part, seen in self._parts.items()
        }
        yield self._mapped("down", DOWN, ConcatenatedRows(rows[DOWN]), self._parts[DOWN].values())
        if self._merge:
            pairs = [half for pair in zip(rows[GATE], rows[UP]) for half in pair]
            yield self._mapped(
                "gate_up",
                GATE,
                ConcatenatedRows(pairs),
                [*self._parts[GATE].values(), *self._parts[UP].values()],
            )
            return
        for part in (part for part in (GATE, UP) if part in rows):
            yield self._mapped(part, part, ConcatenatedRows(rows[part]), self._parts[part].values())

    def stacked_gate_up(self, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        """Convert one stored tensor [n_experts, 2 n_ff, n_embd], gate rows first."""
        check_shape(tensor, (self.n_experts, 2 * self.n_ff, self.n_embd))
        whole = StoredRows(self._checkpoint, tensor)
        if self._merge:
            yield self._mapped("gate_up", GATE, whole, [tensor])
            return
        for half, part in enumerate((GATE, UP)):
            ranges = [
                RowRange(whole, (2 * expert + half) * self.n_ff, self.n_ff)
                for expert in range(self.n_experts)
            ]
            yield self._mapped(part, part, ConcatenatedRows(ranges), [tensor])

    def stacked(self, part: str, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        """Convert one stored tensor [n_experts, *shape(part)]; with `merge`, gate and up once both
        are there.
        """
        check_shape(tensor, (self.n_experts, *self.shape(part)))
        self._whole[part] = tensor
        if part == DOWN or not self._merge:
            yield self._mapped(part, part, StoredRows(self._checkpoint, tensor), [tensor])
        elif GATE in self._whole and UP in self._whole:
            stored = [self._whole[half] for half in (GATE, UP)]
            ranges = [
                RowRange(StoredRows(self._checkpoint, one), expert * self.n_ff, self.n_ff)
                for expert in range(self.n_experts)
                for one in stored
            ]
            yield self._mapped("gate_up", GATE, ConcatenatedRows(ranges), stored)

    def stacked_down(self, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        """Convert one stored tensor [n_experts, n_embd, n_ff]."""
        check_shape(tensor, (self.n_experts, self.n_embd, self.n_ff))
        yield self._mapped("down", DOWN, StoredRows(self._checkpoint, tensor), [tensor])

    def _mapped(self, name: str, part: str, rows: TensorRows, stored) -> ConvertedTensor:
        first, *others = stored
        type = self._checkpoint.type_of(first)
        for other in others:
            if other.dtype != first.dtype:
                raise CheckpointError(
                    f"has dtype {other.dtype}, but {first.name}, with which it is stacked, has"
                    f" {first.dtype}",
                    file=other.file,
                    tensor=other.name,
                )
        n_rows, n_cols = self.shape(part)
        shape = (self.n_experts, 2 * n_rows if name == "gate_up" else n_rows, n_cols)
        return ConvertedTensor(
            TensorInfo(f"blk.{self._layer}.ffn_{name}_exps.weight", shape, type),
            rows,
            (first, *others),
        )


class RoutedExperts(Architecture):
    """An architecture with routed experts in the layers of `expert_layers()`, stored one by one or
    as `gate_up_proj` and `down_proj`.

    Subclasses may change where experts are stored and how their number is read.
    """

    has_experts = True
    expert_stem = "model.layers.{}.mlp.experts"
    # name of a projection inside an expert -> part
    expert_parts: ClassVar[dict[str, str]] = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
    renormalizes: bool | None = (
        None  # what GGUF's form implies for norm_topk_prob; None: a key says
    )
    always_merged = False  # GGUF has gate and up of this architecture in one tensor only

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.merge_gate_up = options.merge_gate_up or self.always_merged
        self._stacks: dict[int, ExpertStack] = {}
        if self.renormalizes is not None:
            check_flag(self.config, self.gguf_name, "norm_topk_prob", self.renormalizes)
        self.read_expert_sizes()

    def read_expert_sizes(self) -> None:
        """Read how many experts there are, how many a token uses, and their width. Raise
        ConfigError if a key is missing.
        """
        self.n_experts = self.config.integer("num_experts", "num_local_experts", "n_routed_experts")
        self.n_experts_used = self.config.integer("num_experts_per_tok", maximum=self.n_experts)
        self.n_ff_expert = self.expert_width()

    def expert_width(self) -> int:
        """Return the hidden width of one expert, n_ff."""
        return self.config.integer("moe_intermediate_size")

    @property
    def expert_io(self) -> int:
        """Return the length of what an expert reads and writes: n_embd."""
        return self.n_embd

    def expert_layers(self) -> Sequence[int]:
        """Return the layers that have experts."""
        return range(self.first_layer, self.n_layers)

    def expert_keys(self) -> dict[str, Value]:
        return {"expert_count": u32(self.n_experts), "expert_used_count": u32(self.n_experts_used)}

    def tensors(self) -> list[ConvertedTensor]:
        self._stacks = {}
        mapped = super().tensors()
        names = {tensor.info.name for tensor in mapped}
        inputs = ("gate", "up") if self.has_gates else ("up",)
        parts = ("gate_up", "down") if self.merge_gate_up else (*inputs, "down")
        for layer in self.expert_layers():
            for part in parts:
                if f"blk.{layer}.ffn_{part}_exps.weight" not in names:
                    problem = self.stack(layer).missing() or f"no {part} projection"
                    raise CheckpointError(
                        f"layer {layer} lacks experts: {problem}", file=self.checkpoint.path
                    )
        return mapped

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        head, _, tail = pattern.partition(f"{self.expert_stem}.")
        if head or not tail:
            yield from super().convert(name, tensor, table)
            return
        stack = self.stack(self.layer_of(tensor, numbers))
        single = tail.removeprefix("{}.").removesuffix(".weight")
        if tail.removesuffix(".weight") == "gate_up_proj":
            yield from stack.stacked_gate_up(tensor)
        elif tail.removesuffix(".weight") == "down_proj":
            yield from stack.stacked_down(tensor)
        elif tail == f"{{}}.{single}.weight" and single in self.expert_parts:
            yield from stack.add(self.expert_parts[single], numbers[1], tensor)
        else:
            raise self.unknown(pattern, tensor, table)

    def stack(self, layer: int) -> ExpertStack:
        """Return the stack that collects the experts of a layer."""
        if layer not in self._stacks:
            self._stacks[layer] = ExpertStack(
                self.checkpoint,
                layer,
                self.n_experts,
                self.n_ff_expert,
                self.expert_io,
                self.merge_gate_up,
                self.has_gates,
            )
        return self._stacks[layer]
