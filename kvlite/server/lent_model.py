"""A server that is part of a program, which loads a model and uses it, too."""

from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from kvlite.server.models import Models, names_of
from kvlite.server.served_model import ServedModel
from kvlite.server.state import ServerState
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Task, Work


class LentModel(Models):
    """The one model of such a program. Its own methods are called by the engine's thread."""

    def __init__(
        self,
        settings: Settings,
        config: ServerConfig,
        engine: Engine,
        loading: Work,
        make_way: Task,
    ) -> None:
        """
        Args:
            engine: the program's.
            loading: the work that loads the model.
            make_way: frees what the program's conversation takes.
        """
        own = replace(config, one_model=True, unload_after=0)
        super().__init__(settings, ServerState(own, engine, make_way))
        self.current.loading = loading

    def expect(self, settings: Settings, loading: Work) -> None:
        """Let the model go, as the program loads another one."""
        self.current.release()
        self.first = self.current = ServedModel(names_of(settings.model), settings, self.state)
        self.current.loading = loading

    def set_aside(self) -> None:
        """Make way for the program's own conversation, where there is room for one alone."""
        model = self.current
        if model.conversations is not None and model.conversations.runner.planned_for_one:
            model.conversations.set_aside()

    def close(self) -> None:
        """The program ends the engine, and keeps what was read."""
