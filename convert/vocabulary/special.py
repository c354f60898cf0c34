"""Ids of special tokens, and which of them are added to a text: from tokenizer_config.json, the
post-processor and config.json, in this order.
"""

from __future__ import annotations

from typing import Any

from ...errors import TokenizerError, printable
from ...formats.values import Value, boolean, u32
from ..checkpoint.folder import Checkpoint
from .tokens import content_of

# Kind of special token -> key of its id; the spelling of the separator's key is the format's.
ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "eot": "eot_token_id",
}


def special_tokens(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    ids_by_token: dict[str, int],
    n_vocab: int,
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` for special tokens: `bos_token_id`, `add_bos_token`
    and so on.

    `tokenizer` is tokenizer.json, empty if there is none; `config` is tokenizer_config.json, whose
    tokens are looked up in `ids_by_token`.
    """
    named = {
        kind: content_of(config.get(f"{kind}_token"))
        for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    }
    named["bos"] = named["bos"] or named["cls"]
    named["eos"] = named["eos"] or named["sep"]
    template = _Template(tokenizer.get("post_processor"))
    if not config:  # only the template tells what begins and ends a text
        named["bos"], named["eos"] = named["bos"] or template.first, named["eos"] or template.last
    if template.last and named["eos"] and template.last != named["eos"]:
        named["eot"], named["eos"] = named["eos"], template.last
    ids = {
        kind: ids_by_token[token]
        for kind, token in named.items()
        if kind in ID_KEYS and token in ids_by_token
    }
    for kind in ID_KEYS:
        if kind not in ids and (number := _configured_id(checkpoint, kind, n_vocab)) is not None:
            ids[kind] = number
    added = {}
    if tokenizer:
        added = {
            "bos": template.first is not None and template.first in (named["bos"], named["cls"]),
            "eos": template.last is not None and template.last == named["eos"],
        }
    if (separator := template.adds_separator(named["sep"], named["eos"])) is not None:
        added["sep"] = separator
    if template.roberta:
        added = {"bos": True, "eos": True, "sep": True}
    for kind in ("bos", "eos", "sep"):
        if isinstance(config.get(f"add_{kind}_token"), bool):
            added[kind] = config[f"add_{kind}_token"]
    return {
        **{ID_KEYS[kind]: u32(number) for kind, number in ids.items()},
        **{f"add_{kind}_token": boolean(value) for kind, value in added.items()},
    }


def _configured_id(checkpoint: Checkpoint, kind: str, n_vocab: int) -> int | None:
    """Return `<kind>_token_id` of config.json. A list holds alternatives, of which the first is
    taken.
    """
    config = checkpoint.config.of_text()
    value = config.values.get(f"{kind}_token_id")
    if isinstance(value, list) and value:
        value = value[0]
    if value is None or (type(value) is int and value < 0):  # -1 is written for "none"
        return None
    if type(value) is not int or value >= n_vocab:
        raise TokenizerError(
            f"key '{kind}_token_id' is {printable(value)}, expected an id below {n_vocab}",
            file=config.file,
        )
    return value


class _Template:
    """The tokens that a TemplateProcessing post-processor puts around one text (`first`, `last`)
    and between two.
    """

    def __init__(self, post_processor: Any):
        self.first = self.last = None
        self.roberta = False
        self._between: list[str | None] = []
        steps = (
            post_processor.get("processors", [post_processor])
            if isinstance(post_processor, dict)
            else []
        )
        for step in steps if isinstance(steps, list) else []:
            kind = step.get("type") if isinstance(step, dict) else None
            if kind == "RobertaProcessing":
                self.roberta = True
            elif kind == "TemplateProcessing":
                self._read(_pieces(step.get("single")), _pieces(step.get("pair")))

    def _read(self, single: list[tuple[str, str]], pair: list[tuple[str, str]]) -> None:
        if len(single) > 1:
            self.first, self.last = (
                name if kind == "SpecialToken" else None for kind, name in (single[0], single[-1])
            )
        if pair and self.first and pair[0] == ("SpecialToken", self.first):
            pair = pair[1:]
        if pair and self.last and pair[-1] == ("SpecialToken", self.last):
            pair = pair[:-1]
        if len(pair) > 2 and pair[0] == ("Sequence", "A") and pair[-1] == ("Sequence", "B"):
            self._between = [name if kind == "SpecialToken" else None for kind, name in pair[1:-1]]

    def adds_separator(self, sep: str | None, eos: str | None) -> bool | None:
        """Return whether a separator is put between two texts; None if nothing is put there."""
        if not self._between:
            return None
        ends = [token is not None and token in (sep, eos) for token in self._between]
        return (ends[0] and self.last is None) or (len(ends) == 2 and ends[1])


def _pieces(template: Any) -> list[tuple[str, str]]:
    pieces = []
    for item in template if isinstance(template, list) else []:
        for kind in ("SpecialToken", "Sequence"):
            if (
                isinstance(item, dict)
                and isinstance(item.get(kind), dict)
                and isinstance(item[kind].get("id"), str)
            ):
                pieces.append((kind, item[kind]["id"]))
    return pieces
