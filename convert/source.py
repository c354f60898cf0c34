"""Read a checkpoint as a `Source`: GGUF names, shapes and metadata first, rows of the stored
weights on demand.
"""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..formats.values import Value, u32
from .architectures.layout_options import LayoutOptions
from .architectures.registry import architecture_class
from .checkpoint.folder import Checkpoint
from .metadata.general import general_metadata
from .rows_source import RowsSource
from .tensors.outtype import plan_outtype

QUANTIZATION_VERSION = 2  # version of the block formats in ggml


class CheckpointSource(RowsSource):
    """Read a Hugging Face checkpoint as a GGUF file, in the types in which its weights are stored.

    `pre` names the pre-tokenizer, by default it is derived; `name` overrides `general.name`;
    `layout` are the fields of `LayoutOptions`. `metadata["general.file_type"]` is the one for
    `auto`. All errors in config, vocabulary, names and shapes are raised on construction.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        pre: str | None = None,
        name: str | None = None,
        **layout: Any,
    ):
        options = LayoutOptions(**layout)
        model_type = checkpoint.config.of_text().values.get("model_type")
        architecture = architecture_class(checkpoint.architecture, model_type)(checkpoint, options)
        if options.merge_gate_up and not (architecture.has_experts and architecture.has_gates):
            raise UsageError(
                f"{checkpoint.architecture} has no experts whose gate and up could be merged"
            )
        if options.mtp == "only" and not architecture.has_mtp:
            raise UsageError(
                f"{checkpoint.architecture} is converted without MTP blocks; there are none to keep"
            )
        if options.mla_layout not in architecture.mla_layouts:
            raise UsageError(
                f"{checkpoint.architecture} has one layout of attention; '{options.mla_layout}' is"
                " only for deepseek2"
            )
        mapped = [] if options.vocab_only else architecture.tensors()
        super().__init__(checkpoint, mapped)
        self.options = options
        self.metadata: dict[str, Value] = {
            **general_metadata(checkpoint, architecture.gguf_name, self.tensors, name),
            **architecture.metadata(),
            "general.quantization_version": u32(QUANTIZATION_VERSION),
            **architecture.vocabulary(pre),
        }
        if options.vocab_only:
            del self.metadata["general.file_type"]
        else:
            self.metadata["general.file_type"] = u32(plan_outtype(self, "auto")[1])
