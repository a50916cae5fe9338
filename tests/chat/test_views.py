"""The line of status, memory and metrics in words."""

from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

import kvlite
from kvlite.cli.chat.views import memory, status_line
from kvlite.config.units import readable
from kvlite.conversation.metrics import GenerationMetrics, brief, told
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import Callbacks, ReadingBytes
from kvlite.memory.nvml import CardUse
from kvlite.planner.usage import Holding, Part, Place, holding, places
from tests.chat.conftest import Chat

CPU = torch.device("cpu")


def test_status_has_what_fits(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat.session
    assert status_line(session, 80) == "context 0/1,024, KV 0 B"
    chat("Hello there")
    assert session.last is not None
    last = replace(session.last, decode_tokens_per_s=23.4)
    monkeypatch.setattr(Session, "last", last)
    context = f"context {session.talk.cache.seen:,}/1,024"
    kv = f"{context}, KV {readable(session.talk.cache.nbytes)}"
    whole = f"{kv}, 23.4 tokens/s"
    assert status_line(session, len(whole)) == whole
    assert status_line(session, len(whole) - 1) == kv
    assert status_line(session, len(kv) - 1) == context
    assert status_line(session, 9) == context[:9]


def test_every_byte_is_somewhere(runner: kvlite.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()  # which goes up and down
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    talk = runner.conversation(budget=64, method="snapkv:window=8", recall="ram")
    talk.generate(list(range(300, 600)))
    (host,) = places(CPU, holding(runner.model, talk.cache, talk.store, 1000), "auto")
    sizes = {part.name: part.nbytes for part in host.parts}
    weights = {id(each): each for each in runner.model.module.parameters()}
    assert sizes["weights"] >= sum(each.nbytes for each in weights.values())
    assert sizes["KV, full attention"] == talk.cache.nbytes
    assert talk.store is not None
    assert sizes["offloaded KV"] == talk.store.nbytes > 10 * 1024
    assert sizes["search index"] == talk.store.index_bytes > 0
    assert sizes["checkpoints"] == 1000
    assert sum(sizes.values()) == pytest.approx(memory.total, rel=0.02)
    assert sizes["free"] == pytest.approx(memory.available, rel=0.05)
    assert (host.short, host.free) == ("RAM", sizes["free"])


@pytest.mark.parametrize("budget", ["100%", "64"])
def test_what_is_being_read_is_counted_once(runner: kvlite.Runner, budget: str) -> None:
    """Layers that are read where they are, and those that are cut beside the cache."""
    talk, beside = runner.conversation(budget=budget, recall="off"), list[int]()
    talk.generate(list(range(300, 400)), max_new_tokens=1)

    def reading(held: ReadingBytes) -> None:
        found = holding(runner.model, talk.cache, reading=held).device
        told = {part.name: part for part in found}
        assert told["KV read before"].about == "100 tokens" and len(found) == 5
        kv = sum(part.nbytes for name, part in told.items() if "KV" in name)
        beside.append(kv - talk.cache.nbytes)

    talk.read(list(range(400, 600)), callbacks=Callbacks(reading=reading))
    assert beside and all((each > 0) == (budget == "64") for each in beside)
    assert budget == "64" or not any(beside)


def test_a_tier_on_disk_is_a_place_of_its_own(runner: kvlite.Runner) -> None:
    talk = runner.conversation(budget=64, method="snapkv:window=8", recall="disk")
    talk.generate(list(range(300, 600)))
    assert talk.store is not None
    host, disk = places(CPU, holding(runner.model, talk.cache, talk.store), "auto")
    assert "offloaded KV" not in {part.name for part in host.parts}
    assert (disk.short, disk.parts[0].nbytes) == ("disk", talk.store.nbytes)


@pytest.mark.parametrize("asked", [True, False], ids=["by its driver", "by CUDA"])
def test_a_card_is_counted_whole(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing of a GPU here: its driver says 10 bytes more are used than CUDA does."""
    card = CardUse(total=1000, used=710, held=600) if asked else None
    monkeypatch.setattr("kvlite.planner.usage.card_use", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 550)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 600)
    named = SimpleNamespace(name="NVIDIA RTX")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: named)
    held = Holding((Part("weights", 400), Part("KV, full attention", 100)))
    (place, _) = places(torch.device("cuda"), held, "auto")
    assert (place.name, place.short, place.total) == ("NVIDIA RTX", "VRAM", 1000)
    assert {part.name: part.nbytes for part in place.parts} == {
        "weights": 400,
        "KV, full attention": 100,
        "other tensors": 50,
        "allocator": 50,
        "others": 110 if asked else 100,
        "free": 290 if asked else 300,
    }


PLACES = [
    Place(
        "NVIDIA RTX", "VRAM", 100, (Part("weights", 50, "bf16"), Part("KV", 1), Part("free", 49))
    ),
    Place("host memory", "RAM", 200, (Part("offloaded KV", 100, "all of it"), Part("free", 100))),
]


def test_memory_in_words() -> None:
    for place in PLACES:
        console = Console(file=StringIO(), width=60, color_system=None)
        with console.capture() as captured:
            console.print(memory(place))
        first, *lines = captured.get().strip().split("\n")
        assert first == f"{place.name}: {place.used} B of {place.total} B used"
        parts = [f"{part.name} {part.nbytes} B {part.about}".split() for part in place.parts]
        assert [line.split() for line in lines] == parts


@pytest.fixture
def metrics(chat: Chat) -> GenerationMetrics:
    chat.session.change(budget="64", method="snapkv:window=8")
    chat("word " * 200)
    assert chat.session.last is not None
    return chat.session.last


def test_an_account_in_a_line(metrics: GenerationMetrics) -> None:
    seen, kept = metrics.seen_tokens, metrics.kept_entries_mean
    share = round(100 * kept / seen)
    assert brief(metrics).startswith(f"from {kept:,.0f} of {seen:,} tokens ({share}%)")
    assert brief(metrics).endswith("cut at 6 tokens (/set max-tokens): /continue goes on")
    whole = replace(metrics, kept_entries_mean=float(seen), finish_reason="stop", recalled_bytes=0)
    assert brief(whole).startswith(f"from all {seen:,} tokens · first token")
    assert brief(whole).endswith("tokens/s")
    assert "the part is kept" in brief(replace(metrics, finish_reason="interrupted"))
    short = replace(metrics, finish_reason="memory", fallbacks=("8 bits",))
    assert "memory was short: 8 bits" in brief(short)
    assert brief(short).endswith("ended for lack of memory")
    nearly = replace(metrics, kept_entries_mean=seen - 0.1)
    assert "(99%)" in brief(nearly)  # not all is not 100%


def test_an_account_in_sentences(metrics: GenerationMetrics) -> None:
    said = " ".join(told(replace(metrics, notes=("mind the gap",))))
    for part in (
        f"Read {metrics.prompt_tokens:,} tokens",
        "Answered 6 tokens",
        "allowed, 6 tokens, which /set max-tokens changes; /continue goes on.",
        f"{metrics.seen_tokens:,} tokens",
        "chosen by snapkv:window=8, with a budget of 64 a KV head",
        "stays in host memory",
        "Note: mind the gap.",
    ):
        assert part in said
    gone = " ".join(told(replace(metrics, host_kv_bytes=0)))
    assert "What was dropped is gone" in gone
    everything = replace(metrics, kept_entries_mean=float(metrics.seen_tokens), host_kv_bytes=0)
    assert "What was dropped is gone" not in " ".join(told(everything))


def test_what_vram_allows_comes_first(runner: kvlite.Runner) -> None:
    talk = runner.conversation()
    talk.generate([300, 301, 302])
    allowed, host = places(CPU, holding(runner.model, talk.cache, talk.store), "64MiB")
    assert (allowed.short, allowed.total, host.short) == ("VRAM", 64 << 20, "RAM")
    assert sum(part.nbytes for part in allowed.parts) == 64 << 20
    assert {part.name for part in allowed.parts} == {"weights", "KV, full attention", "free"}
