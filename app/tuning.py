"""What happens in the settings."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from kvlite.errors import KvliteError, SettingError
from kvlite.folders import config_folder
from kvlite.meanings import require_meaning
from kvlite.profiles import Profiles
from kvlite.settings import LOADING, OPTIONS, Settings

from .form import changed, label_of, shown_value, values_of
from .pricing import Pricer, price_html
from .service import Service
from .status import sentence_html, status_html
from .talking import owner_of
from .work import Work


class Tuning:
    """The page's events about settings."""

    def __init__(self, service: Service, pricer: Pricer) -> None:
        self.service = service
        self.pricer = pricer

    def price(self, tokens: float | None, *shown: Any) -> str:
        """What the settings that are shown would take."""
        try:
            settings = self._settings(shown)
        except KvliteError as error:
            return sentence_html(str(error), wrong=True)
        return price_html(self.pricer, settings, int(tokens or 1))

    def shown(self, id: str, request: gr.Request) -> list[Any]:
        """The settings of a conversation, as the controls have them."""
        settings = self._current(owner_of(request), id)
        return [shown_value(name, getattr(settings, name)) for name in OPTIONS]

    def apply(self, id: str, request: gr.Request, *shown: Any) -> Iterator[str]:
        """Have the settings that are shown from the next message on; the model anew if it must."""
        owner = owner_of(request)
        try:
            wanted = self._settings(shown)
            new = changed(vars(wanted), self._current(owner, id))
            for name, value in new.items():
                require_meaning(name, value, label_of(name))
            loading = {name: value for name, value in new.items() if name in LOADING}
            own = {name: value for name, value in new.items() if name not in LOADING}
            works = list[Work]()
            self.service.require_idle(owner, id)
            if loading:
                works.append(self.service.load(self.service.settings.replace(loading)))
            if own:
                works.append(self.service.change(owner, id, own))
        except KvliteError as error:
            yield sentence_html(str(error), wrong=True)
            return
        for work in works:
            for doing in work.follow():
                yield status_html(doing)
            if work.failure is not None:
                return
        told = "Nothing to change: these are the settings in use."
        if new:
            names = ", ".join(label_of(name) for name in new)
            told = f"In use from the next message on: {names}."
        notes = [note for work in works for note in work.shown.notes]
        yield sentence_html(" ".join([*(f"{note}." for note in notes), told]))

    def profiles(self, request: gr.Request) -> Any:
        """The user's profiles, to choose from."""
        try:
            return gr.Dropdown(choices=self._profiles(request).names(), value=None)
        except KvliteError as error:
            raise gr.Error(str(error)) from None

    def take(self, name: str | None, request: gr.Request, *shown: Any) -> list[Any]:
        """Put a profile's values into the controls."""
        if not name:
            return list(shown)
        try:
            profile = self._profiles(request).read(name)
        except KvliteError as error:
            raise gr.Error(str(error)) from None
        values = dict(zip(OPTIONS, shown, strict=True))
        values |= {each: shown_value(each, value) for each, value in profile.values.items()}
        return list(values.values())

    def save(self, name: str, request: gr.Request, *shown: Any) -> Any:
        """Save what is not as usual as a profile."""
        try:
            values = changed(vars(self._settings(shown)), Settings())
            for each, value in values.items():
                require_meaning(each, value, label_of(each))
            profiles = self._profiles(request)
            profiles.save(name.strip(), values, force=True)
        except KvliteError as error:
            raise gr.Error(str(error)) from None
        return gr.Dropdown(choices=profiles.names(), value=name.strip())

    def remove(self, name: str | None, request: gr.Request) -> Any:
        """Delete a profile."""
        if not name:
            raise gr.Error("choose the profile to delete first")
        try:
            self._profiles(request).delete(name)
        except KvliteError as error:
            raise gr.Error(str(error)) from None
        return self.profiles(request)

    def _profiles(self, request: gr.Request) -> Profiles:
        """The program's own; someone who logs in has others."""
        owner = owner_of(request)
        return Profiles(self.service.shelf(owner).folder if owner else config_folder())

    def _settings(self, shown: Any) -> Settings:
        return Settings().replace(values_of(list(OPTIONS), shown))

    def _current(self, owner: str, id: str) -> Settings:
        """What a conversation has now."""
        shelf = self.service.shelf(owner)
        record = shelf.record_or_new(id)
        try:
            return self.service.settings.replace({**record.began, **record.changed})
        except SettingError:  # it was had with another version
            return self.service.settings
