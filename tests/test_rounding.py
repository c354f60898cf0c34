"""Rounding with second moments: layouts of codes, factors, what is gained, and whole runs."""

from __future__ import annotations

import functools
import json

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import ImatrixError, ResumeError, UnsupportedTypeError, UsageError
from iqforge.formats.codecs.codec import decode, decode_plain
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import TYPES, ggml_type
from iqforge.imatrix.moments.lookup import imatrix_of, moments_of
from iqforge.quantize.encode import row_encoder
from iqforge.quantize.report.stats import StatsReport, collect_stats
from iqforge.quantize.rounding.factor import DAMPING, factored, shrunk
from iqforge.quantize.rounding.kernels.vectors import SIZE
from iqforge.quantize.rounding.layouts.codes import GROUP, SCALES, code_layout
from iqforge.quantize.rounding.layouts.vectors import VECTORS, vector_layout
from iqforge.quantize.rounding.layouts.words import ParityLayout, word_layout
from iqforge.quantize.rounding.methods import UNGUIDED, guides, rounder_of
from iqforge.quantize.rounding.proxy import RoundedErrors
from iqforge.quantize.run.report import RunProgress
from iqforge.quantize.search.trellis.tree import CODEBOOKS, LEAF

from .broken_runs import fails_after
from .imatrices import N_CTX, tiny_llama_file
from .second_moments import N, correlated, weights
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe


def error(type, x: np.ndarray, made: np.ndarray, h: np.ndarray) -> float:
    rest = x - decode_plain(type, made, x.shape[1]).astype(np.float64)
    return float(((rest @ h) * rest).sum())


