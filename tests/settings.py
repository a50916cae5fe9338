"""Values that settings can have, for property tests."""

from typing import Any

from hypothesis import strategies as st

from kvlite.config.settings import OPTIONS

LARGEST = 2**63 - 1
# What a variable of the environment, or a file in UTF-8, can hold.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


def valid(name: str) -> st.SearchStrategy[Any]:
    """Values in range for a setting, as `Settings` has them; never None, which nobody can give."""
    option = OPTIONS[name]
    low, high = option.metadata["low"], option.metadata["high"]
    if option.metadata["choices"]:
        return st.sampled_from(option.metadata["choices"])
    if option.type is bool:
        return st.booleans()
    if option.type is float:
        return st.floats(low, high)
    if low is not None:
        return st.integers(low, LARGEST if high is None else high)
    if isinstance(option.default, tuple):
        return st.lists(TEXT, max_size=3).map(tuple)
    return TEXT


def several() -> st.SearchStrategy[dict[str, Any]]:
    """Any settings with values in range."""
    return st.fixed_dictionaries({}, optional={name: valid(name) for name in OPTIONS})
