"""Answers in words: reasoning told apart from text, and what an answer must follow after it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.conversation.metrics import Piece
from kvlite.engine.grammar import Grammar
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.reader import AnswerReader
from kvlite.model.answers.thinking import opens_reasoning
from kvlite.model.grammar import is_schema, whole_schema_rule
from kvlite.model.load import LoadedModel


def with_reasoning(
    pieces: Iterable[Piece], model: LoadedModel, ids: Sequence[int], *, opened: bool = False
) -> Iterator[Piece]:
    """Pieces of one answer, with what is reasoning in its own place.

    Args:
        ids: the prompt, which may begin reasoning.
        opened: the answer goes on within reasoning.
    """
    form = model.answer_form
    if form.reasoning is None:
        yield from pieces
        return
    opened = opened or opens_reasoning(form, model.tokenizer, ids)
    reader, count = AnswerReader(form, reasoning=opened), 0
    for piece in pieces:
        count += reader.is_reasoning
        parts = reader.push(piece.raw)
        metrics = piece.metrics
        if metrics.finish_reason is not None:
            parts += reader.flush()
            metrics = replace(metrics, reasoning_tokens=count)
        text = "".join(part.text for part in parts if part.kind == "text")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        yield replace(piece, text=text, reasoning=reasoning, metrics=metrics)


def turn_grammar(model: LoadedModel, settings: Settings, ids: Sequence[int]) -> Grammar | None:
    """What an answer to a prompt must follow: a schema once its reasoning has ended, and a limit of
    reasoning; None if nothing. Errors are those of `Grammar`."""
    text, most, form = settings.schema, settings.reasoning_budget, model.answer_form
    if form.reasoning is not None and (is_schema(text) if text else most):
        text = answer_grammar(
            form,
            model.tokenizer,
            model.vocabulary.trie,
            text=text and whole_schema_rule(text),
            opened=opens_reasoning(form, model.tokenizer, ids),
            most_reasoning=most,
            ends=model.stop_ids,
        )
    return Grammar(model.vocabulary, text) if text else None
