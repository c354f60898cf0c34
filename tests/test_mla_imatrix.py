"""Importance matrices of latent attention, in every layout of its tensors."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.tensor_names import TensorName
from iqforge.imatrix.collecting import collect
from iqforge.imatrix.files.load import load_imatrix, save_imatrix
from iqforge.runtime.model import load_model
from iqforge.runtime.weights.switches import Switches

from .latent_models import layouts
from .tiny_model import write_gguf


class FirstLayer:
    """What latent attention of the first layer multiplies, in plain float64 from the definitions:
    `q` [tokens, heads, nope + rope] before rotation, latent vectors `c`, `mixed` [tokens, heads,
    rank].
    """

    def __init__(self, path, tokens):
        with open_gguf(path) as file:
            key = {k.partition(".")[2]: v.data for k, v in file.metadata.items()}
            w = {
                t.name.removeprefix("blk.0."): decode(
                    t.type, np.array(file.read_rows(t, 0, t.n_rows)), t.n_cols
                )
                .reshape(t.shape)
                .astype(np.float64)
                for t in file.tensors
            }
        heads, n_rot = key["attention.head_count"], key["rope.dimension_count"]
        rank, length = key["attention.kv_lora_rank"], key["attention.key_length_mla"]

        def norm(x, name):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name].reshape(-1)

        def turned(x):
            rates = key["rope.freq_base"] ** (-2 * np.arange(n_rot // 2) / n_rot)
            angle = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) * rates
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

        x = norm(w["token_embd.weight"][tokens], "attn_norm.weight")
        self.x = x
        self.q_latent = norm(x @ w["attn_q_a.weight"].T, "attn_q_a_norm.weight")
        self.q = (self.q_latent @ w["attn_q_b.weight"].T).reshape(len(x), heads, length)
        both = x @ w["attn_kv_a_mqa.weight"].T
        self.c = norm(both[:, :rank], "attn_kv_a_norm.weight")
        k_rope, q_rope = turned(both[:, rank:]), turned(self.q[..., -n_rot:])
        k = np.einsum("nr,hrk->nhk", self.c, w["attn_k_b.weight"])
        scores = np.einsum("nhk,mhk->hnm", self.q[..., :-n_rot], k)
        scores += np.einsum("nhk,mk->hnm", q_rope, k_rope)
        scores = np.where(np.tri(len(x), dtype=bool), scores / length**0.5, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        self.mixed = np.einsum("hnm,mr->nhr", shares, self.c)
        self.nope = length - n_rot


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(0, 288, 150).tolist()


@pytest.fixture(scope="module")
def without_scaling(tmp_path_factory):
    """The layouts of a model whose rotation has no scaling."""
    folder, made = tmp_path_factory.mktemp("layouts"), {}
    for name, path in layouts(folder, "deepseek_v3").items():
        with open_gguf(path) as source:
            scaling = {key: None for key in source.metadata if ".rope.scaling." in key}
            made[name] = write_gguf(folder / f"{name}.gguf", source, metadata=scaling)
    return made


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_importances_are_squares_of_the_absorbed_form(without_scaling, tokens, mla):
    n_ctx, tokens = 30, tokens[:60]
    with load_model(without_scaling["per head"]) as model:
        tokens[0] = tokens[n_ctx] = model.special_tokens.bos  # as every chunk begins
    layers = [FirstLayer(without_scaling["per head"], tokens[i : i + n_ctx]) for i in (0, n_ctx)]
    q, c, mixed = (
        np.concatenate([getattr(layer, name) for layer in layers]) for name in ("q", "c", "mixed")
    )
    per_head = {
        "attn_k_b": (q[..., : layers[0].nope] ** 2).sum(0),
        "attn_v_b": (mixed**2).sum(0),
    }
    latent = (c**2).sum(0, keepdims=True)
    for layout, path in without_scaling.items():
        with load_model(path, switches=Switches(mla=mla)) as model:
            found = collect(model, tokens, n_ctx=n_ctx).entries
        expected = {} if layout == "joined" else dict(per_head)
        expected |= {} if layout == "per head" else {"attn_kv_b": latent}
        names = {name for name in found if TensorName.parse(name).is_latent}
        assert names == {f"blk.{i}.{name}.weight" for i in (0, 1) for name in expected}
        for name, sums in expected.items():
            entry = found[f"blk.0.{name}.weight"]
            np.testing.assert_allclose(entry.sums, sums, rtol=1e-4)
            assert (entry.counts == len(tokens)).all()
        x, q_latent = (
            np.concatenate([getattr(layer, name) for layer in layers]) for name in ("x", "q_latent")
        )
        for name, inputs in (("attn_kv_a_mqa", x), ("attn_q_a", x), ("attn_q_b", q_latent)):
            sums = found[f"blk.0.{name}.weight"].sums[0]
            np.testing.assert_allclose(sums, (inputs**2).sum(0), rtol=1e-4)
        shared_experts = {f"blk.1.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
        assert shared_experts <= found.keys()


def test_heads_are_no_experts(without_scaling, tokens):
    """Showing every token to all experts leaves attention as it is."""
    with load_model(without_scaling["per head"]) as model:
        plain, shown = (
            collect(model, tokens[:60], n_ctx=30, cold_experts=method).entries
            for method in ("none", "all-experts")
        )
    assert plain.keys() == shown.keys()
    for name in plain:
        if TensorName.parse(name).is_latent:
            assert np.array_equal(plain[name].sums, shown[name].sums)


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_importances_of_one_layout_serve_the_others(without_scaling, tokens, tmp_path, suffix):
    shapes, matrices = {}, {}
    for layout, path in without_scaling.items():
        with load_model(path) as model:
            save_imatrix(collect(model, tokens[:60], n_ctx=30), tmp_path / f"{layout}.{suffix}")
        matrices[layout] = load_imatrix(tmp_path / f"{layout}.{suffix}")
        with open_gguf(path) as file:
            shapes[layout] = {t.name: t.shape for t in file.tensors if ".attn_" in t.name}
    for given, imatrix in matrices.items():
        for tensors in shapes.values():
            for name, shape in tensors.items():
                found = imatrix.importance(name, shape)
                if found is None:  # only queries are the input of k_b
                    assert TensorName.parse(name).is_norm or (given, ".attn_k_b." in name) == (
                        "joined",
                        True,
                    )
                else:
                    n_matrices = shape[0] if len(shape) == 3 else 1
                    assert found.shape == (n_matrices, shape[-1]) and (found > 0).all()
    # The heads of one matrix have the mean of all.
    heads = matrices["per head"].importance("blk.0.attn_k_b.weight", (4, 32, 24))
    folded = matrices["per head"].importance("blk.0.attn_k_b.weight", (4 * 32, 24))
    np.testing.assert_allclose(folded[0], heads.mean(0), rtol=1e-5)
