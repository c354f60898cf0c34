"""Arguments of the wrong kind to the runtime's Python interface end in named errors."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import IqforgeError
from iqforge.runtime.network.sampling import GREEDY, Sampling

DEMO = Path(iqforge.__file__).parent / "demo" / "model"
TEXT = "One line and another.\n" * 40


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return iqforge.convert_model(DEMO, tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def model(path):
    with iqforge.load_model(path) as opened:
        yield opened


def refused(call, *expected: str) -> None:
    with pytest.raises(IqforgeError) as raised:
        call()
    assert all(part in str(raised.value) for part in expected), str(raised.value)


def test_loading(path):
    for options, name in (
        ({"cache_bytes": "1"}, "cache_bytes"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"colour": 1}, "no option 'colour'"),
        ({"precision": 3}, "precision is 3"),
        ({"placement": "x"}, "placement"),
        ({"switches": {}}, "switches"),
        ({"cache": "q8_0"}, "cache"),
        ({"ubatch": "5"}, "ubatch"),
        ({"ubatch": 0}, "ubatch"),
        ({"ubatch": True}, "ubatch"),
        ({"context": 1.5}, "context"),
        ({"verbose": 3}, "verbose"),
        ({"device": 5}, "device '5'"),
    ):
        refused(lambda options=options: iqforge.load_model(path, **options), name)
        if "device" not in options and "cache_bytes" not in options:
            refused(
                lambda options=options: iqforge.random_model("llama-tiny:Q8_0", **options), name
            )
    for wrong in (5, None, b"x", ["a"]):
        refused(lambda wrong=wrong: iqforge.load_model(wrong), "path is ", "expected a path")
        refused(lambda wrong=wrong: iqforge.random_model(wrong), "spec is ", "SHAPE:TYPE")


@pytest.mark.parametrize(
    "options, told",
    [
        ({}, []),
        ({"tensor_split": (1, 2)}, ["tensor_split: no effect here, everything is on the CPU"]),
        (
            {"split_mode": "graph", "tensor_split": 5},
            ["split_mode, tensor_split: no effect here, there is one device to use"],
        ),
        (
            {"k_cache_hadamard": True},
            ["k_cache_hadamard: no effect here, the cache is not quantized"],
        ),
    ],
)
def test_options_without_effect_are_named(path, options, told, caplog):
    with iqforge.load_model(path, device="cpu", **options):
        assert [record.message for record in caplog.records if "effect" in record.message] == told


@pytest.mark.parametrize(
    "call",
    [
        lambda path, **load: iqforge.measure_perplexity(path, TEXT, n_ctx=64, chunks=2, **load),
        lambda path, **load: iqforge.measure_perplexity(
            path, TEXT, against=path, n_ctx=64, chunks=2, **load
        ),
        lambda path, **load: iqforge.collect_imatrix(path, TEXT, n_ctx=64, chunks=1, **load),
        lambda path, **load: iqforge.profile_model(path, 4, 0, **load),
        lambda path, **load: list(iqforge.generate(path, "a", 2, **load)),
        lambda path, **load: iqforge.embed(path, "a", **load),
    ],
    ids=["perplexity", "against", "imatrix", "profile", "generate", "embed"],
)
def test_calls_by_path_name_them_once(path, call, caplog):
    """Also where a call opens two models."""
    call(path, device="cpu", tensor_split=(1, 2))
    assert [record.message for record in caplog.records if "effect" in record.message] == [
        "tensor_split: no effect here, everything is on the CPU"
    ]


def test_evaluating(model):
    for tokens in ("abc", None, [1, "a"], [1.5], [[1], [1, 2]], 5, [2**70], [object()], [True], []):
        refused(
            lambda tokens=tokens: model.forward(tokens),
            "token ids are " if tokens != 5 else "token ids have",
        )
    refused(lambda: model.hidden([[1]]), "token ids are a list")
    for hidden in (
        [1.0],
        torch.zeros(2, 3),
        torch.zeros(256),
        torch.zeros(2, 256, dtype=torch.int64),
    ):
        refused(lambda hidden=hidden: model.logits(hidden), "hidden states are ")
    for capacity in ("5", 5.5, None, 0, -1):
        refused(lambda capacity=capacity: model.new_state(capacity), "expected a")
    refused(lambda: model.new_state(5, "q8_0"), "settings is 'q8_0'")
    for state in (None, 5):
        refused(lambda state=state: model.extend([1], state), "state is ")
        refused(lambda state=state: list(model.follow(1, state, 3, GREEDY)), "state is ")
    refused(lambda: list(model.follow("a", model.new_state(5), 3, GREEDY)), "token is 'a'")
    refused(lambda: list(model.follow(1, model.new_state(5), "3", GREEDY)), "n is '3'")
    refused(lambda: list(model.follow(1, model.new_state(5), 3, 0.5)), "sampling is 0.5")


def test_generating(model):
    for options, name in (
        ({"n": "3"}, "n is"),
        ({"n": 2.5}, "n is"),
        ({"temperature": "x"}, "temperature is"),
        ({"top_k": 1.5}, "top_k is"),
        ({"top_p": None}, "top_p is"),
        ({"min_p": "0"}, "min_p is"),
        ({"seed": 1.5}, "seed is"),
        ({"seed": -1}, "seed is"),
        ({"context": "x"}, "context is"),
    ):
        refused(
            lambda options=options: list(iqforge.generate(model, "a", **{"n": 2, **options})), name
        )
    for prompt in (5, None, [1, "b"], [[1]], [1.5], [-1]):
        refused(lambda prompt=prompt: list(iqforge.generate(model, prompt, 2)), "prompt")
    refused(lambda: list(iqforge.generate(5, "a", 3)), "model is 5", "a path or a Model")
    pieces = [
        list(iqforge.generate(model, prompt, n, temperature=0))
        for prompt, n in ((np.array([5, 6]), np.int32(2)), ([5, 6], 2))
    ]
    assert pieces[0] == pieces[1]
    assert Sampling(np.float32(0.5), np.int64(3)).top_k == 3


def test_measuring(model):
    for options, name in (
        ({"prompts": 5}, "prompts is 5"),
        ({"prompts": "12"}, "prompts is '12'"),
        ({"prompts": [0]}, "prompts[0]"),
        ({"prompts": [8, -1]}, "prompts[1]"),
        ({"prompts": [1.5]}, "prompts[0]"),
        ({"prompts": None}, "prompts"),
        ({"generations": ["a"]}, "generations[0]"),
        ({"depths": [-3]}, "depths[0]"),
        ({"repetitions": 0}, "repetitions"),
        ({"repetitions": "2"}, "repetitions"),
        ({"progress": 3}, "progress"),
    ):
        whole = {"prompts": [2], "generations": [], "repetitions": 1, **options}
        refused(lambda whole=whole: iqforge.benchmark_model(model, **whole), name)
    refused(lambda: iqforge.benchmark_model(5), "model is 5")
    refused(lambda: iqforge.measure_perplexity(5, "a\nb"), "model is 5")
    refused(lambda: iqforge.measure_perplexity(model, 5), "text is 5")
    for option in ("n_ctx", "chunks"):
        refused(
            lambda option=option: iqforge.measure_perplexity(
                model, "a b c\n" * 2000, **{option: "x"}
            ),
            f"{option} is 'x'",
        )
