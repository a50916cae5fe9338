"""As much of long documents as a model takes with a question, chosen by a text search."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlite.config.settings import Settings
from kvlite.documents import Document
from kvlite.documents.relevant import relevant
from kvlite.errors import ContextError
from kvlite.model.answers.thinking import thinking_variables
from kvlite.model.chat_template import question_about, text_tokens, tokens_of


def relevant_parts(
    documents: Sequence[Document],
    question: str,
    settings: Settings,
    *,
    tokenizer: Any,
    max_context: int,
    seen: int = 0,
) -> list[Document]:
    """The parts of documents that fit a model with a question about them, its answer as planned,
    and what it has `seen` before. Raises ContextError if these leave no room."""
    said = {"system": settings.system, "variables": thinking_variables(settings.thinking)}
    asked = question_about([replace(each, text="") for each in documents], question)
    rest = seen + settings.planned_tokens + tokens_of(tokenizer, asked, max_context, said=said)

    def tokens(text: str) -> int:
        return len(text_tokens(tokenizer, text, first=False))

    found = relevant(documents, question, max_context - rest, tokens)
    if not any(each.excerpt or each in documents for each in found):
        raise ContextError(
            f"the question and its answer leave no room for a part of the document, of "
            f"{max_context:,} tokens that this model was trained for: shorten the question"
        )
    return found
