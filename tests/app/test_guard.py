"""Who may come in."""

import pytest

from kvlite.errors import SettingError
from kvlite.web.origins import is_loopback
from kvlite_app.web.guard import ServerConfig, parse_auth

LOCAL = ["127.0.0.1", "localhost", "::1", "127.8.8.8", "LOCALHOST", "[::1]", " localhost "]
EVERYWHERE = ["Routes", "Logins", "BodyFilter"]
REMOTE = ["0.0.0.0", "192.168.1.7", "::", "example.org", "10.0.0.1"]


@pytest.mark.parametrize("host", LOCAL)
def test_this_machine_needs_no_password(host: str) -> None:
    assert is_loopback(host)
    ServerConfig(host).require_password()


@pytest.mark.parametrize("host", REMOTE)
def test_others_do(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(SettingError, match=f"--host {host} lets others in"):
        ServerConfig(host).require_password()
    ServerConfig(host, auth=[("ann", "secret")]).require_password()


def test_a_public_address_needs_one_too() -> None:
    with pytest.raises(SettingError, match="--share lets others in"):
        ServerConfig(share=True).require_password()


def test_only_a_loopback_address_is_held_to_its_names() -> None:
    names = [each.cls.__name__ for each in ServerConfig().middleware()]
    assert names == ["SecurityHeaders", "TrustedHostMiddleware", *EVERYWHERE]
    assert [each.cls.__name__ for each in ServerConfig("0.0.0.0").middleware()] == [
        "SecurityHeaders",
        *EVERYWHERE,
    ]


def test_users_are_read_as_written() -> None:
    assert parse_auth(["ann:a:b", "ben:c"]) == [("ann", "a:b"), ("ben", "c")]
    for bad in (["ann"], ["ann:"], [":secret"], [""]):
        with pytest.raises(SettingError, match="not NAME:PASSWORD"):
            parse_auth(bad)
    assert parse_auth([" ann :a b"]) == [("ann", "a b")]  # as a browser's form is read
    with pytest.raises(SettingError, match="second time"):
        parse_auth(["ann:a", "ann :b"])
    for spaced in ("ann: a", "ann:a "):
        with pytest.raises(SettingError, match="--auth number 1 has a space before or after"):
            parse_auth([spaced])


def test_what_is_wrong_with_the_variable_is_not_blamed_on_the_flag() -> None:
    assert parse_auth(["ann:a"], "ben:b") == [("ann", "a"), ("ben", "b")]
    for wrong in ("hunter2", " ", "ben: b", "ann:b"):
        with pytest.raises(SettingError, match=r"^KVLITE_AUTH ") as error:
            parse_auth(["ann:a"], wrong)
        assert "--auth" not in str(error.value)


def test_an_error_never_tells_a_password() -> None:
    with pytest.raises(SettingError) as error:
        parse_auth(["hunter2"])
    assert "hunter2" not in str(error.value)
