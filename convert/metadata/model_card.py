"""The front matter of a model card (README.md): name, licence, tags, languages, base models."""

from __future__ import annotations

from ...formats.gguf.values import Value, ValueType, array, string, u32
from ..checkpoint.folder import Checkpoint

_MAX_LINES = 2000
Card = dict[str, str | list[str]]


def read_model_card(checkpoint: Checkpoint) -> Card:
    """Top-level `key: text` and `key:` + `- item` entries between the first two `---` lines;
    anything deeper is skipped.

    A small part of YAML suffices: what the keys below hold is never more than a text or a list of
    texts. A card that cannot be read is no reason to stop a conversion, so it counts as absent.
    """
    path = checkpoint.path / "README.md"
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.rstrip("\r\n") for line, _ in zip(file, range(_MAX_LINES))]
    except (OSError, UnicodeDecodeError):
        return {}
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    card: Card = {}
    key = None
    for line in lines[1 : lines.index("---", 1)]:
        text = line.strip()
        if text.startswith("- ") and key and isinstance(card[key], list):
            if ":" not in text or text.startswith(("- '", '- "')):
                card[key].append(_plain(text[2:]))
        elif text and not line[0].isspace() and not text.startswith("#") and ":" in text:
            key, _, rest = text.partition(":")
            rest = rest.strip()
            if rest.startswith("[") and rest.endswith("]"):
                card[key] = [_plain(item) for item in rest[1:-1].split(",") if item.strip()]
            else:
                card[key] = _plain(rest) if rest else []
    return card


def _plain(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _texts(card: Card, key: str) -> list[str]:
    value = card.get(key, [])
    return [item for item in ([value] if isinstance(value, str) else value) if item]


def model_card_metadata(card: Card) -> dict[str, Value]:
    """`general.license*`, `general.base_model.*`, `general.tags` and `general.languages`, as far as
    the card has them.
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
