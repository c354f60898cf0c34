"""Models whose rotation depends on the size of the context."""

from __future__ import annotations

import numpy as np
import torch
from iqforge.runtime.model import load_model

from .shared import shared


def test_each_sequence_of_a_batch_has_the_rotation_of_its_own_context():
    with load_model(shared("golden/convert/phi3/expected-f32.gguf")) as model:
        texts = [np.arange(3, 3 + n) for n in (20, 40, 7)]
        original = model.hyperparameters.integer("rope.scaling.original_context_length")
        contexts = (original // 2, 4 * original, original // 2)
        alone = [model.extend(t, model.new_state(n)) for t, n in zip(texts, contexts, strict=True)]
        states = [model.new_state(n) for n in contexts]
        together = model.extend_together(list(zip(texts, states, strict=True)))
        assert (together - torch.stack(alone)).abs().max() < 1e-5
        other = model.extend(texts[0], model.new_state(contexts[1]))
        assert (other - alone[0]).abs().max() > 1e-3
