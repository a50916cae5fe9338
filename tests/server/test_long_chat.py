"""A chat about a long text on the embedded model: what each request reads."""

from pathlib import Path
from typing import Any

import pytest

from kvlite.bench.prose import bundled_prose
from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving

TEXT = f"{bundled_prose()[:26_000]}\n\nWhat is this about?"


def asked(server: Server, messages: list[Any]) -> tuple[str, int, dict[str, Any]]:
    made = server.client.chat.completions.create(model="smollm2-135m", messages=messages)
    assert made.usage is not None
    ledger = made.usage.model_dump()["kvlite"]
    return made.choices[0].message.content or "", made.usage.prompt_tokens, ledger


@pytest.mark.long
def test_a_long_chat_is_read_once(tmp_path: Path) -> None:
    settings, config = Settings(max_new_tokens=24), ServerConfig(folder=tmp_path)
    with serving(settings, config) as server:
        answer, count, ledger = asked(server, said(TEXT))
        assert ledger["prompt_tokens"] == count > 6000
        whole = ledger["time_to_first_token_s"]
        second = said(TEXT, answer, "And who wrote it?")
        later, _, ledger = asked(server, second)
        assert ledger["prompt_tokens"] <= 64 and ledger["time_to_first_token_s"] < whole / 10
        asked(server, said("Give a short title for a chat about herons."))
        _, _, ledger = asked(server, said(TEXT, answer, "And who wrote it?", later, "When?"))
        assert ledger["prompt_tokens"] <= 64 and ledger["time_to_first_token_s"] < whole / 10
        _, _, ledger = asked(server, said(TEXT.replace("about?", "not about?")))
        assert ledger["prompt_tokens"] <= 64
        again, _, _ = asked(server, second)
        assert again == later
    with serving(settings, config) as server:
        again, _, ledger = asked(server, second)
        assert again == later
        assert ledger["prompt_tokens"] <= 64 and ledger["time_to_first_token_s"] < whole / 10
