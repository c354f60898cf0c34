"""The texts of `iqforge demo`: the language reference that every Python brings along, cut into
calibration and measurement.

The embedded model was trained on the topics of `pydoc_data.topics` except those whose name has a
CRC-32 divisible by five. Those are measured on, the others calibrate, so neither the model nor the
importance matrix has seen what is measured.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ..errors import NotFoundError


@dataclass(frozen=True)
class Texts:
    """Two texts and how they came about. `repeated` counts characters left out of `measuring`: see
    `choose_texts`.
    """

    calibration: str
    measuring: str
    calibration_topics: int
    measuring_topics: int
    repeated: int


def is_held_out(topic: str) -> bool:
    """Whether the topic of this name was kept out of the model's training text."""
    return zlib.crc32(topic.encode()) % 5 == 0


def choose_texts(topics: dict[str, str] | None = None) -> Texts:
    """Calibration and measuring text from `topics`, by default those of the running Python.

    Topics come in order of their checksums, which mixes long and short, easy and hard ones: a part
    of the text is then a fair sample of it. Some held-out topics repeat paragraphs of others; these
    paragraphs are left out. NotFoundError if this Python comes without the topics.
    """
    topics = _topics() if topics is None else topics
    names = sorted(topics, key=lambda name: (zlib.crc32(name.encode()), name))
    calibrate, measure = (
        [n for n in names if not is_held_out(n)],
        [n for n in names if is_held_out(n)],
    )
    seen = {_normal(paragraph) for name in calibrate for paragraph in _paragraphs(topics[name])}
    kept, repeated = [], 0
    for name in measure:
        paragraphs = _paragraphs(topics[name])
        new = [paragraph for paragraph in paragraphs if _normal(paragraph) not in seen]
        repeated += sum(map(len, paragraphs)) - sum(map(len, new))
        kept.append("\n\n".join(new))
    return Texts(
        "\n\n".join(topics[name].strip("\n") for name in calibrate),
        "\n\n".join(filter(None, kept)),
        len(calibrate),
        len(measure),
        repeated,
    )


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise NotFoundError(
            "this Python comes without pydoc_data.topics, the text of the demo; on Debian and"
            " Ubuntu it is in the package libpython3-stdlib"
        ) from None
    return topics


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in text.strip("\n").split("\n\n") if paragraph.strip()]


def _normal(paragraph: str) -> str:
    """The same paragraph may be indented or wrapped in another way."""
    return " ".join(paragraph.split())
