"""Generation: streams of characters, and the command on the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import EvaluationError, ShapeError
from iqforge.runtime.commands.prompt_flags import unescape
from iqforge.runtime.generate import (
    Generation,
    end_tokens,
    generate_tokens,
    prompt_tokens,
)
from iqforge.runtime.network.sampling import GREEDY
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.tokenizer import TextStream, TokenType

DEMO = Path(iqforge.__file__).parent / "demo" / "model"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return iqforge.convert_model(DEMO, tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def model(demo):
    with iqforge.load_model(demo) as opened:
        yield opened


# ---- text


def test_characters_come_whole(model):
    text = "größer als 🙂 日本"
    stream, tokenizer = TextStream(model.tokenizer), model.tokenizer
    single = {
        tokenizer.token_bytes(i): i
        for i in range(tokenizer.n_tokens)
        if tokenizer.types[i] == TokenType.NORMAL
    }
    pieces = [stream.feed(single[bytes([byte])]) for byte in text.encode()]  # one byte at a time
    assert "".join(pieces) == text and stream.end() == "" and "�" not in "".join(pieces)
    assert stream.feed(single[b"\xf0"]) == "" and stream.end() == "�"


def test_control_tokens_are_shown_on_demand(model):
    eos = model.special_tokens.eos
    assert TextStream(model.tokenizer).feed(eos) == ""
    assert TextStream(model.tokenizer, special=True).feed(eos) == model.tokenizer.tokens[eos]
    assert eos in end_tokens(model)


def test_prompts(model):
    special = model.tokenizer.special
    text = prompt_tokens(model.tokenizer, "one two")
    assert (text[0] == special.bos) == special.add_bos
    name = model.tokenizer.tokens[special.eos]
    assert special.eos in prompt_tokens(model.tokenizer, f"one {name} two")


def test_escapes():
    assert unescape(r"a\nb\t\"c\" \\n \x41 \q") == 'a\nb\t"c" \\n A \\q'
    assert unescape(r"é\xe6\x97\xa5") == "é日"


# ---- generation


def test_tokens_are_those_of_whole_passes(model):
    """Each greedy token is the best of a pass over everything before it."""
    prompt = prompt_tokens(model.tokenizer, "The function returns")
    tokens = list(generate_tokens(model, prompt, 12, settings=CacheSettings("f32", "f32")))
    for n in (0, 5, 11):
        assert tokens[n] == int(model.forward(prompt + tokens[:n])[-1].argmax())
    assert list(generate_tokens(model, prompt, 12, settings=CacheSettings("f32", "f32"))) == tokens


def test_end_and_limits(model):
    prompt = prompt_tokens(model.tokenizer, "The function returns")
    free = list(generate_tokens(model, prompt, 20))
    record = Generation(len(prompt))
    ended = list(generate_tokens(model, prompt, 20, end=frozenset({free[6]}), record=record))
    assert (
        ended == free[: free.index(free[6]) + 1]
        and record.ended
        and record.tokens == ended
        and record.prompt_seconds > 0
    )
    assert len(list(generate_tokens(model, prompt, -1, context=len(prompt) + 3))) == 3
    assert len(list(generate_tokens(model, prompt, None, context=len(prompt) + 2))) == 2
    with pytest.raises(EvaluationError, match="and 3 more do not fit the .* at most 2 can be"):
        list(generate_tokens(model, prompt, 3, context=len(prompt) + 2))
    assert list(generate_tokens(model, prompt, 0)) == []
    with pytest.raises(
        EvaluationError, match=f"the prompt has {len(prompt)} tokens, more than the context of 2"
    ):
        list(generate_tokens(model, prompt, 5, context=2))


def test_the_first_token_to_follow_is_checked(model, monkeypatch):
    """It is checked on every path, as steps on a device look up rows of the embedding without
    checks.
    """
    fast = SimpleNamespace(steps=SimpleNamespace(follow=lambda *arguments: iter([1])))
    for engine in (None, fast):
        monkeypatch.setattr(type(model), "_fast", engine)
        for token in (-1, model.n_vocab):
            with pytest.raises(ShapeError, match=f"token id {token} is outside the vocabulary"):
                list(model.follow(token, model.new_state(8), 1, GREEDY))
        assert len(list(model.follow(0, model.new_state(8), 1, GREEDY))) == 1


def test_from_python(demo, model):
    pieces = list(iqforge.generate(demo, "The function returns", 10, temperature=0))
    assert len(pieces) > 3 and "".join(pieces) == "".join(
        iqforge.generate(model, "The function returns", 10, temperature=0)
    )
    tokens = prompt_tokens(model.tokenizer, "The function returns")
    assert "".join(iqforge.generate(model, tokens, 10, temperature=0)) == "".join(pieces)


# ---- the command


def run(demo, capsys, *words) -> tuple[int, str, str]:
    status = main(["generate", "--device", "cpu", "-m", str(demo), *words])
    return status, *capsys.readouterr()


def test_command(demo, model, capsys):
    status, out, err = run(demo, capsys, "-p", "The function returns", "-n", "10", "--temp", "0")
    assert status == 0
    assert (
        out
        == "The function returns"
        + "".join(iqforge.generate(model, "The function returns", 10, temperature=0))
        + "\n"
    )
    assert (
        "prompt: 4 tokens in" in err
        and "generated: 10 tokens, 9 of them in" in err
        and err.count("tokens/s") == 2
    )
    for words in (
        ["-p", "The function returns", "-n", "10", "--temp", "0", "--no-display-prompt"],
        [
            "-p",
            "The function returns",
            "-n",
            "10",
            "--temp",
            "0",
            "--no-display-prompt",
            "-ub",
            "2",
            "-t",
            "1",
            "-c",
            "64",
        ],
    ):
        assert run(demo, capsys, *words)[1] == out.removeprefix("The function returns")


def test_a_text_beyond_the_context_of_the_model(demo, model, capsys, caplog):
    """A text longer than those of the training gives a warning. Memory is allocated for the
    requested size.
    """
    trained = model.hyperparameters.integer("context_length")
    prompt = [1] * (trained - 2)
    assert len(list(generate_tokens(model, prompt, 2))) == 2 and not caplog.records
    assert len(list(generate_tokens(model, prompt, 3))) == 3
    assert f"trained for a context of {trained} tokens, and {trained + 1} are" in caplog.text
    words = ["-p", "The", "-c", "8"]
    status, out, err = run(demo, capsys, *words, "-n", "100")
    assert status == 1 and not out and "100 more do not fit the context of 8" in err
    assert run(demo, capsys, *words)[0] == run(demo, capsys, *words, "-n", "-1")[0] == 0


def test_a_sequence_takes_no_more_than_was_allocated(model):
    state = model.new_state(8)
    model.extend([1] * (state.capacity - 3), state)
    with pytest.raises(
        ShapeError, match=f"4 more do not fit a sequence of at most {state.capacity}"
    ):
        list(model.follow(1, state, 4, GREEDY))
    assert len(list(model.follow(1, state, 3, GREEDY))) == 3


def test_a_temperature_below_zero_is_refused(demo, capsys):
    status, out, err = run(demo, capsys, "-p", "The", "--temp", "-1")
    assert status == 1 and not out and "--temp is -1.0, expected 0 or more" in err


def test_command_reports_flags_without_effect_once(demo, capsys):
    err = run(demo, capsys, "-p", "The", "-n", "1", "-amb", "3", "-ctv", "q8_0")[2]
    assert err.count("note: -amb changes nothing") == 1
    assert "generated: 1 token\n" in err  # the first one is the prompt's result, and has no speed


def test_command_samples_by_its_seed(demo, capsys):
    texts = [run(demo, capsys, "-p", "The", "-n", "16", "-s", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert "seed: " in run(demo, capsys, "-p", "The", "-n", "2", "-s", "-1")[2]
    cold = [
        run(demo, capsys, "-p", "The", "-n", "8", *words)[1]
        for words in (["--temp", "0"], ["--top-k", "1"], ["--top-p", "1e-9"])
    ]
    assert cold[0] == cold[1] == cold[2]


def test_command_with_files_and_caches(monkeypatch, demo, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("The function\n")
    out = run(demo, capsys, "-f", str(tmp_path / "prompt.txt"), "-n", "4", "--temp", "0")[1]
    assert out == run(demo, capsys, "-p", "The function", "-n", "4", "--temp", "0")[1]
    # A pipe can be read once.
    read, write = os.pipe()
    os.write(write, b"The function\n")
    os.close(write)
    assert out == run(demo, capsys, "-f", f"/dev/fd/{read}", "-n", "4", "--temp", "0")[1]
    os.close(read)
    status, _, err = run(
        demo,
        capsys,
        "-p",
        "The function",
        "-n",
        "4",
        "-ctk",
        "q8_0",
        "-ctv",
        "q6_0",
        "-khad",
        "-vhad",
    )
    assert status == 0 and "note" not in err
    status, _, err = run(demo, capsys, "-p", "The function", "-n", "4", "-khad")
    assert status == 0 and "-khad changes nothing here: the cache is not quantized" in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    err = run(
        demo,
        capsys,
        "-p",
        "The function",
        "-n",
        "2",
        "--device",
        "auto",
        "-ts",
        "3,1",
        "--mlock",
    )[2]
    assert "device: cpu (there is no GPU)" in err
    assert "note: -ts changes nothing here: everything is on the CPU" in err
    assert "note: --mlock changes nothing here: " in err
    err = run(
        demo, capsys, "-p", "The function", "-n", "2", "-ot", "x=CPU", "-ser", "1,0.5", "-muge"
    )[2]
    reasons = {
        "-ot": "everything is on the CPU",
        "-ser": "the model has no experts",
        "-muge": "the model has no experts",
    }
    assert all(f"{flag} changes nothing here: {why}" in err for flag, why in reasons.items())


def test_stop_texts_have_escapes(demo, capsys):
    words = ["-p", "The function", "-n", "4", "--temp", "0", "--no-display-prompt"]
    whole = run(demo, capsys, *words)[1].removesuffix("\n")
    stop = "".join(f"\\x{byte:02x}" for byte in whole[2:4].encode())
    before = whole[: whole.index(whole[2:4])]
    assert run(demo, capsys, *words, "-r", stop)[1] == before + "\n"
    assert run(demo, capsys, *words, "-r", stop, "--no-escape")[1] == whole + "\n"


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "-p PROMPT or -f FILE"),
        (["-p", "a", "-f", "b"], "-p and -f give a prompt: only one of them can"),
        (["-f", "a", "-bf", "b"], "-f and -bf give a prompt: only one of them can"),
        (["-p", "a", "--top-p", "2"], "--top-p is 2.0"),
        (["-p", "a", "-ctk", "q3_k"], "q3_k"),
        (["-p", "a", "-ctv", "q8_0", "-fa", "off"], "flash attention"),
        (["-p", "a", "-fa", "maybe"], "maybe"),
        (["-p", "a", "-mla", "4"], "-mla is 4, expected 0 to 3"),
        (["-p", "a", "--dsa", "maybe"], "-dsa is 'maybe'"),
        (["-p", "a", "-ser", "x"], "-ser is 'x'"),
        (["-p", "a", "--precision", "bf16"], "bf16 is not for cpu, where it can be f32 or int8"),
        (["-p", "a", "-ub", "0"], "-ub is 0"),
        (["-p", "a", "-c", "1"], "more than the context of 1"),
        (["-f", "/nonexistent"], "no such text file"),
        (["-p", "a", "-amb", "-1"], "-amb is -1"),
        (["-p", "a", "-ot", "attn"], "is not REGEX=CPU"),
        (["-p", "a", "-ot", "attn=CUDA0"], "--device is cpu"),
        (["-p", "a", "--fit", "-ngl", "3"], "does not go together"),
        (["-p", "a", "--fit", "-3"], "--fit is -3 MiB"),
        (["-p", "a", "-c", "-5"], "-c is -5"),
        (["-p", "a", "-l", "99999+1"], "logit bias of token 99999"),
        (["-p", "a", "-ub", "9" * 20], "at most"),
        (["-p", "a\\xff"], "not UTF-8 at byte 1"),
        (["-p", "a", "-r", ""], "a text to stop at (stop, -r) is empty"),
        (["-p", "a", "--device", "gpu"], "cpu, cuda, cuda:N or auto"),
        (["-p", "a", "-sm", "layer", "-mg", "-1"], "-mg is -1"),
    ],
)
def test_command_refuses(demo, capsys, words, message):
    status, out, err = run(demo, capsys, "-n", "2", *words)
    assert status == 1 and message in err and not out
    assert "change nothing" not in err and "changes nothing" not in err


def test_the_last_line_break_of_a_file(demo, tmp_path, capsys):
    (tmp_path / "p").write_text("One\n")
    ended, kept = (
        run(demo, capsys, flag, str(tmp_path / "p"), "-n", "1", "--temp", "0")
        for flag in ("-f", "-bf")
    )
    assert ended[0] == kept[0] == 0
    assert kept[1].startswith("One\n") and not ended[1].startswith("One\n")
    asked = run(demo, capsys, "-p", "", "-n", "1", "--temp", "0")[2]
    assert "prompt: 1 token in" in asked and "generated: 1 token" in asked


def test_a_context_beyond_the_memory_is_an_error_with_the_numbers(demo, capsys):
    status, _, err = run(demo, capsys, "-p", "a", "-n", "2", "-c", "9" * 14)
    assert (
        status == 1 and "a context of 100000000000000 tokens takes" in err and "MiB, cpu has" in err
    )


def test_a_reader_that_goes_away(demo):
    done = subprocess.run(
        [
            "bash",
            "-o",
            "pipefail",
            "-c",
            f"{sys.executable} -m iqforge generate -m {demo} -p The -n 20 | head -c 3",
        ],
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
