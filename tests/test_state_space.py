"""State-space layers of Mamba-2: the recurrence in chunks against the one by steps."""

from __future__ import annotations

import pytest
import torch
from iqforge.runtime.layers.recurrent.state_space_rule import by_chunks, by_steps


@pytest.mark.parametrize("n, chunk", [(1, 16), (16, 16), (50, 16), (50, 64)])
def test_chunks_are_steps(n, chunk):
    random = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, n, *shape, generator=random)

    x, b, c = draw(6, 8), draw(2, 10), draw(2, 10)
    decay = -torch.nn.functional.softplus(draw(6))
    memory = torch.randn(2, 6, 10, 8, generator=random)
    expected = by_steps(x, b, c, decay, memory)
    for found, wanted in zip(by_chunks(x, b, c, decay, memory, chunk), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    # Head 3 reads and writes by the vectors of the second group.
    alone = by_steps(x[:, :, 3:4], b[:, :, 1:], c[:, :, 1:], decay[..., 3:4], memory[:, 3:4])
    torch.testing.assert_close(alone[0], expected[0][:, :, 3:4])
