"""Answers in words: reasoning told apart from text, and what an answer must follow after it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.conversation.metrics import Piece
from kvlite.engine.detokenizer import AnswerText
from kvlite.engine.grammar import Grammar
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.reader import AnswerReader, text_in
from kvlite.model.answers.thinking import (
    NO_REASONING,
    NO_SWITCH,
    ends_with_token,
    opens_reasoning,
)
from kvlite.model.grammar import is_schema, whole_schema_rule
from kvlite.model.load import LoadedModel


class Reasoning:
    """Tells in an answer what is reasoning from what is text."""

    def __init__(self, model: LoadedModel, ids: Sequence[int], begun: int) -> None:
        """`ids` are the prompt, which may begin reasoning, and what there is of the answer: the
        last `begun` of them."""
        self._reader, self._count = _read(model, ids, begun)

    def told(self, piece: Piece) -> Piece:
        """The next piece of the answer, with its reasoning in its own place."""
        self._count += self._reader.is_reasoning
        parts = self._reader.push(piece.raw)
        if piece.finish_reason is not None:
            parts += self._reader.flush()
        text, reasoning = text_in(parts, "text"), text_in(parts, "reasoning")
        return replace(piece, text=text, reasoning=reasoning, reasoning_tokens=self._count)


def _read(model: LoadedModel, ids: Sequence[int], begun: int) -> tuple[AnswerReader, int]:
    form, at, count = model.answer_form, len(ids) - begun, 0
    reader = AnswerReader(form, reasoning=opens_reasoning(form, model.tokenizer, ids[:at]))
    text = AnswerText(model.tokenizer, (), model.spelled)
    for token in ids[at:]:
        count += reader.is_reasoning
        reader.push(text.push(token)[1])
    reader.settle()
    return reader, count


def reasoning_notes(
    model: LoadedModel, settings: Settings, former: Settings | None
) -> Iterator[str]:
    """Notes on settings of reasoning that change nothing in this model, but for those of the
    `former` message."""
    before = Settings() if former is None else former
    thinking, most = settings.thinking, settings.reasoning_budget
    if thinking not in ("auto", before.thinking) and not model.has_switch:
        yield NO_SWITCH.format(thinking)
    is_new = most not in (None, before.reasoning_budget)
    if is_new and not ends_with_token(model.answer_form, model.tokenizer):
        yield NO_REASONING.format(most)


def turn_grammar(
    model: LoadedModel, settings: Settings, ids: Sequence[int], begun: int = 0
) -> Grammar | None:
    """What an answer must follow: a schema once its reasoning has ended, and a limit of reasoning;
    None if nothing. Args are those of `Reasoning`, errors those of `Grammar`."""
    text, most, form = settings.schema, settings.reasoning_budget, model.answer_form
    at = len(ids) - begun
    if form.reasoning is not None and (is_schema(text) if text else most is not None):
        if begun and most is not None:  # it may have been more before
            most = max(most, _read(model, ids, begun)[1])
        text = answer_grammar(
            form,
            model.tokenizer,
            model.vocabulary.trie,
            text=text and whole_schema_rule(text),
            opened=opens_reasoning(form, model.tokenizer, ids[:at]),
            most_reasoning=most,
            ends=model.stop_ids,
        )
    if not text:
        return None
    grammar = Grammar(model.vocabulary, text)
    for token in ids[at:]:
        grammar.take(token)
    return grammar
