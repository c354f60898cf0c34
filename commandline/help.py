"""The overview of all commands, and suggestions for misspelt ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Protocol

from ..formats.options import did_you_mean
from .colour import painted_heading


class Listed(Protocol):
    """The facts about a command that the overview needs."""

    @property
    def help(self) -> str:
        """One line that says what the command does."""
        ...

    @property
    def group(self) -> str:
        """The heading that the command is listed under."""
        ...


# Headings in order, each with one example.
GROUPS = {
    "make": "iqforge quantize --imatrix m.imatrix model-bf16.gguf model-iq4_k.gguf IQ4_K",
    "measure": "iqforge perplexity -m model-iq4_k.gguf -f wiki.test.raw",
    "run": 'iqforge generate -m model-iq4_k.gguf -p "The capital of France is"',
    "inspect": "iqforge inspect model-iq4_k.gguf",
    "advanced": "iqforge kernels --build --arch sm_90",
}
# Names of the same thing in other tools, for suggestions.
ELSEWHERE = {
    "convert_hf_to_gguf": "convert",
    "convert_lora_to_gguf": "convert-lora",
    "gguf_dump": "inspect",
    "dump": "inspect",
    "info": "inspect",
    "show": "inspect",
    "llama_export_lora": "export-lora",
    "llama_embedding": "embedding",
    "embeddings": "embedding",
    "llama_cli": "generate",
    "llama_completion": "generate",
    "cli": "generate",
    "run": "generate",
    "ppl": "perplexity",
    "kld": "perplexity",
    "merge": "gguf-split",
    "list": "types",
}
# Tools without a counterpart, and why.
_MISSING = {
    "batched_bench": "steps of several sequences are evaluated one after the other; see `bench`",
    "parallel": "there is one sequence; see `generate`",
    "server": "there is no server; see `chat`",
}
_WIDTH = 18


def suggested_command(word: str, commands: Mapping[str, Listed]) -> str:
    """Return "; did you mean 'x'?" for what is most like `word`, here or in another tool, or "".
    For a tool of llama.cpp that is missing here, return why.
    """
    name = word.lower().removesuffix(".py").replace("-", "_")
    if missing := _MISSING.get(name.removeprefix("llama_")):
        return f" ({missing})"
    elsewhere = ELSEWHERE.get(name)
    if elsewhere:
        return f"; did you mean '{elsewhere}'?"
    return did_you_mean(word, [*commands, "help", "version", "completion"])


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
