"""What the panel draws of looks at the machine."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvlite.conversation.library import Library
from kvlite.planner.usage import Holding, Part, Place
from kvlite.web.work import Shown
from kvlite_app.engine.active_conversation import Figures
from kvlite_app.engine.disk import Disk, DiskUse
from kvlite_app.engine.live import Sample
from kvlite_app.views.live import live_html
from kvlite_app.views.status import status_html

CARD = Place(
    "NVIDIA RTX",
    "VRAM",
    1000,
    (Part("weights", 500, "bf16"), Part("KV, full attention", 100, "7 of 9"), Part("free", 400)),
)
FIGURES = Figures("ann", "a", Holding(()), 900, 0, 8192, 100, 300, 0, None, 12.5, ())
NOW = Sample(100.0, [CARD], 600, FIGURES, title="Ann's <own>", model="tiny")
FALLBACK = re.compile(r'<line class="fallback" x1="([\d.]+)".*?<title>(.*?)</title>')


def test_every_part_is_told_with_its_bytes() -> None:
    html = live_html([NOW], "ann", "a")
    assert re.findall(r'data-part="(.*?)" data-bytes="(\d+)"', html) == [
        ("weights", "500"),
        ("KV, full attention", "100"),
        ("free", "400"),
    ]
    assert 'data-used="600" data-total="1000"' in html
    assert "900 of 8,192 tokens" in html
    assert "12.5 tokens/s" in html


def test_of_others_only_bytes_are_told() -> None:
    html = live_html([NOW], "ben", "b")
    assert 'data-bytes="100"' in html
    for secret in ("7 of 9", "8,192", "12.5", "Ann"):
        assert secret not in html
    assert "In memory: another user's conversation" in html


def test_the_model_and_the_conversation_in_memory_are_named() -> None:
    assert "Model: <b>tiny</b>" in live_html([NOW], "ben", "b")
    assert "In memory: <b>this conversation</b>" in live_html([NOW], "ann", "a")
    assert "In memory: <b>Ann&#x27;s &lt;own&gt;</b>" in live_html([NOW], "ann", "b")


def test_what_has_read_nothing_is_no_conversation() -> None:
    empty = replace(NOW, figures=replace(FIGURES, seen=0, reading=0))
    assert "In memory: no conversation" in live_html([empty], "ann", "b")


def test_what_is_being_opened_is_told_to_whose_it_is() -> None:
    opening = replace(NOW, figures=None, opening="ann")
    assert "&lt;own&gt;</b>, which is being opened" in live_html([opening], "ann", "a")
    assert "In memory: another user's conversation" in live_html([opening], "ben", "b")
    assert "Ann" not in live_html([opening], "ben", "b")
    nothing = replace(NOW, figures=None, title="", model="")
    assert "In memory: no conversation" in live_html([nothing], "", "a")
    assert "Model: <b>not loaded yet</b>" in live_html([nothing], "", "a")


def test_fallbacks_are_marked_where_they_were_taken() -> None:
    """Two of them, the second by another conversation, which has taken none."""
    samples = [
        NOW,
        replace(NOW, at=110.0, figures=replace(FIGURES, fallbacks=("smaller <chunks>",))),
        replace(NOW, at=130.0, figures=replace(FIGURES, fallbacks=("smaller <chunks>", "4 bits"))),
        replace(NOW, at=160.0, figures=replace(FIGURES, id="b", fallbacks=("half", "of", "it"))),
    ]
    html = live_html(samples, "ann", "a")
    found = [(float(x), name) for x, name in FALLBACK.findall(html)]
    assert [name for _, name in found] == ["smaller &lt;chunks&gt;", "4 bits"]
    # Five minutes are 320 wide.
    assert [320 - x for x, _ in found] == pytest.approx([320 * 50 / 300, 320 * 30 / 300], abs=0.1)
    assert not FALLBACK.findall(live_html(samples, "ben", "b"))


def test_notes_and_errors_call_settings_as_the_page_does() -> None:
    shown = Shown(notes=("--kv-bits 8 costs nothing",), error="too long (--model); --server X")
    html = status_html(shown)
    assert "\u201cBits of what is kept\u201d 8 costs nothing" in html
    assert "too long; --server X" in html


def test_a_reading_is_told_as_it_goes() -> None:
    html = live_html([replace(NOW, figures=replace(FIGURES, seen=0, reading=700))], "ann", "a")
    assert "<dt>Reading</dt><dd>700 tokens</dd>" in html
    assert "<dt>KV kept so far</dt><dd>100 B</dd>" in html
    assert "Context" not in html


def test_what_conversations_take_on_disk_is_told(tmp_path: Path) -> None:
    store, disk = Library(root=tmp_path), Disk()
    assert "On disk" not in live_html([NOW], "ann", "a", disk.of(store))
    for _ in range(2):
        record = store.new()
        store.save(record)
        store.whole(record.id).write_bytes(bytes(3 << 20))
    talks, nbytes, free = Disk().of(store)
    assert talks == 2 and 6 << 20 < nbytes < 7 << 20 and free > 0
    told = live_html([NOW], "ann", "a", DiskUse(2, nbytes, 5 << 30))
    assert "On disk: 2 conversations, 6.0 MiB, 5.00 GiB free" in told
    assert disk.of(store).talks == 0  # it looks again after ten seconds
