"""kvlite: long chats and long documents on the one GPU you own.

    import kvlite
    runner = kvlite.load("smollm2-135m", method="kvx", budget=512)
    answer = runner.generate(runner.tokenizer.encode("Once upon a time"), max_new_tokens=32)
    print(answer.text, answer.metrics.line())

Importing this changes nothing, needs no GPU, and does not import torch until it is used.
"""

from typing import TYPE_CHECKING, Any

from kvlite.config.settings import Settings
from kvlite.errors import KvliteError, Stopped

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.metrics import Answer, GenerationMetrics, Piece
    from kvlite.conversation.runner import Runner, load
    from kvlite.engine.callbacks import Callbacks
    from kvlite.jobs.answer import BatchAnswer
    from kvlite.jobs.run import batch

__version__ = "0.2.0"
__all__ = [
    "Answer",
    "BatchAnswer",
    "Callbacks",
    "Conversation",
    "GenerationMetrics",
    "KvliteError",
    "Piece",
    "Runner",
    "Settings",
    "Stopped",
    "batch",
    "load",
]

_HOMES = {
    "load": "conversation.runner",
    "Runner": "conversation.runner",
    "Conversation": "conversation.conversation",
    "Answer": "conversation.metrics",
    "BatchAnswer": "jobs.answer",
    "batch": "jobs.run",
    "Callbacks": "engine.callbacks",
    "GenerationMetrics": "conversation.metrics",
    "Piece": "conversation.metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvlite' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kvlite.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
