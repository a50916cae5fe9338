"""A chat about a long text on the embedded model: what each request reads."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvlite.bench.prose import bundled_prose
from kvlite.config.settings import Settings
from kvlite.model.load import LoadedModel
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving

TEXT = f"{bundled_prose()[:8_000]}\n\nWhat is this about?"
NEW, ANSWER = 64, 24


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens went through the model, call by call."""
    counts, embed = list[int](), LoadedModel.embed

    def counted(model: LoadedModel, token_ids: Tensor) -> Tensor:
        counts.append(token_ids.numel())
        return embed(model, token_ids)

    monkeypatch.setattr(LoadedModel, "embed", counted)
    return counts


def asked(server: Server, messages: list[Any]) -> tuple[str, int, int]:
    """The answer, tokens of the prompt, and those that are said to have been read."""
    made = server.client.chat.completions.create(model="smollm2-135m", messages=messages)
    assert made.usage is not None
    read = made.usage.model_dump()["kvlite"]["prompt_tokens"]
    return made.choices[0].message.content or "", made.usage.prompt_tokens, read


@pytest.mark.long
def test_a_long_chat_is_read_once(tmp_path: Path, passed: list[int]) -> None:
    settings, config = Settings(max_new_tokens=ANSWER), ServerConfig(folder=tmp_path)

    def little(server: Server, messages: list[Any]) -> str:
        """The answer, for which no more than what is new was read, as is said."""
        passed.clear()
        answer, _, read = asked(server, messages)
        assert read <= NEW and sum(passed) <= 2 * (NEW + ANSWER)  # it is planned, too
        return answer

    with serving(settings, config) as server:
        answer, count, read = asked(server, said(TEXT))
        assert 1500 < count == read <= sum(passed)
        second = said(TEXT, answer, "And who wrote it?")
        later = little(server, second)
        asked(server, said("Give a short title for a chat about herons."))
        little(server, said(TEXT, answer, "And who wrote it?", later, "When?"))
        little(server, said(TEXT.replace("about?", "not about?")))
        assert little(server, second) == later
    with serving(settings, config) as server:
        assert little(server, second) == later
