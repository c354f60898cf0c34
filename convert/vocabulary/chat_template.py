"""Chat templates of a checkpoint: `tokenizer.chat_template` and, for several,
`tokenizer.chat_templates`.
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import TokenizerError
from ...formats.values import Value, ValueType, array, string
from ..checkpoint.folder import Checkpoint


def chat_template_metadata(
    checkpoint: Checkpoint, tokenizer_config: dict[str, Any]
) -> dict[str, Value]:
    """Return the template of tokenizer_config.json, else of chat_template.jinja or
    chat_template.json. Several are stored by name, `default` last.
    """
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _from_files(checkpoint)
    if template is None:
        return {}
    if isinstance(template, str):
        return {"tokenizer.chat_template": string(template)}
    named = _by_name(checkpoint, template)
    default = named.pop("default", None)
    keys = {f"tokenizer.chat_template.{name}": string(text) for name, text in named.items()}
    if named:
        keys["tokenizer.chat_templates"] = array(ValueType.STRING, list(named))
    if default is not None:
        keys["tokenizer.chat_template"] = string(default)
    return keys


def _from_files(checkpoint: Checkpoint) -> Any:
    template = checkpoint.text("chat_template.jinja")
    if template is None:
        template = (checkpoint.json("chat_template.json") or {}).get("chat_template")
    folder = checkpoint.path / "additional_chat_templates"
    if template is None or not folder.is_dir():
        return template
    others = sorted(path.name for path in folder.glob("*.jinja"))
    return [
        {"name": "default", "template": template},
        *(
            {
                "name": name.removesuffix(".jinja"),
                "template": checkpoint.text(f"{folder.name}/{name}"),
            }
            for name in others
        ),
    ]


def _by_name(checkpoint: Checkpoint, templates: Any) -> dict[str, str]:
    named = {}
    for entry in templates if isinstance(templates, list) else [templates]:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not isinstance(entry.get("template"), str)
        ):
            raise TokenizerError(
                "'chat_template' is neither a text nor a list of named texts",
                file=checkpoint.path / "tokenizer_config.json",
            )
        named[re.sub(r"[^A-Za-z0-9]", "_", entry["name"])] = entry["template"]
    return named
