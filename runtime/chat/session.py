"""A conversation with a model, whose cache keeps what the next turn begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import EvaluationError, UsageError
from ..generate import Generation, continued, end_tokens, new_constraint
from ..model import Model
from ..network.sampling import GREEDY
from ..parallel.decision import Decision
from ..sampling.chain import Constraint, SamplerChain
from ..sampling.settings import SamplerSettings
from ..tokenizer.stream import StopText
from ..tokens import n_common
from ..weights.hyperparameters import Hyperparameters
from .channels import AnswerStream
from .conversation_text import conversation_tokens, without_system
from .kept_sequence import KeptSequence
from .options import ChatOptions
from .template import ChatTemplate, Message, chosen_template

MOST_CONTEXT = 8192  # that is allocated without being asked for


@dataclass(frozen=True)
class _Request:
    """What an answer is computed from: the tokens of the conversation, those of them after which to
    take a snapshot, the most tokens, and the seed.
    """

    tokens: list[int]
    stable: int
    n: int | None
    seed: int


@dataclass
class Answer:
    """What happened while a model answered.

    message: the answer as a message; of a model that answers in channels, its final one, and what
    it thought. reason: "end" of the turn, a "stop" text, the most tokens that were asked for
    ("length"), a full "context", or "interrupted". reused: tokens of the prompt that were in the
    cache.
    """

    text: str = ""
    message: Message = field(default_factory=dict)
    reason: str = ""
    reused: int = 0
    generation: Generation = field(default_factory=lambda: Generation(0))


def chat_context(hyperparameters: Hyperparameters, context: int | None) -> int:
    """Return the tokens of a conversation to allocate: `context`, those that the model was trained
    for if it is 0, a default without any. ConfigError for 0 if the file does not say how many.
    """
    if context is None:
        return min(hyperparameters.integer("context_length", MOST_CONTEXT), MOST_CONTEXT)
    return context or hyperparameters.integer("context_length")


class ChatSession:
    """One sequence of `model` that answers conversations.

    Consecutive calls of `answer` evaluate only what differs from the sequence so far, such as the
    last message. context: see `chat_context`. template: else the model's own.
    variables: what the template is given besides messages, such as `enable_thinking`. constraint:
    returns, for every answer, what it has to look like.

    If several ranks evaluate the model, each has a session. The first one answers; the others call
    `attend`, or `answer` as often as the first.
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        settings: SamplerSettings | None = None,
        *,
        context: int | None = None,
        stop: Sequence[str] = (),
        special: bool = False,
        ignore_eos: bool = False,
        variables: Mapping[str, Any] | None = None,
        constraint: Callable[[], Constraint] | None = None,
    ):
        self.model, self.template = model, template
        self.settings = settings or SamplerSettings()
        self.stop, self.special, self.variables = tuple(stop), special, dict(variables or {})
        self.context = chat_context(model.hyperparameters, context)
        self.end = frozenset() if ignore_eos else end_tokens(model)
        self._constraint = constraint
        self._kept = KeptSequence(model, self.context)

    @classmethod
    def with_options(
        cls,
        model: Model,
        options: ChatOptions,
        *,
        template: ChatTemplate | None = None,
        has_tools: bool = False,
    ) -> ChatSession:
        """Return a session as `options` say. template: if it has been read already."""
        metadata, file = model.source.metadata, str(model.source.path)
        grammar = options.grammar_source()
        return cls(
            model,
            template or chosen_template(metadata, options.chat_template, has_tools, file=file),
            options.settings(),
            context=options.context,
            stop=options.stop,
            special=options.special,
            ignore_eos=options.ignore_eos,
            variables=options.variables(),
            constraint=new_constraint(model, grammar, end_tokens(model)),
        )

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text of a conversation. A system message goes into the first message of the
        user if the template has no place for it.
        """
        if messages and messages[0].get("role") == "system" and not self.template.keeps_system:
            messages = without_system(messages)
        return self.template.render(
            messages, add_generation_prompt=add_generation_prompt, **self.variables | variables
        )

    def tokens(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins."""
        return conversation_tokens(self.model.tokenizer, self.render(messages, **variables))

    def answer(
        self,
        messages: Sequence[Message],
        n: int | None = None,
        *,
        record: Answer | None = None,
        seed: int | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        **variables: Any,
    ) -> Iterator[str]:
        """Return the model's answer to a conversation, in pieces as it comes; `record` gets the
        rest.

        n: the most tokens; None or negative: until the context is full. interrupted: is asked
        before every token whether to end. Raise EvaluationError for a conversation that does not
        fit the context or becomes no text, ChatTemplateError for one that the template refuses.
        """
        record = record if record is not None else Answer()
        tokens = self.tokens(messages, **variables)
        if not tokens:
            raise EvaluationError("the chat template makes no text of the conversation")
        free = self.context - len(tokens)
        if free < 1:
            raise EvaluationError(
                f"the conversation has {len(tokens)} tokens, and the context {self.context}: start"
                " over, or allocate a larger one (-c)"
            )
        stable = self._stable(messages, tokens, variables)
        seed = self.settings.seed if seed is None else seed
        request = _Request(tokens, stable, n, seed)
        if self.model.group is None:
            return self._answered(request, record, interrupted)
        return self._announced_answer(request, record, interrupted)

    def attend(self) -> None:
        """Evaluate what the first rank answers, until it calls `dismiss`: for the other ranks of a
        model. Raise UsageError where there is a single process.
        """
        if self.model.group is None:
            raise UsageError("this process evaluates the model alone")
        while (request := self._announced(None)) is not None:
            # An error of the prediction itself is that of all ranks, and the first one handles it.
            with suppress(EvaluationError):
                for _ in self._answered(request, Answer(), self._decided(lambda: False)):
                    pass

    def dismiss(self) -> None:
        """End `attend` of the other ranks, if there are any."""
        if self.model.group is not None:
            self._announced(None)

    def _announced_answer(
        self, request: _Request, record: Answer, interrupted: Callable[[], bool]
    ) -> Iterator[str]:
        if (first := self._announced(request)) is not None:
            yield from self._answered(first, record, self._decided(interrupted))

    def _announced(self, request: _Request | None) -> _Request | None:
        """Return the request of the first rank; its next one may be long in coming."""
        group = self.model.group
        assert group is not None
        group.await_first()
        return group.from_first(request)

    def _decided(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Return what says on all ranks, before the same token, whether to end: as `interrupted`
        of the first one does.
        """
        group = self.model.group
        assert group is not None
        return Decision(group.tokens, interrupted)

    def clear(self) -> None:
        """Forget the sequence. Not needed for a new conversation, which replaces the old one."""
        self._kept.clear()

    def _answered(
        self, request: _Request, record: Answer, interrupted: Callable[[], bool]
    ) -> Iterator[str]:
        tokens, n, state = request.tokens, request.n, self._kept.state
        free = self.context - len(tokens)
        limit = free if n is None or n < 0 else min(n, free)
        generation = record.generation = Generation(len(tokens))
        settings = replace(self.settings, seed=request.seed)
        stream = AnswerStream(self.model.tokenizer, self.special)
        stops, record.reason = StopText(self.stop), "interrupted"
        self.model.prepare(state, len(tokens))
        started = time.perf_counter()
        try:
            record.reused = self._kept.reuse(tokens)
            if not self._kept.evaluate(tokens, request.stable, interrupted):
                return
            before = time.perf_counter() - started
            chain = self._chain(settings, tokens)
            rest = tokens[state.n_past :]
            plain = settings.plain() or GREEDY
            following = continued(
                self.model, rest, limit, plain, state, self.end, generation, chain
            )
            for token in following:
                self._kept.holds(tokens + generation.tokens)
                if token in self.end and not self.special:
                    continue
                if piece := stops.feed(stream.feed(token)):
                    record.text += piece
                    yield piece
                if stops.found is not None or interrupted():
                    break
            generation.prompt_seconds += before
            record.reason = self._reason(generation, stops, limit, free, interrupted)
            if stops.found is None and (piece := stops.feed(stream.end()) + stops.end()):
                record.text += piece
                yield piece
        finally:
            record.message = stream.message(record.text)
            self._kept.holds(tokens + generation.tokens)

    def _reason(
        self,
        generation: Generation,
        stops: StopText,
        limit: int,
        free: int,
        interrupted: Callable[[], bool],
    ) -> str:
        if stops.found is not None:
            return "stop"
        if generation.ended:
            return "end"
        if len(generation.tokens) >= limit:
            return "context" if limit == free else "length"
        return "interrupted" if interrupted() else "end"

    def _chain(self, settings: SamplerSettings, tokens: list[int]) -> SamplerChain | None:
        """Return the samplers of an answer, which know the tokens in the cache; None if a kernel or
        `network.sampling` draws.
        """
        constraint = None if self._constraint is None else self._constraint()
        if constraint is None and settings.plain() is not None:
            return None
        token_bytes = self.model.tokenizer.token_bytes
        chain = SamplerChain(settings, token_bytes, self.context, constraint)
        chain.accept(tokens[: self._kept.state.n_past])
        return chain

    def _stable(self, messages: Sequence[Message], tokens: list[int], variables: Any) -> int:
        """Return where to take a snapshot, if the sequence cannot simply be cut back: the tokens
        that the next turn of this conversation has as well, whatever the answer is.
        """
        if self._kept.state.can_be_cut:
            return 0
        text = self.render(messages, add_generation_prompt=False, **variables)
        return n_common(conversation_tokens(self.model.tokenizer, text), tokens[:-1])
