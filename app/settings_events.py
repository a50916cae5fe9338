"""What happens in the settings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from kvlite.config.paths import config_folder
from kvlite.config.profiles import Profiles
from kvlite.config.settings import LOADING, OPTIONS, Settings
from kvlite.errors import KvliteError, SettingError
from kvlite.methods.engine_config import require_meaning
from kvlite.web.work import Work

from .engine.accounts import tokens_read
from .engine.service import Service
from .estimate import estimate, phases_html, verdict_html
from .form import Models, changed, label_of, shown_value, shown_values, values_of
from .priorities import DECIDES, about, named, priority_of
from .tabs import Tabs, owner_of
from .views.status import sentence_html, status_html


class SettingsEvents:
    """The page's events about settings.

    In all of them `shown` has the values of the controls, and `filled` those that the controls were
    filled with last: what nobody touched stays as it is in use, even if that has changed since.
    """

    def __init__(
        self,
        service: Service,
        models: Models | None = None,
        tabs: Tabs | None = None,
    ) -> None:
        self.service = service
        self.models = models or Models()
        self.tabs = tabs or Tabs()
        self._first = service.host.settings

    def estimate(self, tokens: float | None, *shown: Any) -> tuple[str, str, Any]:
        """Whether there is the memory for the settings, what takes it, and if they can be used."""
        try:
            held = self.service.model_host.held_bytes()
            made = estimate(self._settings(shown), int(tokens or 1), held)
        except KvliteError as error:
            return sentence_html(str(error), wrong=True), "", gr.Button(interactive=False)
        works = gr.Button(interactive=made.longest > 0)
        return verdict_html(made), phases_html(made), works

    def plan_for(self, id: str, tokens: float | None, request: gr.Request) -> Any:
        """The tokens to plan for: at least those that the conversation has."""
        owner = owner_of(request)
        read = tokens_read(self.service.store(owner), self.service.record(owner, id))
        return gr.skip() if (tokens or 0) >= read else gr.Number(value=read)

    def pending(self, filled: list[Any], *shown: Any) -> tuple[str, str, Any, Any]:
        """What is changed and not in use yet, beside the controls and above the message box; the
        button that applies it; and what was said of the last change, gone once there are others."""
        names = ", ".join(map(label_of, _touched(filled, shown)))
        if not names:
            return "", "", gr.Button(variant="secondary"), gr.skip()
        here = sentence_html(f"Changed, not in use yet: {names}.")
        there = sentence_html(f"Not in use until you press Apply in Settings: {names}.")
        return here, there, gr.Button(variant="primary"), ""

    def prefer(self, name: str, *shown: Any) -> list[Any]:
        """The values of the controls that a priority decides, and what it is."""
        chosen = named(name)
        values = dict(zip(OPTIONS, shown, strict=True)) if chosen is None else chosen.values
        return [*(values[each] for each in DECIDES), gr.Radio(info=about(chosen))]

    def preferred(self, *shown: Any) -> Any:
        """The priority that the controls come to."""
        chosen = priority_of(shown)
        return gr.Radio(value=None if chosen is None else chosen.name, info=about(chosen))

    def shown(self, id: str, request: gr.Request) -> list[Any]:
        """A conversation's settings for the controls, nothing to say, and again as `filled`."""
        values = shown_values(self.service.settings_of(owner_of(request), id))
        return [*values, "", values]

    def loaded(self, id: str, filled: list[Any], request: gr.Request) -> list[Any]:
        """The same for a page that was just loaded: controls that have their values already are
        left alone, as someone may have begun to change them."""
        *values, _, known = self.shown(id, request)
        news = [gr.skip() if own == was else own for own, was in zip(values, filled, strict=True)]
        return [*news, gr.skip(), known]

    def apply(
        self, id: str, filled: list[Any], request: gr.Request, *shown: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Use the settings that were changed from the next message on, and load the model again if
        they need it: what to say of that, and the new `filled`."""
        for told, known in self._applied(owner_of(request), id, filled, shown):
            shows = self.tabs.shows(request.session_hash or "", id)
            yield (told, known) if shows else (gr.skip(), gr.skip())

    def _applied(
        self, owner: str, id: str, filled: Sequence[Any], shown: Sequence[Any]
    ) -> Iterator[tuple[str, Any]]:
        works = list[Work]()
        try:
            wanted = self._settings(shown)
            touched = {name: getattr(wanted, name) for name in _touched(filled, shown)}
            new = changed(touched, self.service.settings_of(owner, id))
            loading = {name: value for name, value in new.items() if name in LOADING}
            own = {name: value for name, value in new.items() if name not in LOADING}
            self.service.require_idle(owner, id)
            self.service.require_change(owner, id, own)
            if loading:
                works.append(self.service.load(self.service.host.settings.replace(loading)))
                yield from _followed(works[-1])
            if own and not any(work.failure for work in works):
                works.append(self.service.change(owner, id, own))
                yield from _followed(works[-1])
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True), gr.skip()
            return
        if any(work.failure for work in works):
            return
        told = "Nothing to change: these are the settings in use."
        if new:
            names = ", ".join(label_of(name) for name in new)
            told = f"In use in this conversation from its next message on: {names}."
        notes = [f"{note}." for work in works for note in work.shown.notes]
        yield sentence_html(" ".join([*notes, told])), [*shown]

    def profiles(self, request: gr.Request) -> Any:
        """The user's profiles, to choose from."""
        return gr.Dropdown(choices=self._profiles(request).names(), value=None)

    def take(self, name: str | None, request: gr.Request, *shown: Any) -> list[Any]:
        """Put a profile's values into the controls."""
        if not name:
            return [*shown]
        profile = self._profiles(request).read(name)
        self._require_listed(name, profile.values)
        values = dict(zip(OPTIONS, shown, strict=True))
        values |= {each: shown_value(each, value) for each, value in profile.values.items()}
        return [*values.values()]

    def save(self, name: str, request: gr.Request, *shown: Any) -> tuple[Any, str]:
        """Save what is not the default as a profile, and say if it replaced one."""
        values = changed(vars(self._settings(shown)), Settings())
        profiles, name = self._profiles(request), name.strip()
        former = name in profiles.names()
        profiles.save(name, values, force=True)
        told = f"The profile {name} is {'replaced' if former else 'saved'}."
        return gr.Dropdown(choices=profiles.names(), value=name), sentence_html(told)

    def remove(self, name: str | None, request: gr.Request) -> Any:
        """Delete a profile."""
        if not name:
            raise SettingError("choose the profile to delete first")
        self._profiles(request).delete(name)
        return self.profiles(request)

    def _require_listed(self, profile: str, values: Mapping[str, Any]) -> None:
        model = values.get("model", self._first.model)
        if not self.models.may_use(model, self._first.model):
            raise SettingError(
                f"the profile {profile} has the model {model}, which is not in the list here: take "
                "another profile, or have it downloaded on the app's machine, or the app begun "
                f"with --model {model}"
            )

    def _settings(self, shown: Sequence[Any]) -> Settings:
        settings = Settings().replace(values_of(list(OPTIONS), shown))
        self.models.require_own(settings, self._first)
        for name, value in vars(settings).items():
            require_meaning(name, value, label_of(name))
        return settings

    def _profiles(self, request: gr.Request) -> Profiles:
        owner = owner_of(request)
        return Profiles(self.service.store(owner).folder if owner else config_folder())


def _touched(filled: Sequence[Any], shown: Sequence[Any]) -> list[str]:
    return [name for name, was, now in zip(OPTIONS, filled, shown, strict=True) if was != now]


def _followed(work: Work) -> Iterator[tuple[str, Any]]:
    for shown in work.follow():
        yield status_html(shown), gr.skip()
