"""Ranks that were given other models, texts or flags notice, and say which."""

from __future__ import annotations

import re
from types import SimpleNamespace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import UsageError
from iqforge.runtime import start_ranks
from iqforge.runtime.commands.loading import load_and_say
from iqforge.runtime.evaluate.chunks import Chunks
from iqforge.runtime.evaluate.turns import in_turns
from iqforge.runtime.generate import generate_tokens
from iqforge.runtime.options import LoadOptions
from iqforge.runtime.parallel.alike import check_alike, digest_of, load_facts, model_facts
from iqforge.runtime.parallel.ranks import Ranks

from .shared import shared

MODEL = "golden/convert/llama/expected-f32.gguf"


class Others:
    """The first rank, which meets ranks that have `changed` facts."""

    rank = 0

    def __init__(self, *changed: dict, launched: bool = False):
        self.changed, self.size = changed, 1 + len(changed)
        self.ranks = Ranks(0, self.size, 0, 1, launched=launched)

    def exchange(self, value):
        return [value, *(value | one for one in self.changed)]


def options(**given) -> LoadOptions:
    return LoadOptions(split_mode="graph", tensor_split="1,1", **given)


def facts(given: LoadOptions) -> dict[str, str]:
    return load_facts(given, (0.5, 0.5), "graph", torch.device("cpu"))


@pytest.mark.parametrize(
    "name, value, changed, said",
    [
        ("-ctk", "f16", ["f16", "q8_0"], "rank 2 has -ctk q8_0, and rank 0 -ctk f16"),
        ("-ctk", "f16", ["q4_0", "q8_0"], "rank 1 has -ctk q4_0, and rank 0 -ctk f16"),
        (
            "text",
            digest_of(b"a"),
            [digest_of(b"b")] * 2,
            "rank 1 and rank 2 have another text than",
        ),
        ("text", digest_of(b"a"), [digest_of(b"b")], "rank 1 has another text than rank 0"),
    ],
)
def test_what_differs_is_named(name, value, changed, said):
    alike = {"-sm": "graph"}
    check_alike(Others({}, {}), alike | {name: value})
    with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
        check_alike(Others(*({name: one} for one in changed)), alike | {name: value})


def test_a_fact_that_another_version_does_not_have():
    ranks = SimpleNamespace(exchange=lambda value: [value, {}])
    with pytest.raises(UsageError, match="rank 1 has -ser unset, and rank 0 -ser 1,0.5"):
        check_alike(ranks, {"-ser": "1,0.5"})


@pytest.mark.parametrize(
    "own", [{"threads": 3}, {"timeout": 9.0}, {"main_gpu": 1}, {"lora": ("here.gguf",)}]
)
def test_hosts_may_differ_in_what_is_theirs(own):
    assert facts(options()) == facts(options(**own))


@pytest.mark.parametrize(
    "changed, flag",
    [
        ({"cache_type_k": "q8_0"}, "-ctk"),
        ({"split_experts": "whole"}, "--split-experts"),
        ({"ubatch": 7}, "-ub"),
        ({"reduce_type": "bf16"}, "-grt"),
    ],
)
def test_other_flags_differ_by_their_name(changed, flag):
    before, after = facts(options()), facts(options(**changed))
    assert [name for name in before if before[name] != after[name]] == [flag]


def test_a_model_is_known_by_its_metadata_tensors_and_weights(tmp_path):
    path = shared(MODEL)
    with iqforge.open_source(path) as source:
        whole = model_facts(source)
        assert len(whole) == 3 and source.metadata["general.architecture"].data == "llama"
        zeros = SimpleNamespace(
            metadata=dict(reversed(source.metadata.items())),
            tensors=source.tensors[::-1],
            read_rows=lambda tensor, start, stop: np.zeros((stop - start, 8), np.uint8),
            release=lambda tensor: None,
        )
        other = model_facts(zeros)  # pyright: ignore[reportArgumentType]  all that is read
    assert [name for name in whole if whole[name] != other[name]] == ["model (its weights)"]
    iqforge.split_model(path, tmp_path / "part", max_tensors=8)
    with iqforge.open_source(min(tmp_path.glob("part*.gguf"))) as source:
        assert model_facts(source) == whole, "shards are the same model"
    iqforge.quantize_model(path, tmp_path / "q.gguf", "Q8_0")
    with iqforge.open_source(tmp_path / "q.gguf") as source:
        other = model_facts(source)
    differ = [name for name in whole if whole[name] != other[name]]
    assert differ == ["model (names, shapes and types of its tensors)", "model (its weights)"]


def test_ranks_of_torchrun_compare_before_they_plan(monkeypatch):
    """Those that the command has started itself have one command line."""
    given, cpu = options(), torch.device("cpu")
    changed = {"model (its weights)": digest_of(b"of another host")}
    with iqforge.open_source(shared(MODEL)) as source:
        for launched in (False, True):
            monkeypatch.setattr(
                start_ranks, "joined", lambda *_, at=launched: Others(changed, launched=at)
            )
            wanted = SimpleNamespace(merge_gate_up=False)
            if launched:
                monkeypatch.setattr(start_ranks, "check_alike", lambda *_: pytest.fail("compared"))
                data = LoadOptions(split_mode="data", tensor_split="1,1")
                assert start_ranks.joined_part(data, cpu, source, wanted) is None
            else:
                with pytest.raises(UsageError, match=r"^rank 1 has another model \(its weights\)"):
                    start_ranks.joined_part(given, cpu, source, wanted)


def test_other_texts_and_passes_are_refused():
    text = {"text (-f, -c or --chunks)": digest_of(b"b")}
    with iqforge.load_model(shared(MODEL), device="cpu") as model:
        model.peers = Others({})
        assert len(Chunks.of_text(model, range(1, 60), 16, -1)) == 3
        model.peers = Others(text)
        with pytest.raises(UsageError, match="another text .-f, -c or --chunks. than rank 0"):
            Chunks.of_text(model, range(1, 60), 16, -1)
    passes = in_turns([(0, 1)], str, Others({"order of passes (-b)": digest_of(b"b")}))
    with pytest.raises(UsageError, match="rank 1 has another order of passes"):
        next(passes)


def test_another_prompt_is_refused():
    model = SimpleNamespace(group=Others({"-n": "7"}))
    with pytest.raises(UsageError, match="rank 1 has -n 7, and rank 0 -n 3"):
        generate_tokens(model, [1, 2], 3)  # pyright: ignore[reportArgumentType]  it ends before


def test_lines_of_ranks_name_their_model(capsys):
    memory = SimpleNamespace(weights=2**20, cache=0)
    model = SimpleNamespace(
        device=torch.device("cpu"),
        group=SimpleNamespace(exchange=lambda value: [value, value]),
        memory=lambda rows, chunk: [memory],
    )
    load_and_say(model, name="base.gguf")  # pyright: ignore[reportArgumentType]
    first, *ranks = capsys.readouterr().err.splitlines()
    assert first == "base.gguf:" and [line[:6] for line in ranks] == ["rank 0", "rank 1"]
    model.group = None
    load_and_say(model, name="base.gguf")  # pyright: ignore[reportArgumentType]
    assert not capsys.readouterr().err
