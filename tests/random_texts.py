"""Random texts made of what tokenizers stumble over."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = [
    *("a", "B", "é", "ß", "ı", "İ", "ﬀ", "Straße", "naïve", "...", "!?", "’", "'", "'LL", "it's"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x00", "\xa0", "\u3000", "\ufeff", "\u2028"),
    *("1", "234", "1234567", "٣", "²", "½", "Ⅷ", "3.14", "x2", "0x1F", "<0x41>"),
    *(
        "日本語",
        "漢字",
        "かな",
        "가",
        "한국",
        "ไทย",
        "का",
        "\u0301",
        "e\u0301",
        "\u0345",
        "豈",
        "Ω",
        "Å",
    ),
    *("🙂", "👩\u200d👩\u200d👧", "🇩🇪", "\u200d", "\u200b", "\ue000", "\U0010fffd"),
    *(" the", " and", " of", "def f(x):", "    return", "----", "==", "<|", "|>", "<b>", "</s>"),
    *("\u2581", "\u2581\u2581", "CamelCase", "snake_case", "http://x.y/z?q=1#f"),
]


def random_texts(n: int, seed: int, added: Sequence[str] = ()) -> list[str]:
    """Return `n` texts of up to 25 pieces: those above, any character, and the texts of added
    tokens, also next to spaces.
    """
    rng = random.Random(seed)
    marks = [text for token in added for text in (token, f" {token} ", token)]
    pieces = [*PIECES, *marks]

    def piece() -> str:
        if rng.random() < 0.75:
            return rng.choice(pieces)
        ranges = [(32, 127), (0xA0, 0x800), (0x800, 0xD800), (0xE000, 0x110000)]
        return chr(rng.randrange(*rng.choice(ranges)))

    return ["".join(piece() for _ in range(rng.randrange(26))) for _ in range(n)]
