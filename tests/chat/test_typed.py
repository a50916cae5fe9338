"""What is typed, and what it means."""

import pytest

from kvlite.cli.chat.typed import (
    command_in,
    option_named,
    shown_name,
    unfinished,
    unquoted,
    value_typed,
    written,
)
from kvlite.config.settings import OPTIONS
from kvlite.errors import SettingError


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("/read a b.txt ", ("read", "a b.txt")),
        ("/HELP", ("help", "")),
        ("/help\n", ("help", "")),
        ("/etc/hosts has what?", None),
        (" /help", None),
        ("/ 2 is half", None),
        ("/", None),
        ("help", None),
        ("/set\nthis", None),
        ("/system be brief\nand kind", None),
        ("/r2d2 says", None),
        ("", None),
    ],
)
def test_commands_begin_with_a_slash_and_letters(typed: str, found: tuple[str, str] | None) -> None:
    assert command_in(typed) == found


@pytest.mark.parametrize(
    ("typed", "open_", "text"),
    [
        ('"""one\ntwo"""', False, "one\ntwo"),
        ('"""\n one\n\ntwo\n"""\n', False, " one\n\ntwo"),
        ('"""one', True, '"""one'),
        ('"""', True, '"""'),
        ('"""""', True, '"""""'),
        ('""""""', False, ""),
        ('say """this"""', False, 'say """this"""'),
        ("plain\n", False, "plain\n"),
    ],
)
def test_three_quotation_marks_hold_several_lines(typed: str, open_: bool, text: str) -> None:
    assert (unfinished(typed), unquoted(typed)) == (open_, text)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_setting_is_typed_as_it_is_written(name: str) -> None:
    default = OPTIONS[name].default
    assert value_typed(name, written(default)) == default
    assert option_named(shown_name(name)) == option_named(name) == name
    assert option_named(f"--{shown_name(name)}") == name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("max_new_tokens", "1024", 1024),
        ("seed", "7", 7),
        ("seed", "none", None),
        ("never_lossy", "on", True),
        ("stop", "The end", ("The end",)),
        ("stop", '["The end", "END"]', ("The end", "END")),
        ("stop", "none", ()),
        ("budget", "25%", "25%"),
        ("system", "none", ""),
    ],
)
def test_values(name: str, text: str, value: object) -> None:
    assert value_typed(name, text) == value
    assert value_typed(name, written(value)) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("temperature", "warm", "a number"),
        ("max_new_tokens", "1.5", "a whole number"),
        ("chunk", "auto", "a whole number"),
        ("never_lossy", "perhaps", "true or false"),
        ("stop", "[open", "begins with a bracket and is no list"),
    ],
)
def test_values_of_another_kind(name: str, text: str, expected: str) -> None:
    with pytest.raises(SettingError, match=expected) as error:
        value_typed(name, text)
    assert text in str(error.value) and shown_name(name) in str(error.value)
