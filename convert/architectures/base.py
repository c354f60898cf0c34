"""The base class of all model families: it maps stored tensors to GGUF tensors through a table."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ..packed import unpacked
from ..tensors.decoded import factor_tensors
from ..tensors.rows import GeneratedRow
from ..tensors.stored import StoredTensor
from .family_metadata import FamilyMetadata
from .text_names import is_dropped, name_in_text_model
from .weight import ConvertedTensor, Weight, check_shape, split_numbers, weight_rows


class Architecture(FamilyMetadata, ABC):
    """Convert the checkpoints of one model family. Subclasses set `gguf_name`, implement
    `weights()` and add keys.
    """

    @abstractmethod
    def weights(self) -> list[Weight]:
        """Return the table of this family, with sizes filled in."""

    def tensors(self) -> list[ConvertedTensor]:
        """Return all output tensors: generated ones first, then in the order of the files.

        Raise CheckpointError for a stored tensor that is not in the table, for one of another
        shape, and for one that is missing.
        """
        mapped: dict[str, ConvertedTensor] = {}
        for tensor in [*self.generated(), *self.stored()]:
            if tensor.info.name in mapped:
                raise CheckpointError(
                    f"two stored tensors make '{tensor.info.name}'", file=self.checkpoint.path
                )
            mapped[tensor.info.name] = tensor
            for info, row in factor_tensors(tensor.info, tensor.made_of):
                mapped[info.name] = ConvertedTensor(info, row)
        self._check_complete(mapped)
        return list(mapped.values())

    def generated(self) -> Iterator[ConvertedTensor]:
        """Yield the tensors that no weight is stored for, such as rotary factors."""
        if (factors := self.rope.factors()) is not None:
            yield ConvertedTensor(
                TensorInfo("rope_freqs.weight", factors.shape, TYPES["F32"]), GeneratedRow(factors)
            )

    def stored(self) -> Iterator[ConvertedTensor]:
        """Yield the tensors that stored weights become. Raise CheckpointError for one that is
        unknown or has a wrong shape.
        """
        table: dict[str, Weight] = {}
        for weight in self.weights():
            # One of the two options would have no effect.
            if table.setdefault(weight.stored, weight) is not weight:
                raise RuntimeError(
                    f"the table of {self.gguf_name} has two rows for '{weight.stored}'"
                )
        for tensor in unpacked(self.checkpoint).values():
            name = self.text_name(tensor.name)
            if name is None or is_dropped(name) or (self.tied and name == "lm_head.weight"):
                continue
            yield from self.convert(name, tensor, table)

    def text_name(self, name: str) -> str | None:
        """Return the name without the prefix of the text model in a multimodal one; None for
        tensors of other modalities.
        """
        if "text_config" not in self.checkpoint.config:
            return name
        return name_in_text_model(name)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        """Yield the output tensors that are complete with `tensor`, which is `name` in the text
        model. Raise CheckpointError for a tensor that the table lacks.
        """
        pattern, numbers = split_numbers(name)
        if (weight := table.get(pattern)) is not None and weight.exact:
            suffix = ""
        else:
            stem, _, suffix = pattern.rpartition(".")
            weight = table.get(stem)
            if (
                weight is None
                or weight.exact
                or suffix not in ("weight", "bias")
                or (suffix == "bias" and not weight.bias)
            ):
                raise self.unknown(pattern, tensor, table)
        layer = self.layer_of(tensor, numbers) if weight.per_layer else None
        yield self.mapped(tensor, weight, suffix, layer)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        """Return the output tensor of a row of the table. `suffix`: weight, bias, or empty for an
        exact name. Raise CheckpointError for a layer that lacks it, or a wrong shape.
        """
        shape = weight.shape_of(layer)
        if shape is None:
            raise CheckpointError(
                f"{self.gguf_name} has no such tensor in layer {layer}",
                file=tensor.file,
                tensor=tensor.name,
            )
        if suffix == "bias":
            shape, weight = shape[:1], replace(weight, plus_one=False)
        check_shape(tensor, shape)
        rows, type = weight_rows(self.checkpoint, tensor, weight, shape)
        name = weight.gguf.format(layer)
        return ConvertedTensor(
            TensorInfo(f"{name}.{suffix}" if suffix else name, shape, type), rows, (tensor,)
        )

    def layer_of(self, tensor: StoredTensor, numbers: list[int]) -> int:
        """Return the layer in a tensor's name. Raise CheckpointError if the model has fewer
        layers.
        """
        if numbers[0] >= self.n_layers:
            raise CheckpointError(
                f"belongs to layer {numbers[0]}, but config.json has num_hidden_layers"
                f" {self.n_layers}",
                file=tensor.file,
                tensor=tensor.name,
            )
        return numbers[0]

    def unknown(
        self, pattern: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> CheckpointError:
        """Return the error for a tensor that the table lacks. It suggests a similar name."""
        stem, _, _ = pattern.rpartition(".")
        close = difflib.get_close_matches(stem, table, n=1, cutoff=0.6)
        hint = f"; the most similar known name is '{close[0]}'" if close else ""
        return CheckpointError(
            f"{self.gguf_name} has no such tensor{hint}", file=tensor.file, tensor=tensor.name
        )

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        """Return GGUF and stored names of the tensors that this row of the table must have yielded.
        `{}` is the layer.
        """
        if weight.optional:
            return []
        if weight.exact:
            return [(weight.gguf, weight.stored)]
        return [
            (f"{weight.gguf}.{suffix}", f"{weight.stored}.{suffix}")
            for suffix in (("weight", "bias") if weight.bias else ("weight",))
        ]

    def _check_complete(self, mapped: dict[str, ConvertedTensor]) -> None:
        wanted = [(weight, *names) for weight in self.weights() for names in self.required(weight)]
        # Stops at the first missing tensor, however many layers a config claims.
        for layer in range(self.first_layer, self.n_layers):
            for weight, name, stored in wanted:
                expected = (layer == self.first_layer or weight.per_layer) and weight.shape_of(
                    layer
                ) is not None
                if expected and name.format(layer) not in mapped:
                    raise CheckpointError(
                        "is missing from the checkpoint",
                        file=self.checkpoint.path,
                        tensor=stored.format(layer),
                    )
