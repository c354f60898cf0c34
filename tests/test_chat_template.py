"""Chat templates: the same text as transformers renders, and errors instead of harm from hostile
ones.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from iqforge.errors import ChatTemplateError, NotFoundError, UsageError
from iqforge.formats.values import ValueType, array, string, u32
from iqforge.runtime.chat import sandbox
from iqforge.runtime.chat.template import (
    ChatTemplate,
    named_template,
    special_texts,
    template_names,
)

from .shared import ROOT

USER = [{"role": "user", "content": "Hi"}]


def _script():
    path = ROOT / "benchmarks" / "chat_templates.py"
    spec = importlib.util.spec_from_file_location("chat_templates", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
# What templates of well-known models use, put together in ways that the included ones do not:
# macros, loop controls, slices, recursion through JSON, dates, whitespace control, generation.
WRITTEN = {
    "tools as json": """{%- if tools %}{{ '<tools>\\n' }}{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}{{ '\\n</tools>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
{{ '<call>' + call.function.name + ' ' + (call.function.arguments | tojson(indent=2)) + '</call>' }}
        {%- endfor %}
    {%- else %}
{{ message['role'] + ': ' + (message['content'] if message['content'] is string else
   message['content'][0]['text']) }}
    {%- endif %}
{%- endfor %}""",
    "macro and namespace": """{%- macro part(kind, text='') -%}
<|{{ kind }}|>{{ text }}{%- endmacro %}
{%- set ns = namespace(last=-1, thinks=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.thinks and message.role == 'user' %}{% set ns.thinks = false %}
    {%- set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{{- part(message.role, message.content | string | trim) }}
{%- if loop.index0 > ns.last and message.reasoning_content is defined %}({{ message.thinking }})
{%- endif %}
{%- endfor %}""",
    "loop controls": """{% for message in messages %}{% if message.role == 'system' %}{% continue %}
{% endif %}{{ message.role }};{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}
{{- bos_token }}{{ undefined_name }}{{ pad_token }}""",
    "generation": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "refuses": """{% if messages[0].role == 'system' %}
{{ raise_exception('no system') }}{% endif %}
{{ documents | length if documents else 'none' }}{{ messages[-1].content }}""",
    "text methods": """{% for m in messages %}
{% set text = m.content if m.content is string else '' %}
{{ text.split('</think>')[-1].lstrip('\\n') }}{{ text.startswith('<') }}
{{ m.items() | list | length }}
{% endfor %}{{ dict(a=1) | tojson }}{{ "%05.1f" | format(3.14159) }}{{ strftime_now('%Y') }}""",
}


@pytest.mark.parametrize("name", template_names())
def test_included_templates(name):
    check(named_template(name))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_templates_use(name):
    check(WRITTEN[name])


def check(text: str) -> None:
    rendered = 0
    for name, conversation in SCRIPT.CONVERSATIONS.items():
        expected = SCRIPT.rendered_by_transformers(text, conversation)
        assert SCRIPT.rendered_here(text, conversation) == expected, name
        rendered += expected is not None
    assert rendered > 5


def test_known_texts():
    """Formats as their models document them."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    expected = {
        "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] 1 </s>"
        "<s>[INST] Two? [/INST]",
        "mistral-v3": "<s>[INST] Be brief.\n\nOne?[/INST] 1</s>[INST] Two?[/INST]",
        "mistral-v7": "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] One?[/INST] 1</s>"
        "[INST] Two?[/INST]",
        "gemma": "<s><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n"
        "<start_of_turn>model\n1<end_of_turn>\n<start_of_turn>user\nTwo?<end_of_turn>\n"
        "<start_of_turn>model\n",
        "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>One?"
        "<|im_end|><|im_start|>assistant<|im_sep|>1<|im_end|><|im_start|>user<|im_sep|>Two?"
        "<|im_end|><|im_start|>assistant<|im_sep|>",
        "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nOne?</s>\n<|assistant|>\n1</s>\n"
        "<|user|>\nTwo?</s>\n<|assistant|>\n",
    }
    for name, text in expected.items():
        template = ChatTemplate(named_template(name), SCRIPT.SPECIAL)
        assert template.render(messages) == text, name


LOOP = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(_x=1) %}", "not a name"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ raise_exception('two\\x1b[31m words') }}", r"two\\x1b\[31m words"),
        ("{{ messages[7].content }}", "messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ lipsum(n=99) }}", "lipsum"),
        ("{{ 9**(9**9) }}", "too large"),
        ("{{ 'a' * 99999999999 }}", "too large"),
        ("{{ 99999999999 * [1] }}", "too large"),
        ("{{ 'a'.ljust(99999999999) }}", "too large"),
        ("{{ 'a' | center(99999999999) }}", "too large"),
        (f"{LOOP}{{% set n.s = n.s + n.s %}}{{% endfor %}}", "too large"),
        (f"{LOOP}{{% set n.s = n.s ~ n.s %}}{{% endfor %}}", "too large"),
        (
            f"{LOOP}{{% set n.s %}}{{{{ n.s }}}}{{{{ n.s }}}}{{% endset %}}{{% endfor %}}",
            "too large",
        ),
    ],
)
def test_hostile_templates(text, problem):
    with pytest.raises(ChatTemplateError, match=problem) as raised:
        ChatTemplate(text, name="x").render(USER)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop([a, a]) if loop.depth < 40 }}{% endfor %}",
    ],
)
def test_templates_end(text, monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_STEPS", 20_000)
    template = ChatTemplate(text + "{{ messages[0].content }}")
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="more than 20,000 steps"):
            template.render(USER)


