"""Conversations: what is evaluated again, how answers end, and the dialogue on a terminal."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import iqforge
import pytest
from iqforge.cli import main
from iqforge.errors import ChatTemplateError, ConfigError, EvaluationError
from iqforge.formats.values import string, u32
from iqforge.runtime.chat.channels import AnswerStream
from iqforge.runtime.chat.conversation_text import conversation_tokens
from iqforge.runtime.chat.session import ChatSession, chat_context
from iqforge.runtime.chat.template import ChatTemplate, named_template
from iqforge.runtime.generate import end_tokens
from iqforge.runtime.sampling.settings import SamplerSettings
from iqforge.runtime.tokenizer.stream import StopText
from iqforge.runtime.weights.hyperparameters import Hyperparameters

from .chat_sessions import answered, assistant, user
from .terminal import Terminal
from .tiny_cases import CASES, SMALL
from .tiny_models import make_tiny_model

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
GREEDY = SamplerSettings(temperature=0)
CHATML = named_template("chatml")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return iqforge.convert_model(DEMO, tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def model(demo):
    with iqforge.load_model(demo) as opened:
        yield opened


def template(text: str = CHATML) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "", "eos_token": ""})


# ---- sessions


def talk(model, form: ChatTemplate, settings: SamplerSettings = GREEDY) -> tuple[list, list[int]]:
    """Three turns in one session, each compared with a new session."""
    session, messages, reused = ChatSession(model, form, settings, context=400), [], []
    for text in ("The function returns a list", "and then?", "why is that so?"):
        messages.append(user(text))
        kept = answered(session, messages)
        alone = answered(ChatSession(model, form, settings, context=400), messages)
        assert kept.text == alone.text
        assert kept.generation.tokens == alone.generation.tokens and alone.reused == 0
        reused.append(kept.reused)
        messages.append(assistant(kept.text))
    # A shorter conversation, and another one.
    for other in (messages[:1], [user("def main")], messages[:3]):
        kept = answered(session, other)
        alone = answered(ChatSession(model, form, settings, context=400), other)
        assert kept.text == alone.text
    return messages, reused


def test_the_cache_is_used_again(model):
    messages, reused = talk(model, template())
    n = [len(ChatSession(model, template(), context=400).tokens(messages[:i])) for i in (1, 3)]
    assert reused[0] == 0 and reused[1] >= n[0] and reused[2] >= n[1]


def test_samplers_know_what_was_in_the_cache(model):
    settings = SamplerSettings(repeat_penalty=1.5, repeat_last_n=-1, dry_multiplier=1.0, seed=4)
    talk(model, template(), settings)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_layers_that_cannot_be_cut_back(name, tmp_path):
    """Windows and recurrent states go back to a snapshot, which the next turn reaches as well."""
    tiny = make_tiny_model(CASES[name], SMALL, tmp_path / name)
    form = template("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with iqforge.load_model(tiny.folder) as model:
        _, reused = talk(model, form)
        assert reused[1] > 0 and reused[2] > reused[1]


def test_a_template_that_rewrites_history(model):
    """What an assistant thought is left out later: only what comes before is used again."""
    form = template(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] if not loop.last or"
        " add_generation_prompt else m.content }}|{% endfor %}"
    )
    session = ChatSession(model, form, GREEDY, context=400)
    first = answered(session, [user("one two three")])
    history = [user("one two three"), assistant(f"x</think>{first.text}"), user("four")]
    again = answered(session, history)
    assert again.text == answered(ChatSession(model, form, GREEDY, context=400), history).text


def test_ends(model, monkeypatch):
    session = ChatSession(model, template(), GREEDY, context=200)
    free = answered(session, [user("The function returns")], 12)
    assert free.reason == "length" and len(free.generation.tokens) == 12
    assert answered(session, [user("The function returns")], 12).text == free.text
    middle = free.text[3:6]
    session.stop = (middle, "never")
    stopped = answered(session, [user("The function returns")], 12)
    assert stopped.reason == "stop" and stopped.text == free.text[: free.text.index(middle)]
    session.stop = ()
    session.end = frozenset({free.generation.tokens[4]})
    ended = answered(session, [user("The function returns")], 12)
    assert ended.reason == "end" and len(ended.generation.tokens) <= 5
    asked = []

    def interrupted() -> bool:
        asked.append(1)
        return len(asked) > 3

    session.end = frozenset()
    cut = answered(session, [user("The function returns")], 12, interrupted=interrupted)
    assert cut.reason == "interrupted" and 0 < len(cut.generation.tokens) < 5
    assert answered(session, [user("The function returns")], 12).text == free.text


@pytest.mark.parametrize(
    "asked, trained, expected",
    [(None, 131072, 8192), (None, 2048, 2048), (0, 131072, 131072), (0, 2048, 2048), (9, 2048, 9)],
)
def test_the_context_of_a_conversation(asked, trained, expected):
    metadata = {"general.architecture": string("llama"), "llama.context_length": u32(trained)}
    assert chat_context(Hyperparameters(metadata, "x.gguf"), asked) == expected


def test_no_context_of_the_model_where_the_file_has_none():
    hyperparameters = Hyperparameters({"general.architecture": string("llama")}, "x.gguf")
    assert chat_context(hyperparameters, None) == 8192
    with pytest.raises(ConfigError, match=r"x.gguf.*llama.context_length"):
        chat_context(hyperparameters, 0)


def test_a_full_context(model):
    session = ChatSession(model, template(), GREEDY, context=40)
    n = len(session.tokens([user("Hi")]))
    record = answered(session, [user("Hi")], -1)
    assert record.reason == "context" and len(record.generation.tokens) == 40 - n
    with pytest.raises(EvaluationError, match="tokens, and the context 40: start over"):
        answered(session, [user("Hi " * 50)])
    assert answered(session, [user("Hi")], -1).text == record.text


def test_a_long_prompt_is_evaluated_in_pieces(model, monkeypatch):
    messages = [user("The function returns a list of numbers " * 4)]
    whole = answered(ChatSession(model, template(), GREEDY, context=400), messages)
    monkeypatch.setattr(model, "ubatch", 7)
    session = ChatSession(model, template(), GREEDY, context=400)
    assert answered(session, messages).text == whole.text
    asked: list[int] = []
    session.clear()
    record = answered(
        session, messages, interrupted=lambda: len(asked) > 2 or bool(asked.append(1))
    )
    assert record.reason == "interrupted" and not record.text
    again = answered(session, messages)
    assert again.text == whole.text and again.reused == 21


def test_system_messages_without_a_place(model):
    form = template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }};{% endfor %}"
    )
    session = ChatSession(model, form, GREEDY, context=100)
    system = {"role": "system", "content": "Be brief."}
    assert session.render([system, user("Hi")]) == "Be brief.\n\nHi;"
    assert session.render([system]) == "Be brief.;"


def test_tools_are_passed_on(model):
    form = template("{{ tools | tojson }}{{ messages | tojson }}{{ mode }}")
    session = ChatSession(model, form, GREEDY, context=400, variables={"mode": "m"})
    messages = [user("x"), {"role": "tool", "content": "5", "tool_call_id": "c1"}]
    text = session.render(messages, tools=[{"name": "f"}])
    assert text == json.dumps([{"name": "f"}]) + json.dumps(messages) + "m"
    with pytest.raises(ChatTemplateError):
        ChatSession(model, template("{{ raise_exception('x') }}"), context=100).render([user("x")])


def test_a_template_without_text_is_an_error(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "special", replace(model.tokenizer.special, add_bos=False))
    with pytest.raises(EvaluationError, match="template makes no text"):
        answered(ChatSession(model, template("{# nothing #}"), context=100), [user("x")])


def test_bos_is_there_once(model):
    special = model.tokenizer.special
    text = model.tokenizer.tokens[special.bos] if special.bos is not None else ""
    tokens = conversation_tokens(model.tokenizer, text + "abc")
    assert tokens.count(special.bos) == bool(text)
    if special.add_bos:
        assert conversation_tokens(model.tokenizer, "abc") == tokens


def test_stop_texts():
    stop = StopText(["END", "\nUser:"])
    assert [stop.feed(piece) for piece in ("a E", "N", "O\nUs", "er", "x\nUser: y", "z")] == [
        "a ",
        "",
        "ENO",
        "",
        "\nUserx",
        "",
    ]
    assert stop.found == "\nUser:" and stop.end() == ""
    stop = StopText(["END"])
    assert stop.feed("abcE") + stop.feed("N") == "abc" and stop.end() == "EN"
    stop = StopText(["b", "abc"])
    assert stop.feed("xabc") == "x" and stop.found == "abc"
    assert StopText([]).feed("all") == "all"


def test_every_end_of_a_turn(model, monkeypatch):
    tokenizer = model.tokenizer
    texts, types = list(tokenizer.tokens), list(tokenizer.types)
    for i, text in enumerate(("<|eot_id|>", "<|im_end|>", "<|end|>", "<turn|>")):
        texts[100 + i], types[100 + i] = text, 3 + i % 2
    texts[110] = "<|end_of_text|>"  # a normal token
    monkeypatch.setattr(tokenizer, "tokens", tuple(texts))
    monkeypatch.setattr(tokenizer, "types", tuple(types))
    assert end_tokens(model) == {model.special_tokens.eos, 100, 101, 102, 103}
    for i, text in enumerate(("<|return|>", "<|call|>")):  # <|end|> is between channels there
        texts[120 + i], types[120 + i] = text, 3
    monkeypatch.setattr(tokenizer, "tokens", tuple(texts))
    monkeypatch.setattr(tokenizer, "types", tuple(types))
    assert end_tokens(model) == {model.special_tokens.eos, 100, 101, 103, 120, 121}


def test_answers_in_channels(model, monkeypatch):
    """What gpt-oss thinks is shown, and is not a part of what it says."""
    tokenizer = model.tokenizer
    texts, types = list(tokenizer.tokens), list(tokenizer.types)
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    for i, text in enumerate(marks):
        texts[100 + i], types[100 + i] = text, 3
    words = tokenizer.encode("analysis", add_special=False)
    final, assistant_role = (tokenizer.encode(x, add_special=False) for x in ("final", "assistant"))
    thought, said = (tokenizer.encode(x, add_special=False) for x in ("hm [x]\nso", "yes"))
    monkeypatch.setattr(tokenizer, "tokens", tuple(texts))
    monkeypatch.setattr(tokenizer, "types", tuple(types))
    channel, message, start, end = 100, 101, 102, 103
    tokens = [channel, *words, message, *thought, end, start, *assistant_role]
    tokens += [channel, *final, message, *said]
    stream = AnswerStream(tokenizer)
    text = "".join(map(stream.feed, tokens)) + stream.end()
    assert text == "[analysis]\nhm [x]\nso\n\n[final]\nyes"
    expected = {"role": "assistant", "content": "yes", "thinking": "hm [x]\nso"}
    assert stream.message(text) == expected
    stream = AnswerStream(tokenizer)  # a template that begins the message
    assert "".join(map(stream.feed, said)) == "yes"
    assert stream.message("yes") == {"role": "assistant", "content": "yes"}
    stream = AnswerStream(tokenizer, special=True)
    assert "[analysis]" not in "".join(map(stream.feed, tokens))


def test_from_python(demo, model):
    messages = [user("The function returns")]
    form = {"chat_template": "chatml", "temperature": 0}
    text = "".join(iqforge.chat(demo, messages, 8, **form))
    assert text == answered(ChatSession(model, template(), GREEDY), messages).text
    kept = iqforge.open_chat(model, **form)
    assert ["".join(kept.answer(messages, 8)) for _ in range(2)] == [text] * 2
    with_system = [{"role": "system", "content": "You are"}, *messages]
    found = "".join(iqforge.chat(model, messages, 8, system="You are", **form))
    assert found == answered(ChatSession(model, template(), GREEDY), with_system).text


# ---- the command


def run(demo, capsys, monkeypatch, lines: str, *words: str) -> tuple[int, str, str]:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    command = words or ("chat",)
    status = main(
        [*command, "--device", "cpu", "-m", str(demo), "--chat-template", "chatml", "--temp", "0"]
    )
    return status, *capsys.readouterr()


def test_a_dialogue_from_a_pipe(demo, model, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "saved.json"
    lines = f"one \\\ntwo\n/regen\n/save {saved}\n/nothing\n/clear\nthree\n/help\n/exit\nfour\n"
    lines = f"/save {demo}\n/save {tmp_path / 'system.txt'}\n{lines}"  # these stay as they are
    (tmp_path / "system.txt").write_text("Be\n")
    words = ("chat", "-n", "6", "-sysf", str(tmp_path / "system.txt"))
    status, out, err = run(demo, capsys, monkeypatch, lines, *words)
    system = {"role": "system", "content": "Be"}
    session = ChatSession(model, template(), GREEDY)
    first = answered(session, [system, user("one \ntwo")], 6).text
    third = answered(session, [system, user("three")], 6).text
    assert (
        status == 0 and out.startswith(f"{first}\n{first}\n{third}\n  /help") and "four" not in out
    )
    assert err.count("same file") == 2 and (tmp_path / "system.txt").read_text() == "Be\n"
    assert "the temperature is 0" in err and "'/nothing' is not a command" in err
    assert json.loads(saved.read_text()) == [system, user("one \ntwo"), assistant(first)]
    words = ("generate", "-cnv", "-n", "6", "--messages", str(saved))
    _, out, _ = run(demo, capsys, monkeypatch, "more\n", *words)
    messages = [system, user("one \ntwo"), assistant(first), user("more")]
    assert out == answered(session, messages, 6).text + "\n"


def test_single_turns(demo, capsys, monkeypatch, tmp_path):
    _, one, _ = run(demo, capsys, monkeypatch, "", "chat", "-n", "4", "-st", "-p", "a\\nb")
    _, two, _ = run(demo, capsys, monkeypatch, "a\\\nb\nignored\n", "chat", "-n", "4", "-st")
    (tmp_path / "prompt.txt").write_text("a\nb\n")
    file = str(tmp_path / "prompt.txt")
    _, three, _ = run(demo, capsys, monkeypatch, "", "chat", "-n", "4", "-st", "-f", file)
    quoted = '"""a\nb"""\n'
    _, four, _ = run(demo, capsys, monkeypatch, quoted, "chat", "-n", "4")
    _, five, _ = run(demo, capsys, monkeypatch, "a\nb\\\n", "chat", "-n", "4", "-mli")
    assert one == two == three == four == five and one.count("\n") >= 1


def test_a_single_turn_without_an_answer_is_a_failure(demo, capsys, monkeypatch):
    """A conversation goes on: there a later message may fit."""
    words = ["chat", "-n", "4", "-p", "one two three", "-c", "2"]
    for extra, expected in ((["-st"], 1), ([], 0)):
        status, out, err = run(demo, capsys, monkeypatch, "", *words, *extra)
        assert status == expected and "error: the conversation has" in err and not out.strip("> \n")
    assert run(demo, capsys, monkeypatch, "", "chat", "-n", "4", "-p", "one", "-st")[0] == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["chat", "-p", "a", "-f", "b"], "-p and -f give a prompt: only one of them can"),
        (["chat", "--tools", "/nonexistent"], "no such file"),
        (["chat", "-sysf", "/nonexistent"], "no such text file"),
        (["chat", "-sys", "a", "-sysf", "b"], "only one of -sys TEXT and -sysf FILE"),
        (["chat", "--chat-template-kwargs", "[1]"], "expected a JSON object"),
        (["chat", "--chat-template-kwargs", "[" * 5000], "nested too deeply"),
        (["generate", "-p", "a", "-st"], "-st is for conversations"),
        (["generate", "-p", "a", "-sysf", "b"], "-sysf is for conversations"),
        (["generate", "-cnv", "--prompt-cache-all"], "--prompt-cache-all does not go together"),
    ],
)
def test_command_refuses(demo, capsys, monkeypatch, words, message):
    if "generate" in words:
        status = main([*words, "--device", "cpu", "-m", str(demo)])
        _, err = capsys.readouterr()
    else:
        status, _, err = run(demo, capsys, monkeypatch, "", *words)
    assert status == 1 and message in err


def test_a_model_without_a_template(demo, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(["chat", "--device", "cpu", "-m", str(demo), "-n", "2"]) == 0
    assert "no chat template; using chatml" in capsys.readouterr().err


READY = r"tokens/s\]\s+> "  # the timings of an answer, and the next prompt


def test_a_dialogue_on_a_terminal(demo, model):
    one = Terminal(
        *("chat", "-m", str(demo), "--device", "cpu", "--chat-template", "chatml", "-v"),
        *("--temp", "0", "--ignore-eos", "-c", "100000", "-n", "6"),
    )
    try:
        one.until("Ctrl-D ends.*> ")
        session = ChatSession(model, template(), GREEDY, ignore_eos=True)
        one.type("Hello\n")
        text = answered(session, [user("Hello")], 6).text
        assert text.replace("\n", "\r\n") in one.until(READY)
        one.type("a \\\n")
        one.until(r"\\\s+\. ")
        one.type("b\n")
        one.until(READY)
        one.wait_until_it_reads()  # Python may not see Ctrl-C between its prompt and its first read
        one.type("half a line\x03")
        one.until("Ctrl-C again[^>]*> ")
        for half_typed in ("more", "a \\\n"):  # neither ends the conversation
            one.type(half_typed)
            one.until(r"more|\. ")
            one.wait_until_it_reads()
            one.type("\x03")
            one.until("Ctrl-C again[^>]*> ")
        one.type("/clear\n")
        one.until("> ")
        one.type("Hello\n")
        assert text.replace("\n", "\r\n") in one.until(READY)
        for _ in range(2):
            one.wait_until_it_reads()
            one.type("\x03")
        assert one.process.wait(240) == 130
    finally:
        one.close()


def test_ctrl_c_stops_the_answer_only(demo):
    one = Terminal(
        *("chat", "-m", str(demo), "--device", "cpu", "--chat-template", "chatml"),
        *("--ignore-eos", "-c", "200000", "-s", "3"),
    )
    try:
        one.until("> ")
        one.type("Count without end\n")
        one.until("end\r\n.{40}")
        os.kill(one.process.pid, signal.SIGINT)
        one.until(r"\[interrupted\]\s+> ")
        one.type("Again\n")
        one.until("Again\r\n.{40}")
        one.type("\x03")
        one.until(r"\[interrupted\]\s+> ")
        one.type("/exit\n")
        assert one.process.wait(240) == 0
    finally:
        one.close()
