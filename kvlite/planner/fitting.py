"""Whether a model fits this machine, told before it is loaded."""

from kvlite.config.settings import Settings
from kvlite.model.load import choose_device
from kvlite.model.making import load_transformers, making_modules
from kvlite.model.source import find_config
from kvlite.planner.candidates import planner_here
from kvlite.planner.plan import Plan


def fitting(settings: Settings, tokens: int, freed: int = 0) -> Plan:
    """The best plan for a text of so many tokens, or of as many as the model was trained for; in
    any thread, also while a model is loaded or answers.

    Args:
        freed: bytes of the device that this process would give back first.

    Raises:
        KvliteError: as `find_config`, `planner_here` and `Planner.best`.
    """
    load_transformers()
    folder, device = find_config(settings.model), choose_device(settings.device)
    with making_modules():
        planner = planner_here(settings, folder, device, reads_text=False, freed=freed)
        most = planner.shape.max_context - settings.max_new_tokens
        return planner.best(max(1, min(tokens, most)))
