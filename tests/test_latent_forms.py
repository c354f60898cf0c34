"""Which form latent attention takes in a prompt, by shapes alone."""

import pytest
from iqforge.runtime.cuda.prompt import latent_absorbed
from iqforge.runtime.cuda.prompt.latent_absorbed import MOST_QUERIES, is_absorbed


@pytest.mark.parametrize(
    "n_queries, n_positions, heads, absorbed",
    [
        (1, 8191, 128, False),
        (1, 8192, 128, True),
        (48, 8192, 128, True),
        (49, 8192, 128, False),
        (MOST_QUERIES, 32768, 128, True),
        (MOST_QUERIES + 1, 1 << 20, 128, False),
        (1, 32768, 16, False),
        (1, 65536, 16, True),
    ],
)
def test_few_queries_after_many_positions_are_absorbed(n_queries, n_positions, heads, absorbed):
    assert is_absorbed(n_queries, n_positions, heads) == absorbed


@pytest.mark.parametrize("form", [True, False])
def test_a_form_can_be_forced(monkeypatch, form):
    monkeypatch.setattr(latent_absorbed, "forced", form)
    assert is_absorbed(1, 65536, 16) is form is is_absorbed(4096, 4096, 1)
