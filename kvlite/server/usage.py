"""What an answer cost, and answers as a whole."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlite.conversation.metrics import GenerationMetrics, Piece
from kvlite.model.answers.reader import AnswerReader, Part, text_in
from kvlite.model.chat_template import chat_tokens
from kvlite.model.text_limit import require_fits, too_long
from kvlite.server.chances import Chances
from kvlite.server.messages import Plain
from kvlite.server.refusals import Refusal, in_fields
from kvlite.server.served_model import Ask, ServedModel, Token
from kvlite.server.shown_chances import ShownChances
from kvlite.server.tools import call_id


@dataclass
class Call:
    """A call of a tool; its `arguments` are JSON, unless the answer was cut in their midst."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=call_id)


@dataclass
class Choice:
    """One of the answers.

    Attributes:
        parts: as they came.
    """

    reason: str = "stop"
    chances: list[Chances] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    prompt: tuple[Chances, ...] = ()

    @property
    def text(self) -> str:
        """Its text."""
        return text_in(self.parts, "text")


@dataclass
class Usage:
    """Tokens of a request, and the metrics of its last answer, with the reading of all of them.

    Attributes:
        fresh: tokens of the prompt that were read for the first answer.
        generated: tokens of all answers.
        reasoned: those of them that are reasoning.
        first_s: seconds until the first token of the first answer.
        last: what came last.
        notes: sentences on the prompt.
    """

    model: str
    prompt: int
    fresh: int | None = None
    generated: int = 0
    reasoned: int = 0
    first_s: float = 0.0
    last: Piece | None = None
    notes: Sequence[str] = ()

    @property
    def metrics(self) -> GenerationMetrics | None:
        """Of the last answer, if one has begun."""
        return None if self.last is None else self.last.metrics

    def add(self, token: Token) -> None:
        """Count a token."""
        assert token.piece is not None
        self.last = token.piece
        if self.fresh is None:
            metrics = self.last.metrics
            self.fresh = metrics.ahead_tokens + metrics.prompt_tokens
            self.first_s = metrics.ahead_s + metrics.time_to_first_token_s
        self.generated += token.piece.token_id is not None

    def join(self, other: "Usage") -> None:
        """Count what another prompt of the same request cost; its tokens are counted already."""
        self.last = other.last or self.last
        if other.fresh is not None:
            self.first_s = self.first_s or other.first_s
            self.fresh = (self.fresh or 0) + other.fresh
        self.generated += other.generated
        self.reasoned += other.reasoned

    def reason(self, token: Token) -> str | None:
        """Why an answer ended with this token, None if it goes on; a Refusal for lack of memory."""
        assert token.piece is not None
        reason = token.piece.finish_reason
        if reason == "memory":
            said = "the answer ended for lack of memory: ask for less, or send kvlite.budget"
            raise Refusal(said, 503, code="out_of_memory")
        return "stop" if reason == "interrupted" else reason

    @property
    def known(self) -> int:
        """Tokens of the prompt that had been read before."""
        return 0 if self.fresh is None else max(0, self.prompt - self.fresh)

    def plain(self) -> dict[str, Any]:
        """As in OpenAI's objects; `kvlite` has the metrics, with the model's name here, no path."""
        own = None
        if (metrics := self.metrics) is not None:
            read = {"prompt_tokens": self.fresh, "time_to_first_token_s": self.first_s}
            own = {**metrics.to_json(), **read, "model": self.model}
            own |= {name: in_fields(own[name]) for name in ("failure", "no_speculation")}
            own["notes"] = [*map(in_fields, metrics.notes), *self.notes]
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.known, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoned,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
            "kvlite": own,
        }


@dataclass(frozen=True)
class Heard:
    """What came with one token of an answer, why the answer ended if it did, and how likely the
    tokens of what came were."""

    token: Token
    parts: Sequence[Part] = ()
    reason: str | None = None
    chances: Sequence[Chances] = ()

    @property
    def text(self) -> str:
        """Its text."""
        return text_in(self.parts, "text")


async def heard_of(
    model: ServedModel, ask: Ask, usage: Usage, new_reader: Callable[[], AnswerReader] | None = None
) -> AsyncGenerator[Heard]:
    """An answer as it comes, counted in `usage`; and tokens that are none of it.

    Args:
        new_reader: of one answer; None if all of it is text.
    """
    readers = dict[int, AnswerReader | None]()
    shown = dict[int, ShownChances]()
    usage.notes = ask.notes
    async with aclosing(model.answer(ask)) as tokens:
        async for token in tokens:
            if (piece := token.piece) is None:
                yield Heard(token)
                continue
            usage.add(token)
            if token.choice not in readers:
                shown[token.choice] = ShownChances(model.ready().model)
                readers[token.choice] = None if new_reader is None else new_reader()
            reader, reason = readers[token.choice], usage.reason(token)
            if reader is None:
                parts = [Part("text", piece.text)] if piece.text else []
            else:
                usage.reasoned += reader.is_reasoning
                parts = reader.push(piece.raw)
                parts += reader.flush() if reason is not None else []
            yield Heard(token, parts, reason, shown[token.choice].push(token, reason))


async def gathered(
    model: ServedModel, ask: Ask, new_reader: Callable[[], AnswerReader] | None = None
) -> tuple[list[Choice], Usage]:
    """All answers of a request, and what they cost."""
    choices, usage = [Choice() for _ in range(ask.choices)], Usage(model.names[0], len(ask.ids))
    async with aclosing(heard_of(model, ask, usage, new_reader)) as answer:
        async for heard in answer:
            token = heard.token
            if token.piece is None:
                for choice in choices if token.prompt else ():
                    choice.prompt = token.prompt
                continue
            choice = choices[token.choice]
            choice.parts += heard.parts
            choice.chances += heard.chances
            choice.reason = heard.reason or choice.reason
    return choices, usage


async def prompt_ids(model: ServedModel, encode: Callable[[], list[int]], text: str) -> list[int]:
    """What `encode` returns, in a thread of its own, if it fits. Raises ContextError if `text`
    cannot fit the model, which is known before all of it is tokenized."""
    model.require_short(len(text))
    runner = model.ready()
    most = runner.shape.max_context

    def encoded() -> list[int]:
        require_fits(runner.tokenizer, text, most)
        return encode()

    ids = await asyncio.to_thread(encoded)
    if len(ids) >= most:
        raise too_long(len(ids), most)
    if not ids:
        raise Refusal("there is nothing to answer: send some text", param="prompt")
    return ids


async def message_ids(
    model: ServedModel,
    messages: Sequence[Plain],
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> list[int]:
    """The tokens of a chat, after the server's system prompt if the chat has none. Args and errors
    are those of `prompt_ids` and `chat_tokens`."""
    runner = model.ready()
    system = runner.settings.system
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    encode = partial(chat_tokens, runner.tokenizer, messages, tools, variables, continues=continues)
    texts = [each["content"] for each in messages] + [json.dumps(each) for each in tools]
    return await prompt_ids(model, encode, "\n".join(texts))
