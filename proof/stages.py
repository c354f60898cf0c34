"""Chains of stages: what is printed of each, and which ones a run that was interrupted has
finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import printable
from ..formats.output import PartFile

_INDENT = " " * 6


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Stage:
    """One step of a chain: its heading, the equivalent command and its duration."""

    title: str
    command: str
    seconds: float


class Stages:
    """Prints the stages of a chain, or gives their lines to `write`. `done` has those that have
    ended.
    """

    def __init__(self, write: Callable[[str], None] = _print) -> None:
        self.done: list[Stage] = []
        self.write = write

    def say(self, line: str) -> None:
        """Print a line that belongs to the stage."""
        self.write(_INDENT + line)

    @contextmanager
    def stage(self, title: str, *words: object) -> Iterator[None]:
        """Print a heading with the equivalent command, and time the stage."""
        command = shlex.join(["iqforge", *map(str, words)]) if words else ""
        self.write(f"\n[{len(self.done) + 1}] {title}")
        if command:
            self.say(printable(command, 2000))
        started = time.monotonic()
        yield
        self.done.append(Stage(title, command, time.monotonic() - started))
        self.say(f"took {self.done[-1].seconds:.1f} s")


class Finished:
    """What is finished, in a JSON file that a later run reads: for each stage a digest of all that
    it depends on, its files with their sizes, and its results.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            found = json.loads(path.read_text())
            self._stages: dict[str, dict[str, Any]] = found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            self._stages = {}

    def result(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the results of a stage that is finished, or None if it has to run: it never
        ended, something that it depends on has changed, or a file is missing.
        """
        found = self._stages.get(name)
        if not isinstance(found, dict) or found.get("key") != key:
            return None
        files, result = found.get("files"), found.get("result")
        if not isinstance(files, dict) or not isinstance(result, dict):
            return None
        for file, size in files.items():
            path = self.path.parent / file
            if not path.is_file() or path.stat().st_size != size:
                return None
        return result

    def record(self, name: str, key: str, files: Sequence[Path], **result: Any) -> dict[str, Any]:
        """Record a stage with its results, which are JSON, and return them."""
        folder = self.path.parent  # paths from there, so that everything can be moved
        sizes = {os.path.relpath(file, folder): file.stat().st_size for file in files}
        self._stages[name] = {"key": key, "files": sizes, "result": result}
        with PartFile(self.path) as part:
            part.write((json.dumps(self._stages, indent=1) + "\n").encode())
        return result


def digest(*parts: Any) -> str:
    """Return a digest of JSON values and paths."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
