"""The models of this machine with what the plan says of each, and getting others."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gradio as gr

from kvlite.config.units import readable
from kvlite.errors import KvliteError, ModelError, SettingError, sentence
from kvlite.model.local_models import LocalModel, models_here
from kvlite.model.pulling import download_plan
from kvlite.planner.fitting import ENOUGH, Fit, plan_here, proposals
from kvlite.web.work import Work

from .engine.service import Service
from .form import Models
from .views.status import sentence_html, status_html

MODELS_TAB = "models"
_PROPOSED = 6


class ModelsTab:
    """The tab's components; made inside a `gr.Tab`."""

    def __init__(self, models: Models) -> None:
        self.listed = gr.Radio(
            [*models.listed],
            label="On this machine",
            info=f"and whether a text of {ENOUGH:,} tokens fits",
            elem_id="models",
        )
        self.use = gr.Button("Use this one", variant="primary", elem_id="use-model")
        self.used = gr.HTML(elem_id="model-used", padding=False)
        self.cancel = gr.Button("Cancel", elem_id="cancel-use", size="sm")
        with gr.Column(visible=models.others):
            self.name = gr.Dropdown(
                [],
                value=None,
                label="Get another",
                info="those listed fit; or type any Hugging Face id, such as Qwen/Qwen3-0.6B",
                allow_custom_value=True,
                elem_id="pull-name",
            )
            with gr.Row():
                small: dict[str, Any] = {"size": "sm", "min_width": 60}
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

    def wire(self, tab: Any, parts: ModelsTab, work: dict[str, Any]) -> Any:
        """Have the tab do what its buttons say; the event that has loaded a model."""
        listing = {"fn": self.listing, "outputs": [parts.listed, parts.name], **work}
        tab.select(**listing)
        download = [parts.pulled, parts.stop]
        tab.select(self.watch, None, download, **work)
        parts.look.click(self.look, [parts.name], [parts.pulled], **work)
        parts.pull.click(self.pull, [parts.name], download, **work).then(**listing)
        parts.stop.click(self.stop, None, None, **work)
        parts.cancel.click(self.service.stop_loading, None, None, **work)
        return parts.use.click(self.use, [parts.listed], [parts.used], **work)

    def listing(self) -> Iterator[tuple[Any, Any]]:
        """The models, then what the plan says of each as it is known, then others that fit."""
        found = [each for each in models_here() if self.models.may_use(each.name, self._first)]
        verdicts = dict[str, str]()
        now = self.service.model_host.settings.model
        yield self._choices(found, verdicts, value=now), gr.skip()
        for each in found:
            verdicts[each.name] = each.flaw or self._fit(each.name).line()
            yield self._choices(found, verdicts), gr.skip()
        if self.models.others:
            here = {each.name for each in found}
            yield gr.skip(), gr.Dropdown(choices=self._proposed(here))

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
        if not self.models.others:
            raise SettingError("models are downloaded by who runs the app: `kvlite pull` does it")
        threading.Thread(target=work.do, name="kvlite download", daemon=True).start()

    def _wanted(self, name: str | None, work: Work) -> str:
        wanted = download_plan((name or "").strip(), None, work.cancel)
        fits = "" if wanted.file else f" {self._fit(wanted.repo).line()}."
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
        return f"{_short(here)} is here now. {self._fit(here).line()}."

    def _fit(self, name: str) -> Fit:
        host = self.service.model_host
        try:
            given = host.settings.replace({"model": name})
            return Fit(plan_here(given, ENOUGH, host.held_bytes()))
        except KvliteError as error:
            return Fit(None, sentence(error))

    def _proposed(self, here: set[str]) -> list[tuple[str, str]]:
        try:
            found = [*islice(proposals(self.service.model_host.settings), _PROPOSED)]
        except KvliteError:
            return []
        return [
            (f"{each.name} · {readable(each.nbytes)}", each.name)
            for each in found
            if each.name not in here
        ]

    def _require_listed(self, name: str | None) -> None:
        found = next((each for each in models_here() if each.name == name), None)
        if not name or found is None or not self.models.may_use(found.name, self._first):
            raise SettingError("choose one of the models of the list first")
        if found.flaw:
            raise ModelError(f"{found.name} cannot be run: {found.flaw}")

    def _choices(self, found: list[LocalModel], verdicts: dict[str, str], **changes: Any) -> Any:
        choices = [
            (" · ".join(_about(each, verdicts.get(each.name, "planning"))), each.name)
            for each in found
        ]
        return gr.Radio(choices=choices, **changes)


def _followed(work: Work) -> Iterator[str]:
    for shown in work.follow():
        yield status_html(shown)
    if work.failure is None:
        yield sentence_html(str(work.result))
    elif work.cancel.is_set():
        yield sentence_html("Stopped; what has come is kept, and Download goes on from there.")


def _about(model: LocalModel, verdict: str) -> tuple[str, ...]:
    context = "" if model.max_context is None else f"{model.max_context:,} tokens of context"
    return tuple(filter(None, (_short(model.name), readable(model.nbytes), context, verdict)))


def _short(name: str) -> str:
    return Path(name).name if name.startswith(("~", "/")) or "\\" in name else name
