"""The models of this machine with what the plan says of each, and getting others."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.config.checked_file import from_json, sound
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.config.units import readable
from kvlite.errors import KvliteError, ModelError, SettingError, sentence
from kvlite.model.local_models import LocalModel, find_file, model_at, models_here
from kvlite.model.pulling import download_plan
from kvlite.planner.fitting import proposals
from kvlite.web.work import Work

from .engine.service import Service
from .estimate import estimate, pages, reads
from .form import Models
from .views.status import sentence_html, status_html

MODELS_TAB = "models"
# More tokens than any model was trained for.
_PROPOSED, _ANY = 6, 1 << 30


class ModelsTab:
    """The tab's components; made inside a `gr.Tab`."""

    def __init__(self, models: Models) -> None:
        small: dict[str, Any] = {"size": "sm", "min_width": 60}
        self.listed = gr.Radio(
            [*models.listed],
            label="On this machine",
            info="and how long a text each can read here; a page has about 500 tokens",
            elem_id="models",
        )
        self.use = gr.Button("Use this one", variant="primary", elem_id="use-model")
        self.used = gr.HTML(elem_id="model-used", padding=False)
        self.cancel = gr.Button("Cancel", elem_id="cancel-use", size="sm")
        with gr.Column(visible=models.others):
            self.path = gr.Textbox(
                label="Another file of this machine",
                info="the path of a .gguf file or a model's folder; or drop a .gguf on this page",
                max_lines=1,
                elem_id="model-path",
            )
            self.add = gr.Button("Add to the list", elem_id="add-model", **small)
            self.added = gr.HTML(elem_id="model-added", padding=False)
            self.name = gr.Dropdown(
                [],
                value=None,
                label="Get another",
                info="those listed fit; or type any Hugging Face id, such as Qwen/Qwen3-0.6B",
                allow_custom_value=True,
                elem_id="pull-name",
            )
            with gr.Row():
                self.look = gr.Button("What it takes", elem_id="look-model", **small)
                self.pull = gr.Button("Download", elem_id="pull-model", **small)
                self.stop = gr.Button("Stop", elem_id="stop-pull", visible=False, **small)
            self.pulled = gr.HTML(elem_id="model-pulled", padding=False)


