"""The model card that `iqforge auto` writes: README.md with front matter, figures, and what the
file was made of.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..formats.tools.summary import ModelSummary
from ..formats.types import ggml_type
from ..imatrix.default_texts import DEFAULT
from ..runtime.evaluate.comparison import Comparison
from ..version import __version__
from .auto_options import AutoOptions, Target
from .auto_plan import Aim
from .figures import pair, size_of, speed

# Keys of the front matter, and the keys of a GGUF file after `general.`.
LICENSE_KEYS = {
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
}
_FIRST_IK_ID = 97  # type ids above 96 exist in ik_llama.cpp only


@dataclass(frozen=True)
class Card:
    """What a model card says. source: name, and repository and commit or files. chosen, made: the
    results of the stages that chose the types and wrote the file.
    """

    source: dict[str, Any]
    license: dict[str, str]
    comparison: Comparison
    summary: ModelSummary
    target: Target
    aim: Aim
    chosen: dict[str, Any]
    made: dict[str, Any]
    calibration: Sequence[str]
    tests: Sequence[str]
    options: AutoOptions

    @property
    def needs_ik(self) -> bool:
        """Return whether llama.cpp lacks one of the types."""
        return any(ggml_type(total.name).id >= _FIRST_IK_ID for total in self.summary.types)

    def facts(self) -> list[tuple[str, str]]:
        """Return names and values: what the file was made of, and how."""
        made_of = self.source.get("repository")
        origin = f"{made_of} at {self.source['commit']}" if made_of else self.source["name"]
        key = "quantize.source.fingerprint"
        fingerprint = self.summary.metadata.get(key)
        held_out = not self.options.tests
        return [
            ("Made of", origin),
            ("Target", self._target()),
            ("SHA-256 of the file", self.made["sha256"]),
            *([("Fingerprint of the weights", str(fingerprint.data))] if fingerprint else []),
            ("Calibration text", ", ".join(self.calibration)),
            (
                "Measured on",
                ", ".join(self.tests) + (" (held out from calibration)" if held_out else ""),
            ),
            ("Sensitivities", self.chosen["sensitivities"]),
        ]

    def _target(self) -> str:
        if self.aim.bpw is not None:
            return f"{self.aim.bpw:g} bits per weight"
        size = size_of(self.aim.n_bytes or 0)
        return f"a file of {size}" if self.target.gpu is None else f"{size}: {self.aim.why}"


def model_card(card: Card) -> str:
    """Return README.md."""
    model, base = card.comparison.models[0], card.comparison.base
    name = model.name
    runs = "ik_llama.cpp and iqforge" if card.needs_ik else "llama.cpp, ik_llama.cpp and iqforge"
    lines = [
        *_front_matter(card),
        f"# {name}",
        "",
        f"{card.source.get('repository', card.source['name'])} in {model.bits_per_weight:.2f} bits"
        f" per weight: {size_of(model.file_bytes)} instead of {size_of(base.file_bytes)}. Every"
        " tensor has the type that keeps most of the predictions at this size. The file runs in"
        f" {runs}.",
        "",
        "```bash",
        f'iqforge generate -m {name}.gguf -p "Once upon a time" -n 64',
        "```",
        "",
        "## What is lost",
        "",
        "Predictions of the next token, compared with those of the unquantized model. KLD is the KL"
        " divergence in nats; [compare.html](compare.html) has more figures, and the tokens that"
        " differ most.",
        "",
        "| text | tokens | PPL before | PPL after | mean KLD | 99 % KLD | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for before, after in zip(base.texts, model.texts, strict=True):
        text = before.text.rsplit("/", 1)[-1].removesuffix(".txt")
        kld, same = after.kld or (0.0, 0.0), after.same_top or (0.0, 0.0)
        lines.append(
            f"| {_cell(text)} | {after.n_tokens:,} | {pair(before.perplexity, 3)} |"
            f" {pair(after.perplexity, 3)} | {pair(kld, 5)} | {after.quantile(0.99):.4f} |"
            f" {100 * same[0]:.2f} % |"
        )
    lines += [
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| file | {size_of(base.file_bytes)} | {size_of(model.file_bytes)} |",
        f"| bits per weight | {base.bits_per_weight:.2f} | {model.bits_per_weight:.2f} |",
        f"| memory ({base.device}) | {size_of(base.memory)} | {size_of(model.memory)} |",
        f"| tokens/s, prompt of {base.n_prompt} | {speed(base.prompt)} | {speed(model.prompt)} |",
        f"| tokens/s, generation | {speed(base.generation)} | {speed(model.generation)} |",
        "",
        "## Types",
        "",
        "| type | tensors | weights | size |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {total.name} | {total.n_tensors} | {total.n_elements:,} | {size_of(total.n_bytes)} |"
        for total in card.summary.types
    ]
    lines += ["", "## How it was made", "", "| | |", "|---|---|"]
    facts = [*card.facts(), ("Made with", f"iqforge {__version__}")]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts]
    lines += [
        "",
        "The importance matrix, the type of every tensor (`*.plan.json`) and all figures"
        " (`figures.json`) are next to the file. The same command makes the same bytes:",
        "",
        "```bash",
        _command(card),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(card: Card) -> list[str]:
    """Return YAML. JSON strings are YAML strings."""
    lines = ["---"]
    if repository := card.source.get("repository"):
        lines += [f"base_model: {json.dumps(repository)}", "base_model_relation: quantized"]
    lines += [f"{key}: {json.dumps(text)}" for key, text in card.license.items()]
    lines += [
        "library_name: gguf",
        "pipeline_tag: text-generation",
        "tags:",
        "- gguf",
        "- imatrix",
        "- iqforge",
    ]
    if card.needs_ik:
        lines.append("- ik_llama.cpp")
    return [*lines, "---", ""]


def _command(card: Card) -> str:
    target, o = card.target, card.options
    source = card.source.get("repository")
    words = ["iqforge", "auto"]
    words += ["--remote", f"{source}@{card.source['commit']}"] if source else [card.source["name"]]
    if target.bpw is not None:
        words += ["--target-bpw", f"{target.bpw:g}"]
    elif target.size is not None:
        words += ["--target-size", str(target.size)]
    else:
        words += ["--fit-gpu", str(target.gpu), "--context", str(target.context)]
    texts = () if tuple(o.texts) == (DEFAULT,) else o.texts
    words += [word for text in texts for word in ("-f", Path(text).name)]
    words += [word for text in o.tests for word in ("--test", Path(text).name)]
    words += ["--target-types", ",".join(o.types)] if o.types else []
    words += ["--damage", Path(o.damage).name] if o.damage else []
    words += [] if o.sensitivity else ["--no-sensitivity"]
    words += ["--model-name", o.name] if o.name else []
    words += ["-c", str(o.n_ctx)] if o.n_ctx != 512 else []
    words += ["--chunks", str(o.chunks)] if o.chunks > 0 else []
    words += ["--test-chunks", str(o.test_chunks)] if o.test_chunks != 20 else []
    return shlex.join(words)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
