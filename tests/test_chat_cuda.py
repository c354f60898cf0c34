"""Samplers on the host with logits of a GPU, and conversations there."""

from __future__ import annotations

import iqforge
import pytest
import torch
from iqforge.runtime.chat.session import ChatSession
from iqforge.runtime.chat.template import ChatTemplate
from iqforge.runtime.generate import generate_tokens
from iqforge.runtime.sampling.chain import SamplerChain
from iqforge.runtime.sampling.settings import SamplerSettings

from .chat_sessions import answered, assistant, user
from .tiny_cases import CASES, SMALL
from .tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EVERYTHING = SamplerSettings(
    temperature=0.9,
    seed=3,
    typical_p=0.98,
    top_n_sigma=2.5,
    xtc_probability=0.3,
    dynatemp_range=0.3,
    repeat_penalty=1.2,
    frequency_penalty=0.1,
    dry_multiplier=0.8,
)
SETTINGS = [EVERYTHING, SamplerSettings(mirostat=2, seed=4)]
PROMPT = list(range(40, 70))
FORM = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3"])
def folder(request, tmp_path_factory):
    return make_tiny_model(
        CASES[request.param], SMALL, tmp_path_factory.mktemp(request.param)
    ).folder


def chain_of(model, settings: SamplerSettings) -> SamplerChain:
    return SamplerChain(settings, model.tokenizer.token_bytes, 200)


def drawn(model, settings: SamplerSettings) -> list[int]:
    chain = chain_of(model, settings)
    return list(generate_tokens(model, PROMPT, 40, context=200, chain=chain))


@pytest.mark.parametrize("settings", SETTINGS, ids=["chain", "mirostat 2"])
def test_the_same_seed_gives_the_same_text(folder, settings):
    """In float32 the logits of both devices agree."""
    with iqforge.load_model(folder, "cpu") as model:
        expected = drawn(model, settings)
    with iqforge.load_model(folder, "cuda", precision="f32") as model:
        assert drawn(model, settings) == expected


def followed(model, text: list[int], chain: SamplerChain) -> tuple[list[torch.Tensor], list[int]]:
    """Return the logits before each token of `text`, and what the chain draws from them."""
    state, logits, tokens = model.new_state(200), [], []
    chain.accept(PROMPT)
    more = PROMPT
    for token in text:
        logits.append(model.extend(more, state).cpu())
        tokens.append(chain.sample(logits[-1], state.n_past))
        more = [token]
    return logits, tokens


def test_mirostat_1_draws_from_the_logits_of_the_gpu(folder):
    """Version 1 keeps a whole number of tokens. A rounding can move it by one, so the texts of two
    devices may part; their logits along one text agree.
    """
    settings = SamplerSettings(mirostat=1, seed=5)
    with iqforge.load_model(folder, "cuda", precision="f32") as model:
        text = drawn(model, settings)
        logits, tokens = followed(model, text, chain_of(model, settings))
    assert tokens == text
    with iqforge.load_model(folder, "cpu") as model:
        expected, _ = followed(model, text, chain_of(model, settings))
    for ours, theirs in zip(logits, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()


def test_the_chain_draws_as_the_kernel_does(folder):
    """Steps one by one with logits on the host, and captured steps with the draw in the graph."""
    settings = SamplerSettings(seed=9)
    with iqforge.load_model(folder, "cuda") as model:
        sampling = settings.plain()
        assert sampling is not None
        expected = list(generate_tokens(model, PROMPT, 40, sampling, context=200))
        assert drawn(model, settings) == expected


@pytest.mark.parametrize("settings", [SamplerSettings(temperature=0), EVERYTHING])
def test_turns_on_a_gpu(folder, settings):
    """Steps after a prompt that was cut back, or restored, are those of a whole prompt, but for
    rounding; in float32 texts agree.
    """
    with iqforge.load_model(folder, "cuda", precision="f32") as model:
        session, messages = ChatSession(model, FORM, settings, context=400), []
        for text in ("The function returns a list", "and then?", "why?"):
            messages.append(user(text))
            kept = answered(session, messages)
            alone = answered(ChatSession(model, FORM, settings, context=400), messages)
            assert kept.text == alone.text
            messages.append(assistant(kept.text))
        assert kept.reused > 0
    with iqforge.load_model(folder, "cuda") as model:  # kernels: the cache has what it should
        session, messages = ChatSession(model, FORM, settings, context=400), []
        for text in ("The function returns a list", "and then?", "why?"):
            messages.append(user(text))
            kept = answered(session, messages)
            messages.append(assistant(kept.text))
            assert kept.generation.tokens
            tokens = session._kept.tokens
            assert len(tokens) == session._kept.state.n_past
            again = model.new_state(400)
            fresh = model.extend([*tokens, 5], again)
            here = model.extend([5], session._kept.state)
            assert ((fresh - here).norm() / fresh.norm()).item() < 0.1
            session._kept.tokens = [*tokens, 5]
        assert kept.reused > 0
