"""Where answers end, and the answer that memory is planned for: two numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.config.profiles import Profiles
from kvlite.config.resolve import resolve
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.endings import cut
from kvlite.conversation.metrics import brief, told
from kvlite.conversation.runner import Runner
from kvlite.errors import ContextError
from kvlite.offload.kv import store
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.storage import Disk
from tests.conftest import Tiny

from .test_packed import random_ids

READ, PLANNED, SAID = 150, 64, 170


def chat(model: Any, **settings: Any) -> Conversation:
    given = {"recall": "off", "budget": 40, "chunk": 64, "max_new_tokens": SAID, **settings}
    return Conversation(model, Settings().replace(given))


def said(model: Any, turns: int = 2, **settings: Any) -> list[list[int]]:
    """The answers to a prompt, and to others after it."""
    talk = chat(model, **settings)
    ids = [random_ids(READ if turn == 0 else 30, turn)[0].tolist() for turn in range(turns)]
    return [talk.generate(each, ignore_eos=True).token_ids for each in ids]


GROWING: dict[str, dict[str, Any]] = {
    "spans": {},
    "on disk": {"recall": "disk"},
    "recall in 4 bits": {"recall": "ram", "recall_bits": "4"},
    "per channel": {"kv_bits": "kivi4"},
    "quantized, recall": {"kv_bits": "8", "recall": "ram"},
    "evicts later": {"method": "h2o", "budget": 200, "recall": "ram"},
    "looks up": {"method": "full", "speculate": "auto"},
}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host stores grow by less."""
    monkeypatch.setattr(store, "GROWTH", 40)


def require_alike(model: Any, turns: int = 1, **settings: Any) -> None:
    """Answers longer than planned are those of a plan that covers them."""
    short, covered = (
        said(model, turns, reserve_tokens=planned, **settings) for planned in (PLANNED, SAID)
    )
    assert [len(each) for each in short] == [SAID] * turns
    assert short == covered


@pytest.mark.parametrize("case", GROWING)
def test_an_answer_longer_than_planned_is_that_of_a_plan_that_covers_it(
    llama: Tiny, often: None, case: str
) -> None:
    require_alike(llama.model, 2 if "recall" in case else 1, **GROWING[case])


@pytest.mark.parametrize("recall", ["off", "ram"])
def test_so_it_is_of_several_together(llama: Tiny, often: None, recall: str) -> None:
    """Each copy of the host store grows by itself."""
    found = []
    for planned in (PLANNED, SAID):
        talk = chat(llama.model, recall=recall, reserve_tokens=planned, max_new_tokens=SAID)
        talk.generate(random_ids(READ, 0)[0].tolist(), max_new_tokens=5)
        tokens = dict[int, list[int | None]]({0: [], 1: []})
        for index, piece in talk.ask_each(["7 8 9", "11 12"]):
            assert not isinstance(piece, Exception)
            tokens[index].append(piece.token_id)
        found.append(tokens)
    assert found[0] == found[1] and max(map(len, found[0].values())) > 2 * PLANNED


def test_an_answer_goes_on_until_the_context_is_full(llama: Tiny) -> None:
    """Unless something is said; which limit it was is told, and what to do."""
    runner = Runner(llama.model, Settings(method="full"))
    ended = {
        (500, None): ("context", 1024 - 500),
        (500, 40): ("answer", 40),
        (1000, 40): ("context", 24),
        (984, 40): ("context", 40),
    }
    for (count, most), expected in ended.items():
        metrics = runner.generate([5] * count, most, ignore_eos=True).metrics
        assert (metrics.limit, metrics.generated_tokens) == expected
        assert metrics.finish_reason == "length"
        full = expected[0] == "context"
        assert ("context was full" in metrics.line()) == full
        assert ("context of 1,024 tokens" in cut(metrics)) == full
        assert (f"cut at {expected[1]} tokens: raise --max-tokens" in cut(metrics)) != full
        assert brief(metrics).endswith(
            "the context is full: /set beyond-context compact, then /continue goes on and forgets "
            "the oldest part"
            if full
            else "cut at 40 tokens (/set max-tokens): /continue goes on"
        )
        assert any("/continue goes on" in each for each in told(metrics))