def test_steps_are_counted_for_every_text(monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_STEPS", 150)
    template = ChatTemplate("{% for a in range(90) %}{{ a if loop.last }}{% endfor %}")
    assert [template.render(USER) for _ in range(3)] == ["89"] * 3


def test_a_template_that_is_no_jinja():
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("\n{% if %}")


class Sneaky(dict):
    def write(self):
        raise AssertionError("a method of a caller's object was called")


def test_messages_are_plain_data():
    template = ChatTemplate("{{ messages[0].write is defined }}")
    assert template.render([Sneaky(role="user", content="x")]) == "False"
    with pytest.raises(UsageError, match="expected JSON data"):
        template.render([{"role": "user", "content": object()}])


TOKENS = ["<unk>", "<s>", "</s>", "<pad>", "a"]
METADATA = {
    "tokenizer.ggml.model": string("gpt2"),
    "tokenizer.ggml.tokens": array(ValueType.STRING, TOKENS),
    "tokenizer.ggml.bos_token_id": u32(1),
    "tokenizer.ggml.eos_token_id": u32(2),
    "tokenizer.ggml.padding_token_id": u32(3),
    "tokenizer.chat_template": string("T{{ bos_token }}{{ messages[0].content }}"),
    "tokenizer.chat_template.tool_use": string("U{{ eos_token }}"),
}


def test_the_template_of_a_file(tmp_path: Path):
    def rendered(chosen: str | None = None) -> str:
        template = ChatTemplate.of_model(METADATA, chosen)
        assert template is not None
        return template.render(USER)

    assert special_texts(METADATA) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    assert rendered() == "T<s>Hi"
    assert rendered("tool_use") == "U</s>"
    assert rendered("zephyr") == "<|user|>\nHi</s>\n<|assistant|>\n"
    assert rendered("{{ bos_token }}!") == "<s>!"
    (tmp_path / "own.jinja").write_text("F{{ messages[0].content }}", encoding="utf-8")
    assert rendered(str(tmp_path / "own.jinja")) == "FHi"
    without = {key: value for key, value in METADATA.items() if "chat_template" not in key}
    assert ChatTemplate.of_model(without) is None
    with pytest.raises(UsageError, match="did you mean 'zephyr'"):
        rendered("zephir")
    with pytest.raises(NotFoundError):
        rendered(str(tmp_path / "none.jinja"))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="not UTF-8"):
        rendered(str(tmp_path / "bytes.jinja"))


def test_templates_that_drop_or_refuse_a_system_message():
    keeps = {name: ChatTemplate(named_template(name)).keeps_system for name in template_names()}
    assert all(keeps.values()), keeps
    assert not ChatTemplate("{{ messages[-1].content }}").keeps_system
    assert not ChatTemplate(WRITTEN["refuses"]).keeps_system
