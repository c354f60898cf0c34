"""Messages, and answers of a session with what happened."""

from __future__ import annotations

from iqforge.runtime.chat.session import Answer, ChatSession


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def answered(session: ChatSession, messages: list, n: int = 8, **options) -> Answer:
    record = Answer()
    pieces = list(session.answer(messages, n, record=record, **options))
    assert "".join(pieces) == record.text
    return record