def test_where_the_context_is_full_an_answer_goes_on_if_the_oldest_may_be_forgotten(
    llama: Tiny,
) -> None:
    talk = chat(llama.model, method="full", max_new_tokens=None)
    talk.settings = talk.settings.replace({"logit_bias": ("2:-100",)})
    talk.generate([5] * 900, max_new_tokens=2)
    *_, last = talk.stream("7 8 9")
    assert (last.metrics.limit, last.metrics.compacts) == ("context", False)
    with pytest.raises(ContextError, match="--beyond-context compact"):
        list(talk.continue_answer())
    talk.settings = talk.settings.replace({"beyond_context": "compact"})
    *_, last = talk.continue_answer()
    assert (last.metrics.limit, last.metrics.generated_tokens) == ("context", 511)
    assert brief(last.metrics).endswith("full: /continue goes on and forgets the oldest part")


def test_an_answer_by_a_schema_is_refused_where_it_is_cut(smollm: Runner) -> None:
    """And is not gone on with: what to do depends on the limit that was met."""
    talk = smollm.conversation(schema="json", max_new_tokens=3)
    *_, last = talk.stream("List the planets.")
    assert last.metrics.failure.endswith("what --schema asks for: raise --max-tokens")
    assert cut(last.metrics) == "" and "/continue" not in brief(last.metrics)


def test_an_answer_ends_for_lack_of_memory_where_its_store_cannot_grow(
    llama: Tiny, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on once there is some; what fails once is tried again."""
    (expected,) = said(llama.model, 1, recall="ram")
    talk = chat(llama.model, recall="ram", reserve_tokens=PLANNED)
    prompt = random_ids(READ, 0)[0].tolist()
    with monkeypatch.context() as patch:
        patch.setattr(store, "free_bytes", lambda device: 0)
        answer = talk.generate(prompt, ignore_eos=True)
    assert answer.finish_reason == "memory" and "out of memory" in answer.metrics.failure
    assert answer.token_ids[: PLANNED + 1] == expected[: PLANNED + 1]
    talk = chat(llama.model, recall="ram", reserve_tokens=PLANNED)
    roomier, failed = Index.roomier, list[int]()

    def failing(self: Index, more: int) -> Index:
        failed.append(more)
        if len(failed) in (1, 6):
            raise torch.OutOfMemoryError
        return roomier(self, more)

    monkeypatch.setattr(Index, "roomier", failing)
    answer = talk.generate(prompt, ignore_eos=True)
    assert len(failed) > 10 and answer.token_ids == expected and not answer.metrics.fallbacks


def test_a_disk_that_is_full_ends_an_answer_and_no_conversation(
    llama: Tiny, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(llama.model, recall="disk", reserve_tokens=PLANNED)
    pieces, heard = talk.stream_tokens(random_ids(READ, 0)[0].tolist(), ignore_eos=True), []
    heard.append(next(pieces))
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "_mapped", full)
        heard += pieces
    assert heard[-1].metrics.finish_reason == "memory"
    assert "recall cannot keep anything" in heard[-1].metrics.failure
    assert not heard[-1].metrics.fallbacks
    assert talk.generate([7, 8, 9], ignore_eos=True).finish_reason == "length"


def full(*given: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_what_was_said_of_the_longest_answer_keeps_its_meaning(llama: Tiny, tmp_path: Path) -> None:
    """In profiles and saved conversations of before."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "short.toml").write_text("max_new_tokens = 40\n")
    settings = resolve({}, {}, Profiles(tmp_path).chosen("short", {})).settings
    assert (settings.max_new_tokens, settings.planned_tokens) == (40, 40)
    runner = Runner(llama.model, Settings(method="full"))
    talk = runner.conversation(max_new_tokens=40)
    talk.generate([5] * 20, ignore_eos=True)
    talk.save(tmp_path / "talk.kv")
    again = runner.open(tmp_path / "talk.kv")
    assert len(again.generate([7, 8], ignore_eos=True).token_ids) == 40


def test_the_longest_answer_is_not_what_is_planned_for() -> None:
    planned = {
        (None, 256): 256,
        (40, 256): 40,
        (10**6, 256): 256,
        (10**6, 2048): 2048,
        (300, 2048): 300,
        (None, None): 256,
        (1000, None): 1000,
        (10**6, None): 2048,
    }
    for (most, reserved), expected in planned.items():
        settings = Settings(max_new_tokens=most, reserve_tokens=reserved)
        assert settings.planned_tokens == expected
        assert settings.longest_within(500) == min(500, most or 500)
