"""The texts of `iqforge demo`: the language reference that Python includes, divided into a
calibration text and a measuring text.

The embedded model was trained on the topics of `pydoc_data.topics` except those whose name has a
CRC-32 divisible by five. These make the measuring text, the others the calibration text, so neither
the model nor the importance matrix has seen the text that is measured.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ..errors import NotFoundError

N_CTX = 512  # tokens of a chunk
DEFAULT_CHUNKS = 60


@dataclass(frozen=True)
class Texts:
    """Two texts and where they come from. `repeated` counts the characters left out of `measuring`:
    see `choose_texts`.
    """

    calibration: str
    measuring: str
    calibration_topics: int
    measuring_topics: int
    repeated: int


def is_held_out(topic: str) -> bool:
    """Return whether the topic of this name was left out of the model's training text."""
    return zlib.crc32(topic.encode()) % 5 == 0


def choose_texts(topics: dict[str, str] | None = None) -> Texts:
    """Return calibration and measuring text from `topics`, by default those of the running Python.

    Topics are in order of their checksums, which mixes long and short, easy and hard ones, so that
    the first chunks are a fair sample of the text. Some held-out topics repeat paragraphs of
    others; these paragraphs are left out. Raises NotFoundError if this Python has no topics.
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
            "this Python has no pydoc_data.topics, which is the text of the demo; on Debian and"
            " Ubuntu it is in the package libpython3-stdlib"
        ) from None
    return topics


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in text.strip("\n").split("\n\n") if paragraph.strip()]


def _normal(paragraph: str) -> str:
    """Return the paragraph without the indentation and line breaks, which may differ."""
    return " ".join(paragraph.split())