class ModelsEvents:
    """What happens in the tab. One model is downloaded at a time, whoever looks on."""

    def __init__(self, service: Service, models: Models) -> None:
        self.service, self.models = service, models
        self._first = service.model_host.settings.model
        self._lock = threading.Lock()
        self._download: Work | None = None
        self._added: list[str] = []

    def wire(self, tab: Any, parts: ModelsTab, dropped: Any, work: dict[str, Any]) -> Any:
        """Have the tab do what its buttons say, and what is `dropped` on the page; the event that
        has loaded a model."""
        chosen, listed = [parts.listed], [parts.listed, parts.name]
        listing = {"fn": self.listing, "inputs": chosen, "outputs": listed, **work}
        tab.select(**listing)
        download = [parts.pulled, parts.stop]
        tab.select(self.watch, None, download, **work)
        parts.look.click(self.look, [parts.name], [parts.pulled], **work)
        parts.pull.click(self.pull, [parts.name], download, **work).then(**listing)
        parts.stop.click(self.stop, None, None, **work)
        parts.cancel.click(self.service.stop_loading, None, None, **work)
        added = [parts.listed, parts.path, parts.added]
        for event, act, given in (
            (parts.add.click, self.add, parts.path),
            (parts.path.submit, self.add, parts.path),
            (dropped.change, self.drop, dropped),
        ):
            event(act, [given], added, **work).then(**listing)
        return parts.use.click(self.use, [parts.listed], [parts.used], **work)

    def listing(self, chosen: str | None = None) -> Iterator[tuple[Any, Any]]:
        """The models, then what the plan says of each as it is known, then others that fit."""
        found = self._listed()
        verdicts = dict[str, str]()
        now = chosen or self.service.model_host.settings.model
        yield self._choices(found, verdicts, value=now), gr.skip()
        for each in found:
            verdicts[each.name] = each.flaw or self._reads(each.name)
            yield self._choices(found, verdicts), gr.skip()
        if self.models.others:
            here = {each.name for each in found}
            yield gr.skip(), gr.Dropdown(choices=self._proposed(here))

    def add(self, path: str) -> tuple[Any, Any, str]:
        """Put a file or folder into the list, chosen; an empty path, and what came of it."""
        self._require_others()
        try:
            found = model_at(path.strip().strip("\"'"))
            _require_sound(found)
        except KvliteError as error:
            return gr.skip(), gr.skip(), sentence_html(str(error), wrong=True)
        listed = self._listed()
        if found.name not in [each.name for each in listed]:
            self._added.append(found.name)
            listed.append(found)
        told = sentence_html(f"{_short(found.name)} is in the list.")
        return self._choices(listed, {}, value=found.name), "", told

    def drop(self, dropped: str) -> tuple[Any, Any, str]:
        """As `add`, a file that was dropped on the page, which knows its name and size alone."""
        self._require_others()
        with sound(SettingError):
            name, size, _ = from_json(dropped)
            found = find_file(Path(name).name, int(size))
        if found is None:
            told = (
                f"{name} was not found among models and below your own folder, and a browser does "
                "not say where it lies: write its path above."
            )
            return gr.skip(), gr.skip(), sentence_html(told, wrong=True)
        return self.add(str(found))

    def use(self, name: str | None) -> Iterator[str]:
        """Load a model in place of the one there is: how far that is, and what came of it."""
        self._require_listed(name)
        host = self.service.model_host
        if host.runner is not None and name == host.settings.model:
            yield sentence_html(f"{_short(name)} is in use already.")
            return
        work = self.service.load(host.settings.replace({"model": name}))
        for shown in work.follow():
            yield status_html(shown)
        if work.failure is None:
            notes = " ".join(f"{note}." for note in work.shown.notes)
            yield sentence_html(f"{notes} {_short(name or '')} is in use.".strip())

    def look(self, name: str | None) -> Iterator[str]:
        """What getting a model takes."""
        work = Work(lambda work: self._wanted(name, work), "Asking")
        self._begin(work)
        yield from _followed(work)

    def pull(self, name: str | None) -> Iterator[tuple[str, Any]]:
        """Get a model: how far that is, what came of it, and the button that stops it."""
        with self._lock:
            if self._download is not None and not self._download.shown.ended:
                raise SettingError("a model is being downloaded: wait for it, or stop it")
            work = Work(lambda work: self._pulled(name, work), "Asking Hugging Face")
            self._begin(work)
            self._download = work
        yield from self.watch()

    def watch(self) -> Iterator[tuple[Any, Any]]:
        """The download that is under way, whoever began it, as `pull` shows it."""
        work = self._download
        if work is None or work.shown.ended:
            yield gr.skip(), gr.Button(visible=False)
            return
        for told in _followed(work):
            yield told, gr.Button(visible=not work.shown.ended)

    def stop(self) -> None:
        """End the download; what has come of it is kept."""
        if self._download is not None:
            self._download.cancel.set()

    def _begin(self, work: Work) -> None:
        self._require_others()
        threading.Thread(target=work.do, name="kvlite download", daemon=True).start()

    def _require_others(self) -> None:
        if not self.models.others:
            raise SettingError("models are added by who runs the app: `kvlite pull` does it")

    def _wanted(self, name: str | None, work: Work) -> str:
        wanted = download_plan((name or "").strip(), None, work.cancel)
        fits = "" if wanted.file else f" {_begun(self._reads(wanted.repo))}."
        about = f"{wanted.repo}, {wanted.file}" if wanted.file else wanted.repo
        size, missing = wanted.nbytes, wanted.missing
        return f"{about}: {readable(size)}, of which {readable(missing)} to download.{fits}"

    def _pulled(self, name: str | None, work: Work) -> str:
        wanted = download_plan((name or "").strip(), None, work.cancel)
        work.begin(f"Downloading {wanted.repo}, {readable(wanted.nbytes)}")
        path = wanted.download(work.progress, work.cancel)
        work.begin("Comparing digests")
        wanted.require_undamaged(path, work.progress, work.cancel)
        here = wanted.name(path)
        return f"{_short(here)} is here now. {_begun(self._reads(here))}."

    def _reads(self, name: str) -> str:
        """How long a text a model can read on this machine."""
        host = self.service.model_host
        try:
            made = estimate(host.settings.replace({"model": name}), _ANY, host.held_bytes())
        except KvliteError as error:
            return sentence(error)
        return reads(made)

    def _proposed(self, here: set[str]) -> list[tuple[str, str]]:
        try:
            found = [*islice(proposals(self.service.model_host.settings), _PROPOSED)]
        except KvliteError:
            return []
        return [
            (
                f"{each.name} · {readable(each.nbytes)} to download · "
                f"{pages(each.plan.tokens)} take {readable(each.plan.peak_bytes)} of memory",
                each.name,
            )
            for each in found
            if each.name not in here
        ]

    def _require_listed(self, name: str | None) -> None:
        found = next((each for each in self._listed() if each.name == name), None)
        if not name or found is None:
            raise SettingError("choose one of the models of the list first")
        _require_sound(found)

    def _listed(self) -> list[LocalModel]:
        here = models_here()
        names = {each.name for each in here}
        here += [model_at(each) for each in self._added if each not in names]
        return [each for each in here if self.models.may_use(each.name, self._first)]

    def _choices(self, found: list[LocalModel], verdicts: dict[str, str], **changes: Any) -> Any:
        choices = [(_about(each, verdicts.get(each.name, "planning")), each.name) for each in found]
        return gr.Radio(choices=choices, **changes)


def _require_sound(model: LocalModel) -> None:
    if model.flaw:
        raise ModelError(f"{model.name} cannot be run: {model.flaw}")


def _followed(work: Work) -> Iterator[str]:
    for shown in work.follow():
        yield status_html(shown)
    if work.failure is None:
        yield sentence_html(str(work.result))
    elif work.cancel.is_set():
        yield sentence_html("Stopped; what has come is kept, and Download goes on from there.")


def _about(model: LocalModel, verdict: str) -> str:
    """A model's name, and below it what it is and what it can read."""
    tiny = ", tiny, for trying" if model.name == EMBEDDED_MODEL else ""
    place = "" if model.place == "embedded" else model.place
    about = " · ".join(filter(None, (model.architecture, readable(model.nbytes), place)))
    return f"{_short(model.name)}{tiny}\n{about}\n{verdict}"


def _begun(words: str) -> str:
    return words[:1].upper() + words[1:]


def _short(name: str) -> str:
    return Path(name).name if name.startswith(("~", "/")) or "\\" in name else name
