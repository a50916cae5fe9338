"""What a first visitor may click: a document and a question, a chat, and what fits here."""

from gradio.components.chatbot import ExampleMessage

from kvlite.bench.prose import bundled_prose

DOCUMENT = "constitution.txt"
_AFTER_IT = "\n\nAmendments\n"

QUESTION = "What is the term of office of the President?"
CHAT = "Explain in three sentences why the sky is blue."
# As gradio's chat takes them. The last one only shows the settings, with their plan.
EXAMPLES: list[ExampleMessage] = [
    {"text": QUESTION, "display_text": f"Ask a 20-page document: {QUESTION}"},
    {"text": CHAT, "display_text": f"Chat: {CHAT}"},
    {"text": "", "display_text": "See what fits this machine"},
]


def sample_document() -> str:
    """The Constitution of the United States without its amendments, some 6,000 tokens."""
    text = bundled_prose()
    return text[: text.index(_AFTER_IT)]