@pytest.mark.parametrize("name", SCALES)
def test_layout_agrees_with_the_decoder(name):
    """Codes are written where the decoder reads them, and have the values that the tables say."""
    type, layout = ggml_type(name), code_layout(name)
    assert layout is not None
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (5, type.row_bytes(N)), dtype=np.uint8)
    for scale in layout.scales:
        scale.write(layout.owners(rows), generator.uniform(0.01, 1, layout.owners(rows).shape[:2]))
    levels = layout.levels(rows, N)
    codes = generator.integers(0, layout.n_codes, (5, N)).astype(np.uint8)
    made = layout.with_codes(rows, codes)
    values = decode(type, made, N, as_weights=True)
    np.testing.assert_array_equal(
        values, levels[np.arange(5)[:, None], np.arange(N) // GROUP, codes]
    )
    if not layout.scales:
        return
    stored = [scale.read(layout.owners(made)) for scale in layout.scales]
    sums = sum(
        np.repeat(d, N // d.shape[1], axis=1) * unit
        for d, unit in zip(stored, layout.units(made, N))
    )
    np.testing.assert_allclose(values, sums, rtol=2e-6, atol=1e-6)
    if layout.group_bits is not None:
        choices = layout.choices(made)
        np.testing.assert_array_equal(layout.with_choices(made, choices), made)
        assert len({len(np.unique(layout.group_bits)), layout.group_bits.size}) == 1
        at = np.arange(choices.shape[1]) % len(layout.group_bits), choices
        d, *others = (np.repeat(one, choices.shape[1] // one.shape[1], axis=1) for one in stored)
        groups = d[:, :, None] * layout.choice_units[at]
        for other in others:
            groups += (other * layout.choice_shifts[at])[:, :, None]
        wanted = groups[np.arange(5)[:, None], np.arange(N) // (N // choices.shape[1]), codes]
        np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
        assert (layout.near_choices[:, 0] == np.arange(len(layout.near_choices))).all()


@pytest.mark.parametrize("name", VECTORS)
def test_vector_layout_agrees_with_the_decoder(name):
    type, layout = ggml_type(name), vector_layout(name)
    assert layout is not None
    generator, (width, entries) = np.random.default_rng(0), layout.table.shape
    rows = generator.integers(0, 256, (5, type.row_bytes(N)), dtype=np.uint8)
    layout.scale.write(
        layout.owners(rows), generator.uniform(0.01, 1, layout.owners(rows).shape[:2])
    )
    indices = generator.integers(0, entries, (5, N // width))
    signs = generator.integers(0, 1 << layout.sign_bits.shape[1], (5, N // SIZE))
    made = layout.with_vectors(rows, indices, signs)
    bits = (signs[:, :, None] >> np.arange(SIZE)) & 1
    if layout.even:
        bits[:, :, -1] = bits[:, :, :-1].sum(axis=2) & 1
    scales = np.repeat(layout.scales(made, N), SIZE, axis=1)
    values = layout.table.T[indices].reshape(5, N) * scales * (1 - 2 * bits.reshape(5, N))
    np.testing.assert_allclose(decode(type, made, N, as_weights=True), values, rtol=2e-6)


@pytest.mark.parametrize("name", ["IQ2_KL", "IQ1_S", "IQ1_M", "IQ1_M_R4", *CODEBOOKS, "IQ4_KSS"])
def test_word_layout_agrees_with_the_decoder(name):
    type, layout = ggml_type(name), word_layout(name)
    assert layout is not None
    generator = np.random.default_rng(0)
    rows = np.zeros((5, type.row_bytes(N)), dtype=np.uint8)
    owners = layout.owners(rows)
    layout.scale.write(owners, np.ldexp(1, generator.integers(-4, 4, owners.shape[:2])))
    chosen = generator.integers(0, len(layout.factors), (5, len(layout.chosen(rows)[0])))
    words, books = layout.tables[0], np.repeat(layout.book_of[chosen], 32 // layout.dim, axis=1)
    signs = np.zeros((5, N // layout.dim), dtype=np.int64)
    if isinstance(layout, ParityLayout):
        found = generator.integers(0, 1 << 16, (5, N // 4))
        ones = np.array([number.bit_count() for number in found.flat]).reshape(found.shape)
        found ^= ones & 1
        codes = found[:, :, None] >> 4 * np.arange(4) & 15
        values = words[books[:, :, None], 0, codes]
    elif layout.is_trellis:
        found = generator.integers(0, words.shape[1] * LEAF, (5, N // layout.dim))
        at = LEAF * np.arange(layout.dim) + found[:, :, None] % LEAF
        values = words[books[:, :, None], found[:, :, None] // LEAF, at].astype(np.float64)
    else:
        books = np.repeat(layout.book_of[chosen], N // layout.dim // chosen.shape[1], axis=1)
        found = generator.integers(0, words.shape[2], (5, N // layout.dim))
        values = words[books[:, :, None], np.arange(layout.dim), found[:, :, None]]
    if layout.sign_bits is not None:
        signs = generator.integers(0, 256, signs.shape)
        values = values * (1 - 2 * (signs[:, :, None] >> np.arange(8) & 1))
    made = layout.with_words(rows, chosen, found, signs)
    np.testing.assert_array_equal(layout.chosen(made), chosen)
    d = layout.scale.read(layout.owners(made))
    scales = np.repeat(d, chosen.shape[1] // d.shape[1], axis=1) * layout.factors[chosen]
    values = values.reshape(5, N) * np.repeat(scales, N // chosen.shape[1], axis=1)
    order = layout.order_of(N)
    decoded = decode_plain(type, made, N)
    np.testing.assert_allclose(
        decoded if order is None else decoded[:, order], values, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0", "IQ1_BN", "IQ2_BN"])
def test_three_values_stay_what_they_are(name):
    type = ggml_type(name)
    x = np.random.default_rng(0).integers(-1, 2, (6, N)).astype(np.float32) * 0.25
    out = np.empty((6, type.row_bytes(N)), dtype=np.uint8)
    rounder_of(type, N, factored(correlated(), 0.1), 1)(x, out)
    np.testing.assert_array_equal(decode(type, out, N), x)
    searched = np.empty_like(out)
    row_encoder(type, N, np.ones(N))(x, searched)
    np.testing.assert_array_equal(out, searched)


def test_every_quantized_type_is_guided_or_says_why_not():
    """Types without error feedback: those of eight bits, whose error is small beside that of the
    other tensors, and I2_S, which nothing is quantized to.
    """
    without = {t.name for t in TYPES.values() if t.plain.is_quantized and not guides(t)}
    assert not any(guides(t) for t in TYPES.values() if t.plain.is_float)  # BF16_R16, too
    eight = {"Q8_0", "Q8_KV", "Q8_0_R8", "Q8_KV_R8", "Q8_K_R8", "Q8_K_R16"}
    assert without == eight | {"I2_S"}
    factor = factored(correlated(), 0.3)
    for t in TYPES.values():
        if not t.is_quantized or t.base is not None:
            continue
        if guides(t):
            assert rounder_of(t, N, factor, 1) is not None
        else:
            assert t.name in UNGUIDED
            with pytest.raises(UnsupportedTypeError, match=t.name):
                rounder_of(t, N, factor, 1)


def test_factor_is_one_of_the_shrunk_moments():
    h = correlated(64)
    factor = factored(h, 0.25)
    expected = h * 0.75 + np.diag(np.diagonal(h)) * 0.25 + np.eye(64) * DAMPING * np.trace(h) / 64
    np.testing.assert_allclose(factor.moments, expected, rtol=1e-5)
    d = np.random.default_rng(1).normal(size=64)
    rest = d + d @ factor.feedback
    assert float((factor.weights * rest**2).sum()) == pytest.approx(d @ expected @ d, rel=1e-5)


def test_dead_columns_get_no_feedback():
    h = correlated(64)
    h[5] = h[:, 5] = 0
    made = shrunk(h, 0.1)
    assert made[5, 5] > 0
    assert not np.delete(made[5], 5).any()
    factor = factored(h, 0.1)
    assert not factor.feedback[5].any() and not factor.feedback[:, 5].any()


def test_moments_that_cannot_be_factored_are_an_error(caplog):
    h = correlated(64)
    h[3, 4] = np.nan
    with pytest.raises(ImatrixError, match=r"blk\.0\.x.*not finite|not finite"):
        factored(h, 0.1, "blk.0.x")
    with pytest.raises(ImatrixError, match="cannot be factored"):
        factored(np.array([[1.0, 50], [50, 1]]), 0.0, "blk.0.x")
    caplog.clear()
    found = factored(np.array([[1.0, 1.05], [1.05, 1]]), 0.0, "blk.0.x")
    np.testing.assert_allclose(found.moments, [[1.1, 1.05], [1.05, 1.1]], rtol=1e-6)
    assert "damping is now" in caplog.text


# They run the code of others with other numbers.
OTHERS = ("Q4_1", "Q2_K", "Q3_K", "IQ2_K", "IQ4_K")


@pytest.mark.parametrize(
    "name",
    [
        "Q4_0",
        "Q4_K",
        "IQ3_K",
        "IQ4_KS",
        "MXFP4",
        "IQ2_XXS",
        "IQ3_S",
        "TQ1_0",
        "IQ1_BN",
        pytest.param("IQ1_M", marks=pytest.mark.full),
        pytest.param("IQ2_KT", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (*OTHERS, "IQ2_KL", "IQ4_KSS", "IQ1_S", "IQ1_S_R4", "IQ1_M_R4", *CODEBOOKS)
            if name != "IQ2_KT"
        ),
    ],
)
def test_error_falls_with_feedback_and_with_refinement(name):
    type, h, x = ggml_type(name), correlated(), weights()
    out = np.empty((len(x), type.row_bytes(N)), dtype=np.uint8)
    row_encoder(type, N, np.diagonal(h))(x, out)
    searched = error(type, x, out, h)
    factor = factored(h, 0.1)
    made = list(rounder_of(type, N, factor, 2).stages(x))
    assert error(type, x, made[0], h) < 0.75 * searched
    assert error(type, x, made[1], h) < 0.97 * error(type, x, made[0], h)
    assert error(type, x, made[2], factor.moments) < error(type, x, made[1], factor.moments)


@pytest.mark.parametrize(
    "name",
    [
        "Q4_0",
        "IQ3_K",
        "IQ4_KS",
        "IQ2_XXS",
        "IQ3_S",
        "IQ2_KL",
        pytest.param("IQ2_KT", marks=pytest.mark.slow),
    ],
)
def test_rows_do_not_depend_on_each_other(name):
    type, h, x = ggml_type(name), correlated(), weights(7)
    rounder = rounder_of(type, N, factored(h, 0.3), 1)
    together, alone = (np.empty((7, type.row_bytes(N)), dtype=np.uint8) for _ in range(2))
    rounder(x, together)
    for row in range(7):
        rounder(x[row : row + 1], alone[row : row + 1])
    np.testing.assert_array_equal(together, alone)


def test_rows_of_zeros_stay_zero():
    type, x = ggml_type("Q4_K"), np.zeros((3, N), dtype=np.float32)
    out = np.empty((3, type.row_bytes(N)), dtype=np.uint8)
    rounder_of(type, N, factored(correlated(), 0.3), 1)(x, out)
    assert not decode(type, out, N).any()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    path = tiny_llama_file(folder)
    made = iqforge.collect_hessian(
        path, PROSE * 40, folder / "h.safetensors", n_ctx=N_CTX, process_output=True
    )
    return path, made


class Seen(RunProgress):
    def __init__(self):
        self.choices = []

    def rounding_chosen(self, choices) -> None:
        self.choices = list(choices)


def test_lookup_and_importances(llama):
    _, made = llama
    found = moments_of(made, "blk.0.ffn_down.weight", (256, 512))
    assert found is not None and found.fit(0).shape == (512, 512)
    assert moments_of(made, "blk.0.unknown.weight", (256, 512)) is None
    with pytest.raises(ImatrixError, match="shape"):
        moments_of(made, "blk.0.ffn_down.weight", (256, 256))
    imatrix = imatrix_of(made)
    owner = made.owners["blk.0.ffn_down.weight"]
    counts = [made.counts(owner, fold)[0] for fold in ("fit", "hold")]
    mixed = sum(made.diagonal(owner, f)[0] * c for f, c in zip(("fit", "hold"), counts))
    np.testing.assert_allclose(
        imatrix.importance("blk.0.ffn_down.weight", (256, 512))[0], mixed / sum(counts), rtol=1e-6
    )
    assert iqforge.load_imatrix(made.path).digest() == imatrix.digest()


def test_quantize_is_better_by_the_moments_and_says_how(llama, tmp_path, capsys):
    path, made = llama
    words = ["--pure", "--token-embedding-type", "Q8_0", str(path)]
    assert main(["quantize", "--hessian", made.path, *words, str(tmp_path / "h.gguf"), "Q4_0"]) == 0
    said = capsys.readouterr().out
    assert "ffn_down                 Q4_0        1 tensor: shrink 0." in said
    assert (
        "token_embd               Q8_0        1 tensor: search with the importance matrix" in said
    )
    assert main(["quantize", "--imatrix", made.path, *words, str(tmp_path / "i.gguf"), "Q4_0"]) == 0
    with open_gguf(path) as full, open_gguf(tmp_path / "h.gguf") as h:
        with open_gguf(tmp_path / "i.gguf") as i:
            for tensor in h.tensors:
                if tensor.type.name != "Q4_0":
                    continue
                x = decode_all(full, tensor.name)
                moments = moments_of(made, tensor.name, tensor.shape)
                errors = [
                    np.einsum("ij,jk,ik->", d, moments.hold(0), d, optimize=True)
                    for d in (x - decode_all(one, tensor.name) for one in (h, i))
                ]
                assert errors[0] < 0.95 * errors[1], tensor.name
        assert (
            json.loads(h.metadata["quantize.hessian.texts"].data)[0][1] == made.texts[0]["tokens"]
        )
        assert len(h.metadata["quantize.hessian.sha256"].data) == 64
        rounding = json.loads(h.metadata["quantize.hessian.rounding"].data)
        assert ["token_embd", "Q8_0", None, 0] in rounding


def decode_all(file, name: str) -> np.ndarray:
    t = file.tensor(name)
    return decode(t.type, np.array(file.read_rows(t, 0, t.n_rows)), t.n_cols).astype(np.float64)


def test_threads_and_interleaving_change_nothing(llama, tmp_path):
    path, made = llama
    for out, type, threads in (("a", "Q4_0", 1), ("b", "Q4_0", 3), ("c", "Q4_0_R8", 2)):
        iqforge.quantize_model(
            path,
            tmp_path / out,
            type,
            hessian=made,
            hessian_shrink=0.3,
            pure=True,
            threads=threads,
            device="cpu",
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    iqforge.repack_model(tmp_path / "c", tmp_path / "d", undo=True)
    with open_gguf(tmp_path / "a") as one, open_gguf(tmp_path / "d") as other:
        for t in one.tensors:
            mine, plain = (
                np.array(f.read_rows(f.tensor(t.name), 0, t.n_rows)) for f in (one, other)
            )
            np.testing.assert_array_equal(mine, plain)


def test_options_decide(llama, tmp_path):
    path, made = llama
    seen = Seen()
    iqforge.quantize_model(
        path,
        tmp_path / "a.gguf",
        "Q4_0",
        hessian=made.path,
        hessian_shrink=0.4,
        refine=False,
        progress=seen,
        pure=True,
    )
    rounded = [one for one in seen.choices if one.shrink is not None]
    assert rounded and {(one.shrink, one.passes) for one in rounded} == {(0.4, 0)}
    for keywords, message in (
        ({"hessian_shrink": 0.3}, "need second moments"),
        ({"hessian_shrink": 1.5, "hessian": made}, "expected 0 to 1"),
        ({"dry_run": True, "estimate": True, "hessian": made}, "no-estimate"),
    ):
        with pytest.raises(UsageError, match=message):
            iqforge.quantize_model(path, tmp_path / "b.gguf", "Q4_0", **keywords)


def test_an_interrupted_run_resumes_to_the_same_bytes(llama, tmp_path, monkeypatch):
    path, made = llama
    keywords = {"hessian": made, "refine": False, "pure": True, "threads": 1, "device": "cpu"}
    iqforge.quantize_model(path, tmp_path / "whole.gguf", "Q4_0", **keywords)
    out = tmp_path / "q.gguf"
    with fails_after(monkeypatch, 6):
        iqforge.quantize_model(path, out, "Q4_0", **keywords)
    with pytest.raises(ResumeError, match="second moments"):
        iqforge.quantize_model(path, out, "Q4_0", **keywords, hessian_shrink=0.9)
    iqforge.quantize_model(path, out, "Q4_0", **keywords)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_more_shrinking_wins_where_errors_are_close(monkeypatch):
    from iqforge.quantize.rounding import choice

    class Trial:
        tokens = 10**6
        x = np.zeros((1, 256), dtype=np.float32)

        def __init__(self, errors):
            self._errors = errors

        def errors(self, type, shrink, passes):
            found = np.log(np.array(self._errors[choice.SHRINKS.index(shrink)]))
            return np.array([found, np.full(3, 0.05)])

    class Plan:
        target = type("Target", (), {"name": "blk.0.x.weight", "type": ggml_type("Q4_0")})
        source = type("Source", (), {"n_cols": 256})

    def chosen(*errors, **keywords):
        monkeypatch.setattr(choice, "trials", lambda *_, **__: [Trial(one) for one in errors])
        found = choice.choose("x", None, [(Plan, None)], None, None, True, 2, **keywords)
        assert found.shrink is None or abs(found.stretch - 1.03) < 0.002
        return found.shrink, found.passes

    least_at_first = [[0.5, 0.4, 0.39], [0.5, 0.41, 0.4], [0.6, 0.5, 0.45], [0.7, 0.6, 0.6]]
    assert chosen(least_at_first) == (0.25, 2)
    assert chosen(least_at_first, one_text=True) == (0.75, 1)
    assert chosen([[0.9, 0.8, 0.3], [0.9, 0.8, 0.5], [1, 1, 1], [1, 1, 1]]) == (0.1, 2)
    assert chosen([[1.2, 1.1, 1.1]] * 4) == (None, 0)


def test_types_for_a_size_are_chosen_by_the_errors_of_rounding(llama, tmp_path, capsys):
    path, made = llama
    words = ["--target-bpw", "5.5", "--target-types", "Q4_0,Q8_0", "--no-refine", str(path)]
    out = str(tmp_path / "t.gguf")
    shrink = ["--hessian-shrink", "0.3"]
    assert main(["quantize", "--hessian", made.path, *shrink, *words, out]) == 0
    said = capsys.readouterr().out
    assert "target      =" in said and "shrink 0.3, 0 refinements" in said
    assert "predicted KL" not in said
    assert "--damage also predicts" in said
    with open_gguf(out) as file:
        assert {"Q4_0", "Q8_0"} <= {t.type.name for t in file.tensors}
    assert main(["quantize", "--repack", "--hessian", made.path, out, "x.gguf", "Q4_0"]) != 0
    assert "--repack does not quantize" in capsys.readouterr().err


def test_errors_of_rounding_are_those_of_the_search_times_a_ratio(llama):
    """They are about tr(dW H dW^T) of whole tensors on held-out text, on the scale of searches."""
    path, made = llama
    with open_gguf(path) as source:
        names = ["blk.0.ffn_down.weight", "blk.0.attn_q.weight", "token_embd.weight"]
        report = StatsReport(path, ["Q4_0", "Q8_0"], 32)
        types, imatrix = [ggml_type("Q4_0"), ggml_type("Q8_0")], imatrix_of(made)
        tensors = [source.tensor(name) for name in names]
        collect_stats(source, tensors, types, report, importance=imatrix.importance)
        moments = functools.partial(moments_of, made)
        found = RoundedErrors(source, report.tensors, moments, imatrix.importance).all()
        for before, after in zip(report.tensors[:2], found):
            assert after.errors["Q8_0"] == before.errors["Q8_0"]
            x, h = decode_all(source, before.tensor.name), moments_of_hold(made, before.tensor)
            type, n = ggml_type("Q4_0"), x.shape[1]
            factor = factored(moments(before.tensor.name, before.tensor.shape).fit(0), 0.3)
            *_, best = rounder_of(type, n, factor, 1).stages(x.astype(np.float32))
            whole = error(type, x, best, h) / float((x**2 @ np.diagonal(h)).sum())
            ratio = after.errors["Q4_0"].weighted_rmse ** 2 / whole
            assert 0.7 < ratio < 1.4, before.tensor.name
            assert after.errors["Q4_0"].we2 < 0.9 * before.errors["Q4_0"].we2
        assert found[2] == report.tensors[2]


def moments_of_hold(made, tensor) -> np.ndarray:
    held = moments_of(made, tensor.name, tensor.shape).hold(0)
    assert held is not None
    return held


def test_the_choice_says_whose_moments_experts_have(tmp_path, capsys):
    make_tiny_qwen3moe(tmp_path / "hf", n_experts=4, n_layers=1)
    path = tmp_path / "moe.gguf"
    iqforge.convert_model(tmp_path / "hf", path, outtype="f32")
    made = iqforge.collect_hessian(path, PROSE * 4, tmp_path / "h.safetensors", n_ctx=N_CTX)
    words = ["--pure", "--hessian-shrink", "0.3", "--no-refine", str(path), str(tmp_path / "q")]
    assert main(["quantize", "--hessian", made.path, *words, "Q4_0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in printed if "shrink 0.3" in line}
    for role in ("ffn_gate_exps", "ffn_down_exps"):
        said = lines[role].partition("moments of experts: ")[2].split(", ")
        counts = {origin: int(n) for n, origin in (one.split(" ", 1) for one in said)}
        wanted: dict[str, int] = {}
        with open_gguf(path) as file:
            for tensor in file.tensors:
                if role in tensor.name:
                    found = moments_of(made, tensor.name, tensor.shape)
                    for index in range(tensor.n_matrices):
                        few = found.tokens(index) < tensor.n_cols
                        prior = "the layer" if role == "ffn_gate_exps" else "the diagonal alone"
                        none = prior if role == "ffn_gate_exps" else "nothing seen"
                        origin = f"mostly {prior}" if few else "their own"
                        origin = origin if found.tokens(index) else none
                        wanted[origin] = wanted.get(origin, 0) + 1
        assert counts == wanted and sum(counts.values()) > 1
    assert "moments of experts" not in lines["attn_output"]
