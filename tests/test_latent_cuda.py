"""Kernels of latent attention in a decoding step on a GPU against float64 on the same bytes.

`test_latent_on_host.py` and `test_latent_prompt_on_host.py` test them without a GPU.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from iqforge.cuda_kernels.attention.mla import StepLatentAttention, splits_of  # noqa: E402
from iqforge.runtime.bench import shapes  # noqa: E402
from iqforge.runtime.bench.synthetic import SyntheticSource  # noqa: E402
from iqforge.runtime.cuda.prompt.mixers import latent_absorbed  # noqa: E402
from iqforge.runtime.layers.specs import MLASpec  # noqa: E402
from iqforge.runtime.model import Model  # noqa: E402
from iqforge.runtime.state.cache import CacheSettings  # noqa: E402

from .choices import by_token, comparable, recorded  # noqa: E402
from .latent_reference import (  # noqa: E402
    ABSORBED_ERRORS,
    CHOSEN_SHAPES,
    ENCODED_SHAPES,
    SHAPES,
    WIDE_SHAPES,
    absorbed_error,
    allowed,
    latent_error,
)

GPU = torch.device("cuda")


@pytest.mark.parametrize("shape", SHAPES + CHOSEN_SHAPES + ENCODED_SHAPES + WIDE_SHAPES, ids=str)
def test_latent_attention(shape):
    kernels = {}

    def run(q, kv, norm, eps, angles, keys, values, cache, *rest):
        splits = splits_of(shape, len(cache), GPU)
        if splits not in kernels:
            kernels[splits] = StepLatentAttention(shape, splits, GPU)
        kernels[splits](q, kv, norm, eps, angles, keys, values, cache, *rest)

    # A block alone, also on a tile that is not full, and several that have to be joined.
    for n_past, capacity in ((0, 64), (61, 256), (700, 1024), (20000, 20480)):
        error, same = latent_error(shape, n_past, capacity, GPU, run)
        assert error < allowed(shape, n_past, splits_of(shape, capacity, GPU)), n_past
        # Norm and rotation round differently, which can move an element to the next number.
        assert same > 0.99


@pytest.mark.parametrize(
    "shape, cache",
    [("deepseek-v2-lite", "f16"), ("deepseek-v3", "f16"), ("deepseek-v2-lite", "q8_0")],
)
def test_layers_of_real_sizes(monkeypatch, shape, cache):
    """A dense layer and one with experts, in prompts and steps: no layer is slow, and the results
    are those of float32.
    """
    short = {"n_layers": 2, "n_dense": 1, "n_vocab": 4096}
    if shape == "deepseek-v3":
        short |= {"n_experts": 32}  # of 256, for the time it takes
    monkeypatch.setitem(shapes.SHAPES, "short", replace(shapes.SHAPES[shape], **short))
    tokens = torch.randint(4096, (300,), generator=torch.Generator().manual_seed(1))
    pieces = [256, 20, 8, 1, 1, 1, 1, 12]
    slow: list[str] = []

    def logits(**options):
        options["cache"] = CacheSettings(cache)
        with Model(SyntheticSource("short:IQ4_K"), GPU, **options) as model:
            state, rows = model.new_state(512), []
            for piece in tokens.split(pieces):
                rows.append(model.extend(piece, state, all_logits=True).cpu())
            return torch.cat(rows)

    found, again = (logits(precision="bf16", verbose=slow.append) for _ in range(2))
    assert not slow
    assert torch.equal(found, again)
    with recorded(monkeypatch) as calls:
        expected = logits(precision="f32")
        wanted = by_token(calls, pieces)
        calls.clear()
        assert torch.equal(logits(precision="bf16"), found)  # graphs compute the same
        same = comparable(by_token(calls, pieces), wanted, len(tokens))
    assert same.sum() > 100
    off = (found - expected).square().mean(1).sqrt() / expected.std()
    # Of all tokens, and of each: rows of IQ4_K and activations of steps in 8 bits; in an encoded
    # cache, latents that differ a little can have other codes.
    most = 0.03 if cache == "f16" else 0.04
    assert off[same].square().mean().sqrt() < most and (off[same] < 2 * most).all(), (same, off)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", ABSORBED_ERRORS, ids=str)
@pytest.mark.parametrize("past, n", [(0, 9), (61, 16), (3000, 43), (3000, 1), (8192, 64)])
def test_rows_of_prompts_in_the_absorbed_form(heads, dtype, past, n):
    """Rows in eights, with some that overlap with others, and a single one."""
    spec = MLASpec(heads, 0, 512, 128, 64, 128, 192**-0.5)
    assert absorbed_error(spec, dtype, past, n, GPU) < ABSORBED_ERRORS[dtype]


@pytest.mark.parametrize("shape", ["deepseek-v2-lite", "deepseek-v3", "mistral-small-4"])
@pytest.mark.parametrize("cache", ["f16", "bf16", "q8_0"])
def test_both_forms_of_prompts(monkeypatch, shape, cache):
    """Few tokens after many, in the naive and the absorbed form, are as near to float32, also where
    the last eight overlap with others, after going back to a snapshot, and where the last row alone
    has a query.
    """
    short = {"n_layers": 2, "n_dense": 2, "n_vocab": 4096}
    monkeypatch.setitem(shapes.SHAPES, "short", replace(shapes.SHAPES[shape], **short))
    tokens = torch.randint(4096, (1300,), generator=torch.Generator().manual_seed(1))
    pieces, calls = [1100, 9, 20, 32, 43, 96], []
    to_all = latent_absorbed.AbsorbedRows.to_all
    monkeypatch.setattr(
        latent_absorbed.AbsorbedRows,
        "to_all",
        lambda self, q, *rest: calls.append(len(q)) or to_all(self, q, *rest),
    )

    def logits(form, all_logits=True, back=False, **options):
        """Of all pieces; with `back` those after the first are evaluated, and then again."""
        monkeypatch.setattr(latent_absorbed, "forced", form)
        settings = CacheSettings(cache)
        with Model(SyntheticSource("short:IQ4_K"), GPU, cache=settings, **options) as model:
            state = model.new_state(2048)

            def rows(sizes):
                parts = tokens[state.n_past :][: sum(sizes)].split(sizes)
                found = [model.extend(x, state, all_logits=all_logits).cpu() for x in parts]
                return torch.cat([x.view(-1, 4096) for x in found])

            if not back:
                return rows(pieces)
            first = rows(pieces[:1])
            snapshot = state.snapshot()
            rows(pieces[1:])
            state.restore(snapshot)
            return torch.cat([first, rows(pieces[1:])])

    expected = logits(None, precision="f32")
    naive, absorbed = (logits(form, precision="bf16") for form in (False, True))
    assert torch.equal(logits(True, back=True, precision="bf16"), absorbed)
    assert set(calls) == {512, 1100 - 1024, *pieces[1:]}  # the first piece in passes of 512
    off = [(x - expected).square().mean(1).sqrt() / expected.std() for x in (naive, absorbed)]
    assert off[1].square().mean().sqrt() < max(0.02, 1.2 * off[0].square().mean().sqrt()), off
    assert off[1].max() < max(0.06, 1.2 * off[0].max()), off  # codes of a cache can differ

    calls.clear()
    ends = torch.tensor(pieces).cumsum(0) - 1
    last = logits(True, all_logits=False, precision="bf16")
    assert 1 in calls
    apart = (last - absorbed[ends]).square().mean(1).sqrt() / expected.std()
    assert (apart < 0.03).all(), apart

    monkeypatch.setattr(latent_absorbed, "FEWEST_KEYS", 1200 * shapes.SHAPES[shape].n_heads)
    monkeypatch.setattr(latent_absorbed, "KEYS_OF_QUERY", 1)
    monkeypatch.setattr(latent_absorbed, "MOST_QUERIES", 64)
    calls.clear()
    chosen = logits(None, precision="bf16")
    assert set(calls) == {43}  # those before end before 1,200 positions, those after are too many
    assert torch.equal(chosen[: sum(pieces[:4])], naive[: sum(pieces[:4])])
