"""Requests that a server is asked at once, answered in this thread."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from kvlite.conversation.runner import Runner
from kvlite.server.config import ServerConfig
from kvlite.server.served_model import Ask, ServedModel, Token
from kvlite.server.state import ServerState
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Task, Work


class Here:
    """An engine whose thread is this one."""

    is_wanted = False

    def __init__(self) -> None:
        self.works: list[Work] = []

    def submit(self, task: Task, title: str, **_: Any) -> Work:
        self.works.append(Work(task, title))
        return self.works[-1]


class Served:
    """A request's tokens, and when each came."""

    def __init__(self) -> None:
        self.tokens: list[int | None] = []
        self.came: list[float] = []

    def put(self, token: Token) -> None:
        assert token.piece is not None
        self.tokens.append(token.piece.token_id)
        self.came.append(perf_counter())


def served(
    runner: Runner, folder: Path, asked: Sequence[tuple[list[int], dict[str, Any]]]
) -> list[Served]:
    """What prompts with settings are answered."""
    engine, config = Here(), ServerConfig(folder=folder, keep=64 << 30, keep_disk=0)
    model = ServedModel(["it"], runner.settings, ServerState(config, cast(Engine, engine)))
    model.use(runner)
    said, works = [Served() for _ in asked], []
    for own, (ids, settings) in zip(said, asked, strict=True):
        answers = partial(model._answers, Ask(ids, settings), [0], own.put)
        works.append(model.answering.submit(answers, lambda: True, lambda: 0))
    for work in engine.works:
        work.do()
    for work in (*engine.works, *works):
        if work.failure is not None:
            raise work.failure
    return said
