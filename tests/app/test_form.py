"""Settings as controls, and back; what they would take."""

import itertools
import re
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import psutil
import pytest

from kvlite.config.settings import OPTIONS, Settings
from kvlite.conversation.runner import load
from kvlite.errors import SettingError
from kvlite.methods.engine_config import require_meanings
from kvlite_app.engine.service import Service
from kvlite_app.estimate import estimate, verdict_html
from kvlite_app.form import (
    ANSWER,
    FIRST,
    FOLDED,
    Models,
    control,
    shown_value,
    shown_values,
    values_of,
)
from kvlite_app.priorities import DECIDES, PRIORITIES
from kvlite_app.settings_events import SettingsEvents
from kvlite_app.words import WORDS

OTHERS: dict[str, Any] = {
    "chunk": 64,
    "seed": 2**63 - 1,
    "stop": ("END", "two words"),
    "never_lossy": True,
    "temperature": 0.5,
    "recall_entries": 7,
    "system": "Be brief.",
}


@pytest.mark.parametrize("settings", [Settings(), Settings(**OTHERS)], ids=["usual", "others"])
def test_every_setting_comes_back_from_its_control(settings: Settings) -> None:
    with gr.Blocks():
        controls = {name: control(name, getattr(settings, name), Models()) for name in OPTIONS}
    shown = []
    for name, each in controls.items():
        sent = each.postprocess(shown_value(name, getattr(settings, name)))
        shown.append(each.preprocess(sent))
    assert Settings(**values_of(list(OPTIONS), shown)) == settings


def test_settings_have_words_for_people_who_know_no_flags() -> None:
    assert {*FIRST, *ANSWER, *itertools.chain(*FOLDED.values())} == {*OPTIONS} == {*WORDS}
    odd = re.compile("--|`|kvlite|KV head|mean over|sink|tier|held|set aside|left out|above 0, if")
    said = [*itertools.chain(*WORDS.values()), *(each.about for each in PRIORITIES)]
    assert [each for each in said if odd.search(each)] == []
    labels = [label for label, _ in WORDS.values()]
    assert len({*labels}) == len(labels)


def test_a_priority_decides_settings_and_is_known_by_them() -> None:
    events = SettingsEvents(Service(Settings()))
    usual = shown_values(Settings())
    for each in PRIORITIES:
        *values, radio = events.prefer(each.name, *usual)
        shown = shown_values(Settings(**dict(zip(DECIDES, values, strict=True))))
        assert radio.info == each.about and "Method " in each.about
        assert events.preferred(*shown).value == each.name
        require_meanings(Settings(**each.values))
    assert events.prefer("none of these", *usual)[: len(DECIDES)] == [
        value for name, value in zip(OPTIONS, usual, strict=True) if name in DECIDES
    ]
    own = shown_values(Settings(budget="33%"))
    assert events.preferred(*own).value is None


def test_where_people_log_in_only_models_of_the_list_are_taken() -> None:
    with gr.Blocks():
        mine = control("model", "one", Models(["two"]))
        theirs = control("model", "one", Models(["two"], others=False))
    assert [each.preprocess("two") for each in (mine, theirs)] == ["two", "two"]
    assert (mine.preprocess("/etc"), theirs.preprocess("one")) == ("/etc", "one")
    with pytest.raises(gr.Error, match="/etc"):
        theirs.preprocess("/etc")


