"""Render chat templates as transformers and as iqforge do, and compare the texts.

    python benchmarks/chat_templates.py FOLDER [FOLDER ...]

Every *.jinja file of the folders is rendered with several conversations: with and without a system
message, several turns, reasoning, tools and their results, documents. A conversation that
transformers refuses must be refused here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from iqforge.errors import IqforgeError
from iqforge.runtime.chat.template import ChatTemplate

SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
USER = {
    "role": "user",
    "content": "What is the weather in Paris, \"today\" <now>?\nAnd 'tomorrow'?",
}
SYSTEM = {"role": "system", "content": "You are terse.  "}
ANSWER = {"role": "assistant", "content": " It rains. "}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look up the weather & more",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "where", "enum": ["Paris", "Köln"]},
                "days": {"type": ["integer", "null"]},
            },
            "required": ["place"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"t": 3}'}
THOUGHT = {"role": "assistant", "content": "Sun.", "reasoning_content": "Think\nhard."}
TAGGED = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSun."}
DOCUMENT = {"title": "Almanac", "text": "It often rains.", "content": "It often rains."}

CONVERSATIONS = {
    "one turn": {"messages": [USER]},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, USER]},
    "three turns": {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER, USER]},
    "without system": {"messages": [USER, ANSWER, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "a call": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "after a call": {"messages": [SYSTEM, USER, CALL, RESULT, ANSWER, USER], "tools": [TOOL]},
    "reasoning": {"messages": [USER, THOUGHT, USER]},
    "tagged reasoning": {"messages": [USER, TAGGED, USER]},
    "no thinking": {"messages": [USER], "enable_thinking": False},
    "documents": {"messages": [USER], "documents": [DOCUMENT]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "two user turns": {"messages": [USER, USER]},
}


def rendered_by_transformers(text: str, conversation: dict) -> str | None:
    """Return the text, or None if the template refuses the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given: dict[str, Any] = {"add_generation_prompt": True, **conversation, **SPECIAL}
    messages = given.pop("messages")
    try:
        [result], _ = render_jinja_template([messages], chat_template=text, **given)
    except Exception:
        return None
    return result


def rendered_here(text: str, conversation: dict) -> str | None:
    """Return the text of a conversation (`messages` and other variables) by template `text`, or
    None where iqforge refuses it.
    """
    given = dict(conversation)
    try:
        return ChatTemplate(text, SPECIAL).render(given.pop("messages"), **given)
    except IqforgeError:
        return None


def main() -> int:
    """Compare every *.jinja file of the folders. Print the differences and how many texts were
    compared.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    files = [file for folder in parser.parse_args().folders for file in folder.rglob("*.jinja")]
    different = texts = refused = 0
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        for name, conversation in CONVERSATIONS.items():
            expected = rendered_by_transformers(text, conversation)
            texts, refused = texts + (expected is not None), refused + (expected is None)
            if rendered_here(text, conversation) != expected:
                different += 1
                print(f"{file}: {name} differs")
    print(
        f"{len(files)} templates, {texts} conversations rendered, {refused} refused by both,"
        f" {different} different"
    )
    return different > 0


if __name__ == "__main__":
    sys.exit(main())
