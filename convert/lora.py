"""Read LoRA adapters as a `Source`: each pair becomes `<tensor>.lora_a` and `<tensor>.lora_b` of
the base model's GGUF tensor.

A runtime adds alpha / r * lora_b lora_a, with lora_a [r, n_in] and lora_b [n_out, r]. The rows of B
are moved as the base model's conversion moves the rows of the weight, and the columns of A as it
moves the columns. Stacked experts get stacked pairs. The runtime looks up rows of an embedding in
lora_a, so that is stored transposed: [n_vocab, r].
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import CheckpointError, UnsupportedTypeError, UsageError, printable
from ..formats.source import TensorInfo
from ..formats.tensor_names import TOKEN_EMBEDDING, TensorName
from ..formats.types import TYPES
from ..formats.values import Value, f32, string, u32
from .architectures.layout_options import LayoutOptions
from .architectures.registry import architecture_class
from .architectures.weight import ConvertedTensor
from .checkpoint.adapter import AdapterCheckpoint, Pair
from .metadata.general import title
from .metadata.model_card import model_card_metadata, read_model_card
from .naming import default_file_name
from .rows_source import RowsSource
from .source import QUANTIZATION_VERSION
from .tensors.outtype import OUTTYPES, resolve_outtype
from .tensors.reorder import SelectedColumns, TransposedMatrices
from .tensors.rows import ConcatenatedRows, StoredRows, rebased
from .tensors.scaled import ScaledRows
from .tensors.stored import StoredTensor, TensorRows


class AdapterSource(RowsSource):
    """Read the adapter in folder `path` as a GGUF file, in the types in which it is stored.

    `base`: the folder with the base model's config.json (default: the one that the adapter names,
    if it is a folder); its weights are not needed. `name`: `general.name`.

    Raise CheckpointError for tensors that the base model does not have or has in another shape, and
    for tensors that are neither pairs nor norms; UnsupportedTypeError for weights whose conversion
    does more than reorder rows or columns.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        base: str | os.PathLike | None = None,
        name: str | None = None,
    ):
        self.checkpoint = checkpoint = AdapterCheckpoint(path, base)
        model_type = checkpoint.config.of_text().values.get("model_type")
        architecture = architecture_class(checkpoint.architecture, model_type)(
            checkpoint, LayoutOptions()
        )
        self._used: set[str] = set()
        mapped = [made for tensor in architecture.stored() for made in self._converted(tensor)]
        self._check_all_used(architecture.gguf_name, [tensor.info.name for tensor in mapped])
        super().__init__(checkpoint, mapped)
        self.metadata: dict[str, Value] = {
            "general.architecture": string(architecture.gguf_name),
            "general.type": string("adapter"),
            "adapter.type": string("lora"),
            "general.name": string(name or title(checkpoint.path.resolve().name)),
            **model_card_metadata(read_model_card(checkpoint)),
            "adapter.lora.alpha": f32(checkpoint.alpha()),
            "general.quantization_version": u32(QUANTIZATION_VERSION),
        }

    def _converted(self, mapped: ConvertedTensor) -> list[ConvertedTensor]:
        """Return the pair for an output tensor of the base model, or the tensor itself if it is a
        norm that was trained too.
        """
        leaves: list[StoredTensor] = []
        rows, columns = mapped.rows, None
        if isinstance(rows, SelectedColumns):  # the columns of B A are those of A
            rows, columns = rows.base, rows.order
        try:
            rebased(
                rows, lambda tensor: leaves.append(tensor) or StoredRows(self.checkpoint, tensor)
            )
        except UnsupportedTypeError as error:
            # Conversions may change the values of norms.
            if not TensorName.parse(mapped.info.name).is_norm:
                raise UnsupportedTypeError(
                    f"cannot have an adapter: {error.message}",
                    file=self.checkpoint.path,
                    tensor=mapped.info.name,
                ) from None
        pairs = [
            self.checkpoint.pairs[leaf.name]
            for leaf in leaves
            if leaf.name in self.checkpoint.pairs
        ]
        if not pairs:
            return [self._whole(mapped)]
        self._used |= {leaf.name for leaf in leaves}
        if mapped.info.name == TOKEN_EMBEDDING or pairs[0].embedding:
            return self._embedding(mapped, pairs)
        if len(pairs) != len(leaves) or len({pair.rank for pair in pairs}) > 1:
            raise CheckpointError(
                "stacks weights whose adapters differ in rank or are missing",
                file=self.checkpoint.path,
                tensor=mapped.info.name,
            )
        *stack, n_rows, n_cols = mapped.info.shape
        if stack != ([len(pairs)] if len(stack) == 1 else []) or (not stack and len(pairs) > 1):
            raise UnsupportedTypeError(
                "joins the rows of several weights, whose adapters have no common lora_a",
                file=self.checkpoint.path,
                tensor=mapped.info.name,
            )
        rank, low = pairs[0].rank, [self._columns(pair.a, columns) for pair in pairs]
        high = rebased(rows, lambda tensor: self._stored(self.checkpoint.pairs[tensor.name].b))
        return [
            self._half(
                mapped,
                "a",
                (*stack, rank, n_cols),
                pairs[0].a,
                ConcatenatedRows(low) if stack else low[0],
            ),
            self._half(mapped, "b", (*stack, n_rows, rank), pairs[0].b, high),
        ]

    def _embedding(self, mapped: ConvertedTensor, pairs: list[Pair]) -> list[ConvertedTensor]:
        if not pairs[0].embedding or mapped.info.name != TOKEN_EMBEDDING:
            raise CheckpointError(
                "an adapter with lora_embedding_A and _B belongs to the embedding, and only to it",
                file=self.checkpoint.path,
                tensor=mapped.info.name,
            )
        pair, (n_vocab, n_embd) = pairs[0], mapped.info.shape
        turned = rebased(
            mapped.rows,
            lambda tensor: TransposedMatrices(
                self._stored(pair.a), 1, self.checkpoint.type_of(pair.a)
            ),
        )
        return [
            self._half(mapped, "a", (n_vocab, pair.rank), pair.a, turned),
            self._half(mapped, "b", (n_embd, pair.rank), pair.b, self._stored(pair.b)),
        ]

    def _whole(self, mapped: ConvertedTensor) -> ConvertedTensor:
        if not TensorName.parse(mapped.info.name).is_norm:
            raise CheckpointError(
                "is a whole weight; an adapter in GGUF has only pairs and norms",
                file=self.checkpoint.path,
                tensor=mapped.info.name,
            )
        return mapped

    def _check_all_used(self, gguf_name: str, made: list[str]) -> None:
        pairs, tensors = self.checkpoint.pairs, self.checkpoint.tensors
        if unused := [name for name in pairs if name not in self._used]:
            raise CheckpointError(
                f"belongs to no tensor of the converted {gguf_name} model, or to experts of which"
                " others have no adapter",
                file=self.checkpoint.path,
                tensor=unused[0],
            )
        # Each becomes one tensor if the model has it.
        whole = [name for name in tensors if name not in pairs]
        if len(whole) != sum(not name.endswith((".lora_a", ".lora_b")) for name in made):
            raise CheckpointError(
                f"not all of {', '.join(map(printable, whole[:4]))} belong to tensors of the"
                f" converted {gguf_name} model",
                file=self.checkpoint.path,
            )

    def _half(
        self,
        mapped: ConvertedTensor,
        half: str,
        shape: tuple[int, ...],
        stored: StoredTensor,
        rows: TensorRows,
    ) -> ConvertedTensor:
        type = rows.type if isinstance(rows, ScaledRows) else self.checkpoint.type_of(stored)
        info = TensorInfo(f"{mapped.info.name}.lora_{half}", shape, type)
        if (rows.n_rows, rows.row_bytes) != (info.n_rows, info.row_bytes):
            raise CheckpointError(
                f"has {rows.n_rows} rows of {rows.row_bytes} bytes, {info.n_rows} of"
                f" {info.row_bytes} were expected",
                file=stored.file,
                tensor=stored.name,
            )
        return ConvertedTensor(info, rows)

    def _columns(self, tensor: StoredTensor, order: np.ndarray | None) -> TensorRows:
        stored = self._stored(tensor)
        return (
            stored
            if order is None
            else SelectedColumns(stored, order, self.checkpoint.type_of(tensor))
        )

    def _stored(self, tensor: StoredTensor) -> StoredRows:
        return StoredRows(self.checkpoint, tensor)