@pytest.mark.parametrize(
    ("name", "shown", "said"),
    [
        ("chunk", "many", "Tokens read together 'many' is not a whole number"),
        ("chunk", "0", "Tokens read together 0 is out of range"),
        ("temperature", 99.0, "Temperature 99.0 is out of range"),
        ("max_new_tokens", "0", "Longest answer 0 is out of range"),
        ("reserve_tokens", "3", "Answer to plan for 3 is out of range"),
        ("top_k", 1.5, "Top k 1.5 is out of range"),
    ],
)
def test_what_cannot_be_is_told_by_the_controls_name(name: str, shown: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        values_of([name], [shown])


@pytest.mark.long
def test_settings_are_priced_for_this_machine(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a model that is loaded holds counted as free, and --vram as a cap of tensors."""
    memory = psutil.virtual_memory()  # which goes up and down
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    settings = Settings(model=str(tiny_folder), max_new_tokens=8)
    made = estimate(settings, 400, 0)
    more = estimate(settings, 400, 1 << 30)
    assert made.plan.fits and made.plan.room.kind == "cpu"
    offered = more.plan.room.total - made.plan.room.total
    assert abs(offered - (1 << 30)) < (1 << 20)
    assert made.longest == 1024 - 8
    runner = load(str(tiny_folder), measure="tensors", max_new_tokens=8)
    answer = runner.generate(list(range(3, 403)), ignore_eos=True)
    phases = {name: sum(items.values()) for name, items in made.plan.phases.items()}
    planned = answer.metrics.planned_phase_bytes["read"]
    assert max(phases["read"], phases["choose"]) == pytest.approx(planned, rel=1e-4)

    small = estimate(settings.replace({"vram": "1MB"}), 400, 1 << 40)
    assert not small.plan.fits and small.plan.room.total == 10**6
    assert small.nearest is None and small.longest == 0
    # What does not fit as it is asked for is told beside what would.
    wide = settings.replace({"budget": "100%", "kv_bits": "16", "chunk": 1024, "stream": "off"})
    between = estimate(wide, 900, 0).plan.peak_bytes - 1
    tight = estimate(wide.replace({"vram": f"{int(between / 0.98)}B"}), 900, 0)
    assert not tight.plan.fits and tight.nearest is not None and tight.nearest.fits
    assert tight.nearest.peak_bytes <= tight.plan.room.tensors < tight.plan.peak_bytes
    none = estimate(settings.replace({"vram": "1MB"}), 400, 0)
    assert 'data-fits="False"' in verdict_html(none)


def test_what_cannot_be_priced_is_a_sentence(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path / "<b>no</b>"))
    shown = [shown_value(name, getattr(settings, name)) for name in OPTIONS]
    settings_events = SettingsEvents(Service(Settings(), tmp_path))
    said, phases, works = settings_events.estimate(400, *shown)
    assert not phases and not works.interactive
    assert 'role="alert"' in said and "&lt;b&gt;no&lt;/b&gt;" in said and "<b>no" not in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("recall_limit", "RAM for what is offloaded '-1' is not a size: give 8GiB, 500MB or auto"),
        ("vram", "Memory to use '-1' is not a size"),
    ],
)
def test_a_size_that_is_none_is_not_priced(name: str, said: str, tmp_path: Path) -> None:
    settings_events = SettingsEvents(Service(Settings(), tmp_path))
    shown = [shown_value(each, getattr(Settings(**{name: "-1"}), each)) for each in OPTIONS]
    priced = unescape(settings_events.estimate(400, *shown)[0])
    assert said in priced and "data-fits" not in priced


def test_a_profile_with_a_model_that_is_not_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_CONFIG", str(tmp_path / "config"))
    service, owner = Service(Settings(), tmp_path), gr.Request(username="ann")
    free = SettingsEvents(service)
    shown = [shown_value(each, getattr(Settings(model="a/b"), each)) for each in OPTIONS]
    free.save("mine", owner, *shown)
    assert free.take("mine", owner, *shown) == shown
    listed = SettingsEvents(service, Models(["a/b"], others=False))
    assert listed.take("mine", owner, *shown) == shown
    with pytest.raises(SettingError, match="mine has the model a/b, which is not in the list here"):
        SettingsEvents(service, Models(others=False)).take("mine", owner, *shown)


def test_files_of_this_machine_are_for_whoever_starts_the_app(tmp_path: Path) -> None:
    own, other = tmp_path / "own.jinja", tmp_path / "other.jinja"
    for each in (own, other):
        each.write_text("{{ messages[0].content }}")
    first = Settings(chat_template=str(own))
    service, owner = Service(first, tmp_path), gr.Request(username="ann", session_hash="a")
    locked = SettingsEvents(service, Models(["a/b"], others=False))

    def shown(**values: Any) -> list[Any]:
        return shown_values(first.replace(values))

    for given in (
        {"chat_template": str(other)},
        {"chat_template": "/none"},
        {"model": str(tmp_path)},
    ):
        words = "only whoever starts the app can name others"
        assert words in unescape(locked.estimate(9, *shown(**given))[0])
        told, _ = next(locked.apply("a", shown(), owner, *shown(**given)))
        assert words in unescape(told)
        with pytest.raises(SettingError, match=words):
            locked.save("mine", owner, *shown(**given))
        free = SettingsEvents(service)
        assert words not in unescape(free.estimate(9, *shown(**given))[0])
    for given in ({}, {"chat_template": ""}, {"model": "a/b"}):
        assert "can name others" not in unescape(locked.estimate(9, *shown(**given))[0])
    with gr.Blocks():
        fields = [control("chat_template", "", Models(others=each)) for each in (True, False)]
    assert [each.visible for each in fields] == [True, False]
