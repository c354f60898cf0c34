"""A table of embeddings of hashed n-grams, which is stored in shards, and the integers that hash
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ...errors import CheckpointError, ConfigError
from ...formats.source import TensorInfo
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import ConcatenatedRows, StoredRows
from ..tensors.stored import WIDENED_DTYPES, StoredTensor
from .base import Architecture
from .blocks import LAYER
from .layout_options import LayoutOptions
from .weight import ConvertedTensor, Weight

PLE = f"{LAYER}.ple"
_SHARD = re.compile(r"\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d{1,9})\.)?weight$")
_INTEGERS = "ple_embedding."
_CONSTANTS = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
_MOST = 1 << 63  # token ids times multipliers are 64-bit integers


class NgramTable(Architecture):
    """An architecture one of whose layers, `ngram_layer`, adds embeddings of n-grams to its
    streams; None for models without. Its first bases read the other sizes.

    `ngram_size`: tokens of the longest n-grams. Each of the lengths 2 to `ngram_size` has
    `heads_per_ngram` heads, and the embeddings of all have `ngram_width` elements together.
    """

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        layers = sorted({*config.integers("ple_layer_ids", default=[])})
        if len(layers) > 1 or not all(1 <= layer <= self.n_layers for layer in layers):
            raise ConfigError(
                f"key 'ple_layer_ids' is {layers}; GGUF's {self.gguf_name} has at most one such"
                f" layer, from 1 to {self.n_layers}",
                file=config.file,
            )
        self.ngram_layer = layers[0] - 1 if layers else None
        self.ngram_size = config.integer("ngram_size", default=3, minimum=2, maximum=64)
        self.heads_per_ngram = config.integer("heads_per_ngram", default=8, maximum=1 << 16)
        self.n_ngram_heads = (self.ngram_size - 1) * self.heads_per_ngram
        self.ngram_taps = config.integer("ple_conv_kernel_size", default=4)
        self.ngram_width = config.integer("ple_embed_dim", default=self.n_embd)
        if self.ngram_width % self.n_ngram_heads:
            raise ConfigError(
                f"ple_embed_dim {self.ngram_width} is not a multiple of {self.n_ngram_heads} heads"
                " of n-grams",
                file=config.file,
            )
        self._shards: dict[int, StoredTensor] = {}

    # --- metadata

    def ngram_keys(self) -> dict[str, Value]:
        """Return the keys of the table, without the integers that are stored as tensors. Raise
        ConfigError if no token ends texts.
        """
        if self.ngram_layer is None:
            return {}
        return {
            "ple.layers": array(ValueType.INT32, [self.ngram_layer]),
            "ple.ngram_size": u32(self.ngram_size),
            "ple.heads_per_ngram": u32(self.heads_per_ngram),
            "ple.conv_kernel": u32(self.ngram_taps),
            "ple.eos_token_id": u32(self._end_of_text()),
            "embedding_length_per_layer_input": u32(self.ngram_width // self.n_ngram_heads),
        }

    def _end_of_text(self) -> int:
        """Return the token that n-grams do not look beyond: the first one, as in the class."""
        config = self.config
        if isinstance(config.values.get("eos_token_id"), list):
            found = config.integers("eos_token_id")
            if found and 0 <= found[0] < self.n_vocab:
                return found[0]
            raise ConfigError(
                f"key 'eos_token_id' is {found}, expected tokens below {self.n_vocab}",
                file=config.file,
            )
        return config.integer("eos_token_id", minimum=0, maximum=self.n_vocab - 1)

    def metadata(self) -> dict[str, Value]:
        keys = super().metadata()
        if self.ngram_layer is None or self.options.vocab_only:
            return keys
        multipliers, offsets, sizes = self._constants()
        found = {
            "layer_multipliers": multipliers,
            "head_offsets": offsets,
            "head_vocab_sizes": sizes,
        }
        return keys | {
            f"{self.gguf_name}.ple.{name}": array(ValueType.UINT64, values)
            for name, values in found.items()
        }

    def _constants(self) -> list[list[int]]:
        """Return multipliers of tokens, and the first row and number of rows of each head. Raise
        CheckpointError for those that are missing, or are not possible.
        """
        multipliers, offsets, sizes = (
            self._integers(name, n)
            for name, n in zip(
                _CONSTANTS,
                (self.ngram_size, self.n_ngram_heads, self.n_ngram_heads),
                strict=True,
            )
        )
        most = _MOST // self.n_vocab
        checks = (
            (multipliers, all(0 < x <= most for x in multipliers)),
            (offsets, offsets[0] == 0 and all(a < b for a, b in pairwise(offsets))),
            (sizes, all(0 < size < _MOST for size in sizes)),
        )
        for name, (values, possible) in zip(_CONSTANTS, checks, strict=True):
            if not possible:
                raise CheckpointError(
                    f"is {values}, which no table has",
                    file=self.checkpoint.path,
                    tensor=self._constant(name),
                )
        return [multipliers, offsets, sizes]

    def _constant(self, name: str) -> str:
        return f"{PLE.format(self.ngram_layer)}.{_INTEGERS}{name}"

    def _integers(self, name: str, n: int) -> list[int]:
        wanted = self._constant(name)
        tensors = self.checkpoint.tensors
        stored = next(
            (x for x in tensors if super(NgramTable, self).text_name(x) == wanted), wanted
        )
        tensor = tensors.get(stored)
        if tensor is None:
            raise CheckpointError(
                "is missing from the checkpoint", file=self.checkpoint.path, tensor=wanted
            )
        if tensor.dtype not in ("I64", "I32") or tensor.shape != (n,):
            raise CheckpointError(
                f"is {tensor.dtype} {list(tensor.shape)}, expected {n} integers",
                file=tensor.file,
                tensor=tensor.name,
            )
        data = self.checkpoint.read(tensor, 0, tensor.n_bytes)
        return data.view(WIDENED_DTYPES[tensor.dtype]).tolist()

    # --- tensors

    def text_name(self, name: str) -> str | None:
        text = super().text_name(name)
        is_constant = text is not None and text.endswith(
            tuple(f".ple.{_INTEGERS}{name}" for name in _CONSTANTS)
        )
        return None if is_constant else text  # in the metadata

    def tensors(self) -> list[ConvertedTensor]:
        self._shards.clear()
        made = super().tensors()
        if self.ngram_layer is not None and (n := self._n_shards()) != len(self._shards):
            missing = next(number for number in range(n) if number not in self._shards)
            raise CheckpointError(
                "is missing from the checkpoint",
                file=self.checkpoint.path,
                tensor=f"{PLE.format(self.ngram_layer)}.{_INTEGERS}ngram_embedding.shard_{missing}"
                ".weight",
            )
        return made

    def _n_shards(self) -> int:
        return self.config.integer("split_ngram_parts", default=512, maximum=1 << 20)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if self.ngram_layer is None or (found := _SHARD.search(name)) is None:
            yield from super().convert(name, tensor, table)
            return
        n, number = self._n_shards(), int(found[1] or 0)
        width = self.ngram_width // self.n_ngram_heads
        if (found[1] is None and n != 1) or number >= n or number in self._shards:
            raise CheckpointError(
                f"is one shard too many: config.json has split_ngram_parts {n}",
                file=tensor.file,
                tensor=tensor.name,
            )
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise CheckpointError(
                f"has shape {list(tensor.shape)}, config.json implies rows of {width}",
                file=tensor.file,
                tensor=tensor.name,
            )
        self._shards[number] = tensor
        if len(self._shards) == n:
            yield self._joined([self._shards[number] for number in range(n)], width)

    def _joined(self, shards: list[StoredTensor], width: int) -> ConvertedTensor:
        """Return the table. Raise CheckpointError if heads have more rows than it."""
        _, offsets, sizes = self._constants()
        rows = sum(shard.shape[0] for shard in shards)
        needed = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        types = {shard.dtype for shard in shards}
        if rows < needed or len(types) > 1:
            raise CheckpointError(
                f"and the other shards have {rows} rows of {', '.join(sorted(types))}, expected at"
                f" least {needed} of one type",
                file=shards[0].file,
                tensor=shards[0].name,
            )
        info = TensorInfo(
            "per_layer_token_embd.weight", (rows, width), self.checkpoint.type_of(shards[0])
        )
        parts = [StoredRows(self.checkpoint, shard) for shard in shards]
        return ConvertedTensor(info, ConcatenatedRows(parts), tuple(shards))
