"""Conversations with a model that several ranks evaluate."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from iqforge.errors import EvaluationError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.chat.session import Answer, ChatSession
from iqforge.runtime.chat.template import ChatTemplate
from iqforge.runtime.model import Model
from iqforge.runtime.parallel import decision as decision_module
from iqforge.runtime.parallel.decision import Decision
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.share import Share
from iqforge.runtime.sampling.settings import SamplerSettings
from iqforge.runtime.split_model import make_plan, make_stage
from iqforge.runtime.weights.placement import CPU

from .chat_sessions import answered, assistant, user
from .shared import shared
from .terminal import Terminal
from .thread_ranks import ThreadMeeting, on_ranks

FORM = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", {})
DRAWN = SamplerSettings(temperature=0.9, repeat_penalty=1.3, seed=5)


def opened(name: str, mode: str, meeting: ThreadMeeting) -> Model:
    source = open_gguf(shared(f"golden/convert/{name}/expected-f32.gguf"))
    if mode == "layer":
        return Model(source, stage=make_stage(source, (1, 1), meeting, CPU))
    return Model(source, share=Share(make_plan(source, (1, 1)), meeting.rank, meeting))


def dialogue(session: ChatSession) -> list[str]:
    """Return the answers of three turns and of another conversation."""
    messages, found = [], []
    for text in ("ab cd", "and then?", "why?"):
        messages.append(user(text))
        found.append(answered(session, messages).text)
        messages.append(assistant(found[-1]))
    return [*found, answered(session, [user("other")], seed=9).text]


@pytest.mark.parametrize(
    "mode, name",
    [
        pytest.param("graph", "qwen3_5", marks=pytest.mark.slow),
        ("graph", "gemma3"),
        ("layer", "llama"),
    ],
)
def test_the_first_rank_answers_as_one_process(mode, name):
    """Also with samplers that depend on the past, and layers that cannot be cut back."""

    def work(rank: int, meeting: ThreadMeeting) -> list[str]:
        with opened(name, mode, meeting) as model:
            session = ChatSession(model, FORM, DRAWN, context=300)
            if rank:
                session.attend()
                return []
            found = dialogue(session)
            with pytest.raises(EvaluationError, match="start over"):  # nobody hears of it
                answered(session, [user("long " * 300)])
            found.append(answered(session, [user("ab cd")]).text)
            session.dismiss()
            return found

    with Model(open_gguf(shared(f"golden/convert/{name}/expected-f32.gguf"))) as model:
        session = ChatSession(model, FORM, DRAWN, context=300)
        expected = [*dialogue(session), answered(session, [user("ab cd")]).text]
        with pytest.raises(UsageError, match="alone"):
            session.attend()
    assert any(expected) and on_ranks(2, work) == [expected, []]


def test_all_ranks_end_an_answer_at_the_same_token():
    def work(rank: int, meeting: ThreadMeeting) -> tuple[int, str]:
        with opened("llama", "graph", meeting) as model:
            session = ChatSession(model, FORM, SamplerSettings(), context=300, ignore_eos=True)
            record, asked = Answer(), []

            def interrupted() -> bool:
                asked.append(0)
                return rank == 0 and len(asked) > 3

            list(session.answer([user("ab")], record=record, interrupted=interrupted))
            assert record.generation is not None
            return len(record.generation.tokens), record.reason

    first, second = on_ranks(2, work)
    assert first == second and 3 < first[0] < 280 and first[1] == "interrupted"


class Clock:
    """The clock of decisions: `pass_by` moves it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(decision_module, "time", clock)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_a_decision_is_asked_for_now_and_then(monkeypatch):
    Clock(monkeypatch)  # stands still: steps are quick
    asked = []

    def work(rank: int, meeting: ThreadMeeting) -> list[bool]:
        def wanted() -> bool:
            asked.append(rank)
            return rank == 1 or len(asked) > 6

        decision = Decision(meeting.tokens, wanted)
        return [decision() for _ in range(500)]

    first, second = on_ranks(2, work)
    assert first == second and first[-1] and not any(first[:3])
    assert first == sorted(first) and len(asked) < 20, "what is true stays so"


@pytest.mark.parametrize("wait", [0.0, 0.1])
def test_slow_steps_ask_every_time(wait, monkeypatch):
    asked, clock = [], Clock(monkeypatch)

    def share(values: torch.Tensor) -> torch.Tensor:
        asked.append(values.tolist())
        return values

    decision = Decision(share, lambda: False)
    for _ in range(4):
        clock.pass_by(wait)
        decision()
    assert (len(asked) == 4) == (wait > 0)


@pytest.mark.full
def test_ctrl_c_on_a_terminal_is_for_the_first_rank(tmp_path):
    """It stops the answer, and the conversation continues; /exit ends all ranks."""
    model = shared("golden/convert/llama/expected-f32.gguf")
    one = Terminal(
        *("chat", "-m", str(model), "--device", "cpu", "--chat-template", "chatml"),
        *("--ignore-eos", "-c", "200000", "-s", "3", "-sm", "graph", "-ts", "1,1"),
    )
    try:
        one.until("> ")
        one.type("Count without end\n")
        one.until("end\r\n.{40}")
        one.type("\x03")
        one.until(r"\[interrupted\]\s+> ")
        one.type("Again\n")
        one.until("Again\r\n.{40}")
        one.type("\x03")
        one.until(r"\[interrupted\]\s+> ")
        one.type("/exit\n")
        assert one.process.wait(240) == 0
    finally:
        one.close()


def test_only_the_first_rank_hears_ctrl_c():
    """The process that started them keeps waiting."""
    program = (
        "import os, signal, sys, time\n"
        "first = os.environ['RANK'] == '0'\n"
        "heard = []\n"
        "if first: signal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "if first: os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(0.2)\n"
        "sys.exit(7 if first and heard else 0)\n"
    )
    before = signal.getsignal(signal.SIGINT)
    assert run_ranks([sys.executable, "-c", program], 2, os.environ, interactive=True) == 7
    assert signal.getsignal(signal.SIGINT) is before
