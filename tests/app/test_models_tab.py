"""The app's list of models: what fits, what is used, and what is downloaded."""

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import KvliteError
from kvlite.model.embedded import embedded_ggufs
from kvlite_app.engine.service import Service
from kvlite_app.form import Models
from kvlite_app.models_tab import ModelsEvents
from tests.app.conftest import Visitor, serving
from tests.gguf_files import write_gguf
from tests.hub import Hub


@pytest.fixture
def home(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a model of their own, and one that cannot be run."""
    for name in ("mine", "broken"):
        shutil.copytree(tiny_folder, tmp_path / "models" / name)
    (tmp_path / "models" / "broken" / "model.safetensors").unlink()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("KVLITE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


@pytest.mark.long
def test_models_are_listed_with_what_the_plan_says_and_used(home: Path, service: Service) -> None:
    events = ModelsEvents(service, Models())
    *_, (listed, _), (_, others) = events.listing()
    labels = {value: label for label, value in listed.choices}
    assert set(labels) == {EMBEDDED_MODEL, "~/models/mine", "~/models/broken"}
    mine = r"mine\nllama · [\d.]+ MiB · models folder\nreads about 2 pages \([\d,]+ tokens\): "
    assert re.match(mine, labels["~/models/mine"])
    assert labels[EMBEDDED_MODEL].startswith(f"{EMBEDDED_MODEL}, tiny, for trying\n")
    assert "has no .safetensors" in labels["~/models/broken"]
    proposed = {value: label for label, value in others.choices}
    # 0.6 billion weights of two bytes, which a CPU computes with in four.
    assert "Qwen/Qwen3-0.6B · 1.11 GiB to download · " in proposed["Qwen/Qwen3-0.6B"]
    assert text_of([*events.use("~/models/mine")][-1]) == "mine is in use."
    assert service.model_host.settings.model == "~/models/mine" and service.model_name == "mine"
    assert text_of([*events.use("~/models/mine")][-1]) == "mine is in use already."
    assert next(events.listing())[0].value == "~/models/mine"
    for name in ("/etc", None, "~/models/broken"):
        with pytest.raises(KvliteError, match=r"choose one|cannot be run"):
            [*events.use(name)]


@pytest.mark.long
def test_one_is_downloaded_once_stopped_and_gone_on_with(
    home: Path, service: Service, hub: Hub
) -> None:
    events = ModelsEvents(service, Models())
    looked = text_of([*events.look("a/b")][-1])
    assert re.match(r"a/b: [\d.]+ MiB, of which [\d.]+ MiB to download\. Reads about", looked)
    assert "no Hugging Face id" in text_of([*events.look("nothing")][-1])
    hub.silent.set()
    hub.asked.clear()
    said = list[tuple[Any, Any]]()
    first = threading.Thread(target=lambda: said.extend(events.pull("a/b")))
    first.start()
    assert hub.asked.wait(60)
    with pytest.raises(KvliteError, match="is being downloaded"):
        [*events.pull("a/b")]
    told, stop = next(events.watch())  # as another tab sees it
    assert "Asking" in told and stop.visible
    events.stop()
    first.join(60)
    told, stop = said[-1]
    assert text_of(told).startswith("Stopped") and not stop.visible
    assert not next(events.watch())[1].visible
    hub.silent.clear()
    hub.over.set()
    *coming, ended = (text_of(told) for told, _ in events.pull("a/b"))
    assert any("Downloading a/b" in each for each in coming)
    assert re.match(r"a/b is here now\. Reads about", ended)
    *_, (listed, _), _ = events.listing()
    assert "a/b" in [value for _, value in listed.choices]


def test_who_logs_in_uses_those_of_the_list_and_downloads_none(
    home: Path, service: Service
) -> None:
    events = ModelsEvents(service, Models(["~/models/mine"], others=False))
    *_, (listed, _) = events.listing()
    assert [value for _, value in listed.choices] == ["~/models/mine"]
    for act, name in ((events.use, EMBEDDED_MODEL), (events.pull, "a/b"), (events.look, "a/b")):
        with pytest.raises(KvliteError, match=r"choose one|who runs the app"):
            [*act(name)]


@pytest.mark.long
def test_another_file_of_this_machine_is_added_and_known_from_then_on(
    home: Path, service: Service
) -> None:
    events, (file,) = ModelsEvents(service, Models()), embedded_ggufs()
    own = home / "Downloads" / "own.gguf"
    own.parent.mkdir()
    shutil.copyfile(file, own)
    listed, path, told = events.add(f'"{own}"')
    assert text_of(told) == "own.gguf is in the list." and path == ""
    assert listed.value == "~/Downloads/own.gguf" in [value for _, value in listed.choices]
    *_, (listed, _), _ = events.listing(listed.value)
    labels = {value: label for label, value in listed.choices}
    assert "used before\nreads about 16 pages" in labels["~/Downloads/own.gguf"]
    # Its plan has read it, so that the next start knows it as well.
    *_, (listed, _), _ = ModelsEvents(service, Models()).listing()
    assert "~/Downloads/own.gguf" in [value for _, value in listed.choices]
    (home / "text.gguf").write_text("no model")
    for wrong, why in {
        "/no/such.gguf": "no file or folder",
        "~/text.gguf": "cannot be run",
    }.items():
        assert why in text_of(events.add(wrong)[2])


@pytest.fixture
def app(home: Path, tiny_folder: Path) -> Iterator[Any]:
    with serving(home / "data", "--model", str(tiny_folder)) as server:
        yield server


@pytest.mark.long
def test_behind_the_models_name_another_is_chosen(app: Any, visitor: Visitor) -> None:
    page = visitor.open(app.address)
    page.locator("#model").click()
    row = page.locator("#models label", has_text="mine")
    row.get_by_text("reads about").wait_for()
    page.locator("#models label", has_text="broken").get_by_text("safetensors").wait_for()
    row.click()
    page.locator("#use-model").click()
    page.locator("#model-used").get_by_text("mine is in use").wait_for()
    page.locator("#model", has_text="mine").wait_for()
    page.locator("#pull-name input").click()
    page.get_by_role("option", name="Qwen/Qwen3-0.6B").wait_for()
    page.locator("#pull-name input").fill("no/such")
    page.locator("#pull-name input").press("Enter")
    page.locator("#look-model").click()
    page.locator("#model-pulled").get_by_text("no/such").wait_for()
    assert not page.locator("#stop-pull").is_visible()


@pytest.mark.long
def test_a_model_that_is_dropped_on_the_page_is_found_where_it_lies(
    app: Any, home: Path, visitor: Visitor
) -> None:
    (own := home / "some" / "where" / "own.gguf").parent.mkdir(parents=True)
    write_gguf(own)
    page = visitor.open(app.address)
    for size, told in ((10, "own.gguf was not found"), (own.stat().st_size, "is in the list")):
        dropped = page.evaluate_handle(
            """size => {
              const dropped = new DataTransfer();
              dropped.items.add(new File([new Uint8Array(size)], "own.gguf"));
              return dropped;
            }""",
            size,
        )
        page.dispatch_event("#box textarea", "drop", {"dataTransfer": dropped})
        page.locator("#model-added").get_by_text(told).wait_for()
    page.locator("#models label.selected").get_by_text("own.gguf").wait_for()
