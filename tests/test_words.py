"""Words that the tree does not use, because they make readers stumble. docs/glossary.md has the
words to use instead.
"""

from __future__ import annotations

import bisect
import re
from pathlib import Path

from .shared import ROOT

FORBIDDEN = {
    r"behind": "after",
    r"truth path": "reference path",
    r"parted": "split",
    r"anew": "again, from scratch",
    r"reckon(?:s|ed|ing)?": "estimate, count",
    r"the roof": "the API",
    r"(?:is|are) there already": "already exists",
    r"is no int": "is not an integer",
    r"by hand of": "by",
    r"--part-gate-up": "--split-gate-up",
}
PATTERN = re.compile(
    rf"(?<!\w)(?:{'|'.join(FORBIDDEN)})(?!\w)".replace(" ", r" \0?"), re.IGNORECASE
)
# Parts of lines that mean the word literally, such as the hidden alias of a flag.
ALLOWED = {
    "CHANGELOG.md": ("`--part-gate-up` of `quantize` is now `--split-gate-up`",),
    "formats/tools/options.py": ('aliases=("--part-gate-up",)',),
    "quantize/options.py": ('"--part-gate-up"',),
}

ENDINGS = {".md", ".py", ".cu", ".cuh", ".hpp", ".toml"}
SKIPPED = {"build", "dist", "iqforge-demo", "venv"}


def sources() -> list[Path]:
    """Return the text files of the tree that people read."""
    found = []
    for path in sorted(ROOT.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name not in SKIPPED:
            found += sorted(file for file in path.rglob("*") if file.suffix in ENDINGS)
        elif path.suffix in ENDINGS:
            found.append(path)
    return [path for path in found if path != Path(__file__)]


def phrases(text: str) -> list[tuple[int, str]]:
    """Return the number of the line and the words of every forbidden phrase, also of one that is
    broken by the end of a line or of a string.
    """
    breaks = re.compile(r'"?\n[ \t]*(?:# |// |f?")?')
    starts, parts = [0], []
    for found in breaks.finditer(text):
        parts.append(text[starts[-1] : found.start()])
        starts.append(found.end())
    parts.append(text[starts[-1] :])
    offsets, joined = [], ""
    for part in parts:
        offsets.append(len(joined))
        joined += part + " "
    joined = joined.replace("  ", " \0")  # keeps offsets; two spaces are one break
    return [
        (bisect.bisect(offsets, found.start()), " ".join(found[0].replace("\0", "").split()))
        for found in PATTERN.finditer(joined)
    ]


def test_no_forbidden_words():
    mistakes = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        name, lines = path.relative_to(ROOT).as_posix(), text.splitlines()
        mistakes += [
            f"{name}:{number}: {words!r} in: {lines[number - 1].strip()}"
            for number, words in phrases(text)
            if not any(part in lines[number - 1] for part in ALLOWED.get(name, ()))
        ]
    assert not mistakes, "\n".join(["see docs/glossary.md:", *mistakes])


def test_phrases_are_found_across_lines():
    text = '# the truth\n    # path\nx = ("is there"\n " already")\nbehinds\n'
    assert phrases(text) == [(1, "truth path"), (3, "is there already")]
