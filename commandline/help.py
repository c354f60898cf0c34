"""The overview of all commands, and suggestions for misspelt ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Protocol

from .colour import painted_heading


class Listed(Protocol):
    """What the overview says about a command."""

    @property
    def help(self) -> str: ...
    @property
    def group(self) -> str: ...


# Headings in order, each with one example.
GROUPS = {
    "make": "iqforge quantize --imatrix m.imatrix model-bf16.gguf model-iq4_k.gguf IQ4_K",
    "measure": "iqforge perplexity -m model-iq4_k.gguf -f wiki.test.raw",
    "run": 'iqforge generate -m model-iq4_k.gguf -p "The capital of France is"',
    "inspect": "iqforge inspect model-iq4_k.gguf",
    "advanced": "iqforge kernels --build --arch sm_90",
}
_WIDTH = 18


def print_overview(commands: Mapping[str, Listed], file: IO[str]) -> None:
    """Print what iqforge is, its commands by group with an example each, and where to read more."""
    lines = [
        "usage: iqforge COMMAND [flags] ...",
        "",
        "GGUF quantization and conversion with a reference runtime.",
        "New here? Start with `iqforge demo`.",
    ]
    for group, example in GROUPS.items():
        lines += ["", painted_heading(f"{group.capitalize()}:", file)]
        lines += [
            f"  {name:<{_WIDTH}}{command.help}"
            for name, command in commands.items()
            if command.group == group
        ]
        lines += [f"  {'':{_WIDTH}}$ {example}"]
    lines += [
        "",
        painted_heading("More:", file),
        f"  {'help COMMAND':<{_WIDTH}}the flags of a command; also `iqforge COMMAND --help`",
        f"  {'help completion':<{_WIDTH}}how to complete commands and flags in a shell",
        f"  {'version':<{_WIDTH}}the version; also `iqforge --version`",
    ]
    print("\n".join(lines), file=file)
