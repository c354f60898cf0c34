"""Multi-token prediction: blocks after the last layer that predict further tokens. They are kept as
the last blocks, dropped, or converted alone.
"""

from __future__ import annotations

import logging

from ...errors import CheckpointError, UsageError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from .base import Architecture
from .blocks import LAYER, in_layers
from .layout_options import LayoutOptions
from .weight import Weight, split_numbers

log = logging.getLogger(__name__)

_FIRST = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}


def name_in_layers(name: str, n_main: int) -> str:
    """Return the name of a tensor of `mtp.*` as one of `model.layers.*`; other names as they are.
    What is outside of `mtp.layers` belongs to the first block.
    """
    if name.startswith("mtp.layers."):
        number, _, rest = name.removeprefix("mtp.layers.").partition(".")
        is_number = number.isdecimal() and len(number) < 10
        return f"model.layers.{n_main + int(number)}.{rest}" if is_number else name
    for stored, own in _FIRST.items():
        if name.startswith(stored):
            return f"model.layers.{n_main}.{own}{name.removeprefix(stored)}"
    return name


class MtpBlocks(Architecture):
    """Add MTP blocks. In a list of bases it comes before the architecture. `n_main` is the number
    of layers of the model, `n_layers` counts the MTP blocks too.

    They are stored as further `model.layers.N`, or under names that `further_name` translates to
    these.
    """

    has_mtp = True
    mtp_key = "num_nextn_predict_layers"  # of config.json

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.n_main = self.n_layers
        self.n_mtp = 0 if options.mtp == "drop" else self._count()
        self.n_layers += self.n_mtp
        if options.mtp == "only":
            if self.n_mtp == 0:
                raise UsageError("this checkpoint has no blocks that predict further tokens")
            self.first_layer = self.n_main

    def _count(self) -> int:
        """Return the number of blocks in the checkpoint: some configs announce blocks that were not
        saved, others have blocks without saying so.
        """
        announced = self.config.integer(self.mtp_key, minimum=0, default=None)
        if self.options.vocab_only:
            return announced or 0
        found = {
            layer - self.n_main
            for name in self.checkpoint.tensors
            if (layer := self._layer_number(name)) is not None and layer >= self.n_main
        }
        if announced and not found:
            log.warning(
                "config.json announces %d blocks that predict further tokens; the checkpoint has"
                " none",
                announced,
            )
        elif announced is not None and found and max(found) >= announced:
            raise CheckpointError(
                f"belongs to layer {self.n_main + max(found)}, but config.json has"
                f" num_hidden_layers {self.n_main} and {self.mtp_key} {announced}",
                file=self.checkpoint.path,
            )
        return (announced or max(found) + 1) if found else 0

    def _layer_number(self, name: str) -> int | None:
        text = super().text_name(name)
        pattern, numbers = split_numbers(self.further_name(text) if text is not None else "")
        return numbers[0] if pattern.startswith(f"{LAYER}.") else None

    def further_name(self, name: str) -> str:
        """Return the name of a tensor of the k-th MTP block as `model.layers.<n_main + k>`."""
        return name

    def text_name(self, name: str) -> str | None:
        text, layer = super().text_name(name), self._layer_number(name)
        if layer is not None and (
            layer < self.first_layer or (layer >= self.n_main and self.options.mtp == "drop")
        ):
            return None
        return text if text is None else self.further_name(text)

    def mtp_keys(self) -> dict[str, Value]:
        """Return the key with the number of MTP blocks; none if there are none."""
        return {"nextn_predict_layers": u32(self.n_mtp)} if self.n_mtp else {}

    def mtp_weights(self, **line) -> list[Weight]:
        """Return the tensors of an MTP block that a layer does not have. `line` is passed on to the
        norms.
        """
        d, further = self.n_embd, range(self.n_main, self.n_layers)
        vocabulary = in_layers(further, (self.n_vocab, d))
        return [
            Weight(f"{LAYER}.eh_proj", "blk.{}.nextn.eh_proj", in_layers(further, (d, 2 * d))),
            Weight(f"{LAYER}.embed_tokens", "blk.{}.nextn.embed_tokens", vocabulary, optional=True),
            Weight(f"{LAYER}.enorm", "blk.{}.nextn.enorm", in_layers(further, (d,)), **line),
            Weight(f"{LAYER}.hnorm", "blk.{}.nextn.hnorm", in_layers(further, (d,)), **line),
            Weight(
                f"{LAYER}.shared_head.head",
                "blk.{}.nextn.shared_head_head",
                vocabulary,
                optional=True,
            ),
            Weight(
                f"{LAYER}.shared_head.norm",
                "blk.{}.nextn.shared_head_norm",
                in_layers(further, (d,)),
                **line,
            ),
        ]
