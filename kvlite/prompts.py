"""How documents and a question become one message to the model."""

from collections.abc import Sequence

from kvlite.documents import Document


def question_about(documents: Sequence[Document], question: str) -> str:
    """One user message: every document under its name, then the question.

    The question comes last, so that what the cache keeps is chosen with it in view.
    """
    parts = [f"Document: {document.name}\n\n{document.text.strip()}" for document in documents]
    it = "the document" if len(documents) == 1 else "the documents"
    parts.append(f"Based on {it} above, answer this question: {question.strip()}")
    return "\n\n".join(parts)
