"""A long prompt is read in slices, and answers that stream go on between them."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as count_from
from itertools import groupby, pairwise
from typing import Any

import openai
import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation import half_read, run_stats
from kvlite.conversation.run_stats import RunStats
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.server.config import ServerConfig
from tests.cli.conftest import model_of
from tests.server.conftest import Server, said, serving
from tests.server.test_together import held, ledger

LONG = "A stork stands on the roof of the old house, and nobody knows why. " * 400
SHORT: dict[str, Any] = {"messages": said("Go on."), "max_tokens": 120}
READ: dict[str, Any] = {"messages": said(LONG), "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = model_of(tmp_path_factory.mktemp("tiny"), 8192)
    folder = tmp_path_factory.mktemp("server")
    with serving(Settings(model=str(model)), ServerConfig(folder=folder)) as found:
        yield found


@pytest.fixture
def alone(server: Server) -> list[str]:
    """The answer of each request by itself."""
    made = [text(both(server, [body])[0]) for body in (SHORT, READ)]
    forget(server)
    return made


def both(server: Server, bodies: list[Any]) -> list[Any]:
    """What comes of requests that are sent at once: answers, or errors."""

    async def ask() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0)
        over, create = held(server), client.chat.completions.create
        asked = list[asyncio.Future[Any]]()
        for body in bodies:  # in this order
            asked.append(asyncio.ensure_future(create(model=server.model.names[0], **body)))
            while len(server.model.answering.waiting) < len(asked):
                await asyncio.sleep(0.01)
        over.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(ask())


def text(made: Any) -> str:
    return str(made.choices[0].message.content)


def forget(server: Server) -> None:
    server.until_idle()
    assert server.model.conversations is not None
    server.model.conversations.kept.clear()


Take = Callable[..., torch.Tensor]


@contextmanager
def chunks(
    patch: pytest.MonkeyPatch, seen: Callable[[LayerPrefill], None], slow: float = math.inf
) -> Iterator[None]:
    """Every chunk of a long prompt is a slice, and `seen` before it is read; it takes too long for
    others if it takes `slow` seconds."""
    take: Take = LayerPrefill.take

    def watched(self: LayerPrefill, *args: Any, **given: Any) -> torch.Tensor:
        if self.end > 4000 and not self.positions.is_meta:  # not while it is planned
            seen(self)
        return take(self, *args, **given)

    with patch.context() as patched:
        patched.setattr(LayerPrefill, "take", watched)
        patched.setattr(run_stats, "SLICE_S", 0.0)
        patched.setattr(run_stats, "SLOW_S", slow)
        yield


def tell_tokens(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Add every token that is drawn to the events."""
    drawn = RunStats.was_drawn

    def token(self: RunStats) -> None:
        events.append("token")
        drawn(self)

    patch.setattr(RunStats, "was_drawn", token)


def test_tokens_come_between_slices_and_are_those_of_each_alone(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()
    with chunks(monkeypatch, lambda _: events.append("chunk")):
        tell_tokens(monkeypatch, events)
        made = both(server, [SHORT, READ])
    assert [text(each) for each in made] == alone
    runs = [len([*same]) for name, same in groupby(events) if name == "chunk"]
    assert sum(runs) > 20 and max(runs) <= 3
    assert events[0] == "token" and events[-1] == "token"
    read, short = ledger(made[1]), ledger(made[0])
    assert (read["generated_tokens"], short["generated_tokens"]) == (8, 120)
    # Seconds of others' tokens are not those of reading, but the first token came after them.
    assert read["prompt_tokens"] / read["prefill_tokens_per_s"] < read["time_to_first_token_s"]
    forget(server)


def test_chunks_get_short_where_others_wait_for_slow_ones(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_stats, "BESIDE_S", 0.0)
    places = list[int]()
    with chunks(monkeypatch, lambda reader: places.append(reader.done), slow=0.0):
        made = both(server, [SHORT, READ])
    assert [text(each) for each in made] == alone
    sizes = [after - before for before, after in pairwise(places) if after > before]
    assert sizes[0] == 1024 and max(sizes[-20:]) == 128
    forget(server)


def test_a_request_for_a_title_is_answered_while_another_reads(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it comes later, and a third that has much to read waits."""
    events = list[str]()
    other: dict[str, Any] = {"messages": said(f"Now. {LONG}"), "max_tokens": 8}
    with chunks(monkeypatch, lambda _: events.append("chunk")):
        tell_tokens(monkeypatch, events)
        made = both(server, [READ, other, SHORT])
    assert [text(each) for each in (made[2], made[0])] == alone
    # All of the short one's tokens came before the first that read.
    runs = [(name, len([*same])) for name, same in groupby(events)]
    assert runs[0][0] == "chunk" and max(size for name, size in runs if name == "chunk") > 3
    before = events[: [at for at, name in enumerate(events) if name == "chunk"][40]]
    assert before.count("token") >= 20
    forget(server)


@pytest.mark.parametrize("way", [{}, {"method": "full", "recall": "off"}], ids=["spans", "full"])
def test_one_that_was_left_goes_on_when_it_is_sent_again(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch, way: dict[str, str]
) -> None:
    """Unless something else is asked first, or it is to be answered otherwise."""
    body: dict[str, Any] = {"messages": said(LONG), "extra_body": {"kvlite": way}, "max_tokens": 8}
    count, titles = list[int](), list[str]()
    with chunks(monkeypatch, lambda _: count.append(1)):
        expected = text(both(server, [body])[0])
    whole, at = len(count), len(count) * 57 // 100
    forget(server)

    def leave(_: LayerPrefill) -> None:
        count.append(1)
        titles.append(server.model.answering.going[0].work.shown.title)
        if len(count) == at:
            server.model.answering.going[0].work.abandon()

    def cut() -> None:
        count.clear()
        assert isinstance(both(server, [body])[0], openai.APIError) and len(count) == at
        server.until_idle()
        assert not server.model.conversations.store_idle()  # type: ignore[union-attr]

    clock = count_from(0, 1000)
    with chunks(monkeypatch, leave):
        monkeypatch.setattr(half_read, "perf_counter", lambda: next(clock))
        cut()
        again = both(server, [body])[0]
        assert text(again) == expected and len(count) == whole and whole - at < whole / 2
        assert " of 0 tokens" not in titles
        # 1,000 seconds by that clock, in which nobody waited for it, are left out.
        assert -1000 < ledger(again)["time_to_first_token_s"] < 0
        forget(server)
        for first, second in (
            ([{"messages": said("Another one."), "max_tokens": 2}], body),
            ([], {**body, "max_tokens": 7}),
        ):
            cut()
            both(server, first)
            assert expected.startswith(text(both(server, [second])[0]))
            assert len(count) == at + whole
            forget(server)


def test_an_error_while_reading_fails_that_request_alone(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the middle: it waits until the other answer has ended, and then fails."""
    going = list[int]()

    def runs_out(reader: LayerPrefill) -> None:
        if reader.done > 3000:
            going.append(len(server.model.answering.going))
            raise torch.OutOfMemoryError("there is no more")

    with chunks(monkeypatch, runs_out):
        short, failed = both(server, [SHORT, READ])
    assert isinstance(failed, openai.APIStatusError) and "out of memory" in str(failed)
    assert text(short) == alone[0] and {*going} == {1, 2}
    forget(server)  # what it gave up for lack of memory
    assert text(both(server, [READ])[0]) == alone[1]
    forget(server)
