"""What a step kernel of a layer with a recurrent state has to do."""

from __future__ import annotations

import torch


def check_steps(run, c, expected: torch.Tensor, after) -> None:
    """Compare results and states: updated in place, and moved to and fro between two places.

    run: takes a state, and maybe a second place, a position and that of the first step. c: makes
    copies of the state before the step. after: the state after it.
    """

    def check(out, state) -> None:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.memory, after.memory, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.inputs, after.inputs, rtol=1e-5, atol=1e-6)

    state = c.copied()
    check(run(state), state)
    # To and fro: a step leaves the state that it began with.
    main, other = c.copied(), c.copied()
    other.clear()
    check(run(main, other, 7, 7), other)
    assert torch.equal(main.memory, c.state.memory) and torch.equal(main.inputs, c.state.inputs)
    main, other = other, main
    main.clear()
    check(run(main, other, 10, 7), main)
    assert torch.equal(other.memory, c.state.memory) and torch.equal(other.inputs, c.state.inputs)