def plan_adapter(source: AdapterSource, outtype: str) -> tuple[list[TensorInfo], str]:
    """Return the tensors with their output types, and the name of the outtype. Norms become F32,
    rows that are not whole blocks F16. Raise UsageError for an unknown outtype.
    """
    kind = resolve_outtype(source.tensors, outtype)
    if kind not in OUTTYPES:
        raise UsageError(f"adapters are stored as {', '.join(OUTTYPES)} or auto, not as {kind}")
    wanted = OUTTYPES[kind][0]

    def type_of(tensor: TensorInfo):
        if len(tensor.shape) < 2:
            return TYPES["F32"]
        return TYPES["F16"] if tensor.n_cols % wanted.block_size else wanted

    return [tensor.with_type(type_of(tensor)) for tensor in source.tensors], kind


def adapter_path(source: AdapterSource, out: str | os.PathLike | None, kind: str) -> Path:
    """Return the file to write: `out`, or `<name>-<TYPE>-LoRA.gguf` in that folder or, by default,
    the adapter's. `{outtype}` is filled in.
    """
    spelled = source.path if out is None else os.fspath(out)
    for key in ("ftype", "outtype"):
        spelled = (
            spelled
            if out is None
            else spelled.replace(f"{{{key}}}", kind).replace(f"{{{key.upper()}}}", kind.upper())
        )
    path = Path(spelled)
    if path.is_dir():
        path /= (
            default_file_name(source.metadata["general.name"].data, None, kind).removesuffix(
                ".gguf"
            )
            + "-LoRA.gguf"
        )
    return path
