"""Who may come in."""

import pytest

from kvlite.errors import SettingError
from kvlite_app.guard import is_loopback, middleware, parse_auth, require_password

LOCAL = ["127.0.0.1", "localhost", "::1", "127.8.8.8"]
REMOTE = ["0.0.0.0", "192.168.1.7", "::", "example.org", "10.0.0.1"]


@pytest.mark.parametrize("host", LOCAL)
def test_this_machine_needs_no_password(host: str) -> None:
    assert is_loopback(host)
    require_password(host, share=False, auth=[])


@pytest.mark.parametrize("host", REMOTE)
def test_others_do(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(SettingError, match=f"--host {host} lets others in"):
        require_password(host, share=False, auth=[])
    require_password(host, share=False, auth=[("ann", "secret")])


def test_a_public_address_needs_one_too() -> None:
    with pytest.raises(SettingError, match="--share lets others in"):
        require_password("127.0.0.1", share=True, auth=[])


def test_only_a_loopback_address_is_held_to_its_names() -> None:
    names = [each.cls.__name__ for each in middleware("127.0.0.1", share=False)]
    assert names == ["Headers", "TrustedHostMiddleware", "OwnPages"]
    assert [each.cls.__name__ for each in middleware("0.0.0.0", share=False)] == ["Headers"]


def test_users_are_read_as_written() -> None:
    assert parse_auth(["ann:a:b", "ben:c"]) == [("ann", "a:b"), ("ben", "c")]
    for bad in (["ann"], ["ann:"], [":secret"], [""]):
        with pytest.raises(SettingError, match="not NAME:PASSWORD"):
            parse_auth(bad)
    with pytest.raises(SettingError, match="twice"):
        parse_auth(["ann:a", "ann:b"])


def test_an_error_never_tells_a_password() -> None:
    with pytest.raises(SettingError) as error:
        parse_auth(["hunter2"])
    assert "hunter2" not in str(error.value)
