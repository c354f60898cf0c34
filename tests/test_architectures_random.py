"""Every architecture against transformers, on random tiny models that are new in every run.

A failure names the seed.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import iqforge
import numpy as np
import pytest
from iqforge.formats.gguf.reader import open_gguf
from iqforge.quantize.plan.roles import is_candidate
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from .random_models import NO_GATES, WITH_EXPERTS, Models, logits_of
from .seed import VARIABLE, run_seed
from .tiny_cases import CASES, N_TOKENS, SIZES
from .tiny_model import write_gguf
from .tiny_models import TinyModel, make_tiny_model
from .tiny_variants import VARIANTS

BOUND = 1e-4  # largest difference of logits
# (case, size) -> (largest difference, why)
EXCEPTIONS: dict[tuple[str, str], tuple[float, str]] = {}

TYPES = ("IQ4_K", "IQ4_KS", "IQ4_K_R4", "Q8_0", "MXFP4")
# Why a matrix may have another type than the one asked for: (tensor, length of a row, type) -> its
# type. Embeddings are looked up row by row. The rows of `attn_k_b` are the unrotated part of one
# head.
OTHER_TYPES = {
    ("token_embd", 256, "IQ4_K_R4"): "IQ4_K",
    ("per_layer_token_embd", 1024, "IQ4_K_R4"): "IQ4_K",
    ("per_layer_token_embd", 256, "IQ4_K_R4"): "IQ4_K",
    ("attn_k_b", 192, "IQ4_K"): "Q5_0",
    **{
        (f"ssm_{part}_b", 128, type): other
        for part in "fg"
        for type, other in (("IQ4_K", "Q5_0"), ("IQ4_KS", "IQ4_NL"), ("IQ4_K_R4", "Q5_0"))
    },
    ("attn_k_b", 192, "IQ4_KS"): "IQ4_NL",
    ("attn_k_b", 192, "IQ4_K_R4"): "Q5_0",
}
EXACT = CacheSettings("f32", "f32")

SMALL_AND_WIDE = [
    pytest.param(case, size, marks=[pytest.mark.full] if size == "wide" else [])
    for size in SIZES
    for case in CASES
]
QUICK = {case: TYPES[number % len(TYPES)] for number, case in enumerate(CASES)}
CASES_AND_TYPES = [
    pytest.param(case, type, marks=[] if QUICK[case] == type else [pytest.mark.full])
    for case in CASES
    for type in TYPES
]
# Those whose older layout says all: it has no groups of experts.
LATENT = ("deepseek_v2_lite", "kimi_k2", "kimi_k25", "glm4_moe_lite")


def _close(found: np.ndarray, expected: np.ndarray, tiny: TinyModel, bound: float = BOUND) -> None:
    assert found.shape == expected.shape, tiny
    worst = np.abs(found - expected).max(axis=1)
    assert worst.max() < bound, (
        f"{tiny}: logits differ by up to {worst.max():.2e}, first in row"
        f" {int((worst >= bound).argmax())}"
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    yield Models(folder)
    shutil.rmtree(folder)  # gigabytes, if all tests run


@pytest.mark.parametrize("case, size", SMALL_AND_WIDE)
def test_logits_are_those_of_transformers(models, case, size):
    tiny = models.tiny(case, size)
    logits = models.logits(models.file(case, size), tiny)
    bound, _ = EXCEPTIONS.get((case, size), (BOUND, ""))
    assert logits.dtype == np.float32
    _close(logits, tiny.logits, tiny, bound)
    assert (logits.argmax(1) == tiny.logits.argmax(1)).all(), tiny


@pytest.mark.full
@pytest.mark.parametrize(
    "case, number",
    [(case, number) for case, variants in VARIANTS.items() for number in range(len(variants))],
)
def test_variants_of_configs(tmp_path, case, number):
    base, changed = CASES[case], VARIANTS[case][number]
    variant = replace(base, config=lambda sizes: base.config(sizes) | changed)
    tiny = make_tiny_model(variant, SIZES["small"], tmp_path / "hf", of_run=run_seed())
    path = iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    _close(logits_of(path, tiny), tiny.logits, tiny)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_in_pieces_gives_the_same_logits(models, case):
    """At once, token by token, and in pieces of different lengths."""
    tiny = models.tiny(case, "small")
    path = models.file(case, "small")
    expected = models.logits(path, tiny)
    with load_model(path) as model:
        for cuts in (range(1, N_TOKENS), (1, 8, 21, 22), (N_TOKENS - 3,)):
            state = model.new_state(N_TOKENS, EXACT)
            pieces = np.split(np.array(tiny.tokens), list(cuts))
            logits = np.concatenate([model.extend(p, state, all_logits=True) for p in pieces])
            assert state.n_past == N_TOKENS
            _close(logits, expected, tiny)


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_unequal_length_together(models, case):
    """Each as if it were alone, for two passes."""
    tiny = models.tiny(case, "small")
    texts = [tiny.tokens[:23], tiny.tokens[5:16], tiny.tokens[30:31]]
    more = [tiny.tokens[23:24], tiny.tokens[:9], tiny.tokens[31:]]
    with load_model(models.file(case, "small")) as model:
        alone = []
        for a, b in zip(texts, more):
            state = model.new_state(3 * N_TOKENS, EXACT)
            alone.append(model.extend(a + b, state, all_logits=True).numpy())
        pool = model.new_pool(3 * N_TOKENS, 3, EXACT)
        states = [pool.sequence() for _ in texts]
        first = model.extend_together(list(zip(texts, states))).numpy()
        second = model.extend_together(list(zip(more, states))).numpy()
    # Delta nets norm the results of heads, and the first token's is as small as one product.
    bound = 10 * BOUND if case.startswith(("qwen3_next", "qwen3_5")) else BOUND
    _close(first, np.stack([x[len(a) - 1] for x, a in zip(alone, texts)]), tiny, bound)
    _close(second, np.stack([x[-1] for x in alone]), tiny, bound)


@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_brings_a_sequence_back(models, case):
    tiny = models.tiny(case, "small")
    expected = models.logits(models.file(case, "small"), tiny)
    with load_model(models.file(case, "small")) as model:
        state = model.new_state(N_TOKENS, EXACT)
        model.extend(tiny.tokens[:20], state)
        snapshot = state.snapshot()
        model.extend(tiny.tokens[:15], state)
        state.restore(snapshot)
        found = model.extend(tiny.tokens[20:], state, all_logits=True).numpy()
    _close(found, expected[20:], tiny)


@pytest.mark.parametrize("case", LATENT)
def test_layouts_of_latent_attention(models, case, tmp_path):
    """`attn_kv_b` besides `attn_k_b` and `attn_v_b`, and alone, in every form."""
    tiny = models.tiny(case, "small")
    both = iqforge.convert_model(tiny.folder, tmp_path / "both.gguf", "f32", mla_layout="ik")
    with open_gguf(both) as source:
        parts = [
            t.name for t in source.tensors if t.name.split(".")[-2] in ("attn_k_b", "attn_v_b")
        ]
        joined = write_gguf(tmp_path / "joined.gguf", source, drop=tuple(parts))
    assert len(parts) == 6
    for path in (models.file(case, "small"), both, joined):
        for mla in (0, 1, 2, 3):
            _close(logits_of(path, tiny, switches=Switches(mla=mla)), tiny.logits, tiny)


@pytest.mark.parametrize("case", CASES)
def test_runs_repeat_to_the_bit(models, case):
    tiny = models.tiny(case, "small")
    path = models.file(case, "small")
    assert np.array_equal(logits_of(path, tiny), models.logits(path, tiny)), tiny


@pytest.mark.parametrize("case, type", CASES_AND_TYPES)
def test_no_type_falls_back(models, case, type):
    """Every matrix that quantizing considers has the type that was asked for."""
    tiny = models.tiny(case, "wide")
    with open_gguf(models.quantized(case, type)) as file:
        architecture = file.metadata["general.architecture"].data
        found = [t for t in file.tensors if is_candidate(t, architecture)]
    assert len(found) > 8
    unexpected = {
        t.name: t.type.name
        for t in found
        if t.type.name != OTHER_TYPES.get((t.name.split(".")[-2], t.n_cols, type), type)
    }
    assert not unexpected, tiny


@pytest.mark.parametrize("case, type", CASES_AND_TYPES)
def test_quantized_weights_are_the_decoded_ones(models, case, type):
    tiny = models.tiny(case, "wide")
    path = models.quantized(case, type)
    expected = models.decoded_logits(path, tiny)
    _close(models.logits(path, tiny), expected, tiny)
    # The weights are others than the original ones.
    assert np.abs(expected - models.logits(models.file(case, "wide"), tiny)).max() > 1e-3


# The experts of others are computed alike.
MERGED = {"mixtral", "qwen2_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "gpt_oss", "gemma4_moe"}


@pytest.mark.parametrize(
    "case, type",
    [
        p if p.values[0] in MERGED else pytest.param(*p.values, marks=pytest.mark.full)
        for p in CASES_AND_TYPES
        if p.values[0] in WITH_EXPERTS and p.values[0] not in NO_GATES
    ],
)
def test_merged_gate_and_up_change_nothing(models, case, type):
    """Merged in the file, and on loading; in f32 and quantized."""
    tiny = models.tiny(case, "wide")
    for separate, merged in (
        (models.file(case, "wide"), models.file(case, "wide", merged=True)),
        (models.quantized(case, type), models.quantized(case, type, merged=True)),
    ):
        with open_gguf(merged) as file:
            assert any("ffn_gate_up_exps" in t.name for t in file.tensors)
        expected = models.logits(separate, tiny)
        _close(models.logits(merged, tiny), expected, tiny)
        _close(models.logits(separate, tiny, switches=Switches(merge_gate_up=True)), expected, tiny)


def test_the_seed_of_a_run_can_be_repeated(monkeypatch, tmp_path):
    """The same seed gives the same checkpoint, another one another."""
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        monkeypatch.setenv(VARIABLE, str(seed))
        assert run_seed() == seed
        made[name] = make_tiny_model(
            CASES["llama"], SIZES["small"], tmp_path / name, of_run=run_seed()
        )
    assert made["a"].tokens == made["b"].tokens != made["c"].tokens
    assert np.array_equal(made["a"].logits, made["b"].logits)
    assert f"{VARIABLE}=2" in str(made["c"])
