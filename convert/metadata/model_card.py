"""The front matter of a model card (README.md): name, licence, tags, languages, base models."""

from __future__ import annotations

from typing import Any

import yaml

from ...formats.values import Value, ValueType, array, string, u32
from ..checkpoint.folder import Checkpoint

_MAX_CHARACTERS = 1 << 20
_MARK = "---"
Card = dict[str, Any]


def read_model_card(checkpoint: Checkpoint) -> Card:
    """Return the YAML between the first two `---` lines, with all scalars as strings.

    A card that cannot be read does not stop a conversion: it counts as empty.
    """
    try:
        with open(checkpoint.path / "README.md", encoding="utf-8") as file:
            lines = file.read(_MAX_CHARACTERS).split("\n")
        if not lines or lines[0].strip() != _MARK or _MARK not in lines[1:]:
            return {}
        # BaseLoader builds strings, lists and dictionaries only; `no` stays the language.
        card = yaml.load("\n".join(lines[1 : lines.index(_MARK, 1)]), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return {}
    return card if isinstance(card, dict) else {}


def _texts(card: Card, key: str) -> list[str]:
    value = card.get(key)
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str) and item]


def model_card_metadata(card: Card) -> dict[str, Value]:
    """Return `general.license*`, `general.base_model.*`, `general.tags` and `general.languages`, as
    far as the card has them.
    """
    keys: dict[str, Value] = {}
    for stored, key in (
        ("license", "license"),
        ("license_name", "license.name"),
        ("license_link", "license.link"),
    ):
        if texts := _texts(card, stored):
            keys[f"general.{key}"] = string(texts[0])
    if bases := _texts(card, "base_model"):
        keys["general.base_model.count"] = u32(len(bases))
        for number, base in enumerate(bases):
            organization, _, model = base.rpartition("/")
            keys[f"general.base_model.{number}.name"] = string(model.replace("-", " "))
            if organization:
                keys[f"general.base_model.{number}.organization"] = string(
                    organization.replace("-", " ")
                )
                keys[f"general.base_model.{number}.repo_url"] = string(
                    f"https://huggingface.co/{base}"
                )
    if tags := [*_texts(card, "tags"), *_texts(card, "pipeline_tag")]:
        keys["general.tags"] = array(ValueType.STRING, tags)
    if languages := _texts(card, "language"):
        keys["general.languages"] = array(ValueType.STRING, languages)
    return keys
