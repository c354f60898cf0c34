"""States of prompts in files: the same text as without, and errors for files that do not belong."""

from __future__ import annotations

from pathlib import Path

import iqforge
import pytest
from iqforge.cli import main
from iqforge.errors import IqforgeError, MalformedFileError, NotFoundError, TruncatedFileError
from iqforge.runtime.generate import Generation
from iqforge.runtime.state.saved import SavedSequence, fingerprint

from .tiny_cases import CASES, SMALL
from .tiny_models import make_tiny_model

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
PROMPT = "The function returns a list of numbers, and"


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5",
        "gemma3",
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("deepseek_v2", marks=pytest.mark.full),
    ],
)
def folder(request, tmp_path_factory):
    return make_tiny_model(CASES[request.param], SMALL, tmp_path_factory.mktemp("tiny")).folder


def generated(model, prompt, n: int = 8, **options) -> tuple[str, Generation]:
    record = Generation(0)
    text = "".join(
        iqforge.generate(model, prompt, n, temperature=0, ignore_eos=True, record=record, **options)
    )
    return text, record


def test_every_kind_of_layer(folder, tmp_path):
    """Caches, windows, recurrent states and latent rows come back in another process' model."""
    file, tokens = tmp_path / "cache", list(range(30, 80))
    with iqforge.load_model(folder) as model:
        expected, _ = generated(model, tokens)
        first, record = generated(model, tokens, prompt_cache=file)
        assert first == expected and record.reused == 0
    with iqforge.load_model(folder) as model:
        again, record = generated(model, tokens, prompt_cache=file)
        assert again == expected and record.reused == len(tokens) - 1
        assert 0 < record.file_seconds < record.prompt_seconds  # one token was evaluated
        evaluating = record.prompt_seconds - record.file_seconds
        assert record.prompt_per_second == pytest.approx(1 / evaluating)
        # A longer prompt in a larger context.
        longer = [*tokens, *range(100, 130)]
        text, record = generated(model, longer, 20, prompt_cache=file, prompt_cache_ro=True)
        assert text == generated(model, longer, 20)[0] and record.reused == len(tokens) - 1
        # Another one.
        other = [*tokens[:20], 3, 4, 5]
        text, record = generated(model, other, prompt_cache=file, prompt_cache_ro=True)
        assert text == generated(model, other)[0]
        cut = model.new_state(100).can_be_cut
        assert record.reused == (20 if cut else 0)


def test_the_generated_text_too(tmp_path):
    file = tmp_path / "cache"
    with iqforge.load_model(DEMO) as model:
        text, record = generated(model, PROMPT, prompt_cache=file, prompt_cache_all=True)
        tokens = model.tokenizer.encode(PROMPT)
        assert SavedSequence(file).tokens == [*tokens, *record.tokens[:-1]]
        longer = [*tokens, *record.tokens, 50]
        again, later = generated(model, longer, prompt_cache=file, prompt_cache_ro=True)
        assert later.reused == len(longer) - 2 and again == generated(model, longer)[0]
        assert text


@pytest.mark.parametrize("types", [{"cache_type_k": "q8_0", "cache_type_v": "bf16"}, {}])
def test_types_of_the_cache(tmp_path, types):
    file = tmp_path / "cache"
    with iqforge.load_model(DEMO, **types) as model:
        expected, _ = generated(model, PROMPT, prompt_cache=file)
        again, record = generated(model, PROMPT, prompt_cache=file)
        assert again == expected and record.reused > 5
    with (
        iqforge.load_model(DEMO, cache_type_k="f32") as model,
        pytest.raises(MalformedFileError, match="other types of the cache"),
    ):
        generated(model, PROMPT, prompt_cache=file)


def test_files_that_do_not_belong(tmp_path):
    file = tmp_path / "cache"
    quantized = tmp_path / "q8.gguf"
    iqforge.quantize_model(DEMO, quantized, "Q8_0")
    with iqforge.load_model(DEMO) as model:
        generated(model, PROMPT, prompt_cache=file)
        whole = file.read_bytes()
        with iqforge.load_model(quantized) as other:
            assert fingerprint(model.source) != fingerprint(other.source)
            with pytest.raises(MalformedFileError, match="of another model"):
                generated(other, PROMPT, prompt_cache=file)
        assert file.read_bytes() == whole  # nothing was written over it
        for data, error in (
            (b"", MalformedFileError),
            (b"GGUF" + whole[4:], MalformedFileError),
            (whole[:100], TruncatedFileError),
            (whole[:-100], TruncatedFileError),
            (whole[:16] + b"{" * 100 + whole[116:], MalformedFileError),
            (whole.replace(b'"at": 0}', b'"at":-1}', 1), TruncatedFileError),
            (whole.replace(b'"float16"', b'"float99"', 1), MalformedFileError),
            (whole.replace(b'"tokens": [', b'"tokens":[1e999,', 1), IqforgeError),
            (whole[:8] + (9**6).to_bytes(8, "little") + b"[" * 9**6, MalformedFileError),
        ):
            file.write_bytes(data)
            with pytest.raises(error):
                generated(model, PROMPT, prompt_cache=file)
        with pytest.raises(NotFoundError):
            generated(model, PROMPT, prompt_cache=tmp_path / "none", prompt_cache_ro=True)
        with pytest.raises(IqforgeError):
            generated(model, PROMPT, prompt_cache=tmp_path / "no" / "folder")
        with pytest.raises(IqforgeError, match="need prompt_cache"):
            generated(model, PROMPT, prompt_cache_all=True)


def test_command(tmp_path, capsys):
    words = ["generate", "-m", str(DEMO), "--device", "cpu", "-p", PROMPT, "-n", "6"]
    words += ["--prompt-cache", str(tmp_path / "cache")]
    assert main(words) == 0
    first = capsys.readouterr()
    assert main(words) == 0
    again = capsys.readouterr()
    assert first.out == again.out and "of them from the file and 1 evaluated" in again.err
    assert "from the file" not in first.err
    assert main([*words, "-cnv"]) == 1
    # The error is not in the middle of a line: the prompt comes after it, if at all.
    (tmp_path / "cache").write_bytes(b"no cache")
    capsys.readouterr()
    assert main(words) == 1 and not capsys.readouterr().out
