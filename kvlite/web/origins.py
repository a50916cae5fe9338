"""Which hosts only this machine reaches, and whose page a request comes from."""

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from kvlite.errors import SettingError

_LOOKS = ("GET", "HEAD")
# What a request to this machine may call it.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
# Pages that programs bring along, as Visual Studio Code's extensions do: no website has such an
# origin.
_OWN_PAGES = ("vscode-webview", "app")
_WEB = {"http": ":80", "https": ":443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\*|\[[0-9a-f:.]+\](:\d+)?|[\w.-]+(:\d+)?)")
_HOST = re.compile(r"\w([\w.-]*\w)?|\[[0-9a-f:.]+\]")
_ALL = "*"


def plain_host(host: str) -> str:
    """A host as a socket takes it."""
    host = host.strip().lower()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, as people write one: `LOCALHOST`, `[::1]`."""
    host = plain_host(host)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(text: str) -> str:
    """Pages that are let in, as browsers name them: those of an origin, of all origins of a scheme
    (`app://*`), or all (`*`). Raises SettingError if it is none of these."""
    origin = text.strip().lower().removesuffix("/")
    if origin != _ALL and not _ORIGIN.fullmatch(origin):
        raise SettingError(
            f"--allow-origin {text[:100]!r} is no origin: give one without a path, such as "
            "https://example.org, vscode-webview://*, or * for all pages"
        )
    return origin.removesuffix(_WEB.get(origin.partition(":")[0], "/"))


def host_of(text: str) -> str:
    """A name that this machine may be called. Raises SettingError if it is none."""
    host = text.strip().lower()
    if not _HOST.fullmatch(host):
        raise SettingError(
            f"--allow-host {text[:100]!r} is no host: give a name without a port, such as "
            "host.docker.internal"
        )
    return host


def is_let_in(origin: str, allowed: Collection[str] = ()) -> bool:
    """Whether pages of an origin may use a server of this machine: those `allowed`, as of
    `origin_of`, and those that are not of the open web. They are pages of programs of this machine,
    at a loopback address or in a window of their own."""
    origin = origin.lower()
    scheme, _, rest = origin.partition("://")
    if _ALL in allowed or (rest and not {origin, f"{scheme}://{_ALL}"}.isdisjoint(allowed)):
        return True
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return bool(rest) and (scheme in _OWN_PAGES or (scheme in _WEB and is_loopback(host)))


def is_own(scope: Scope) -> bool:
    """Whether a request comes from a program, or from a page of this very server. A page of
    elsewhere could act for whoever is logged in: send files, end an answer, log out.

    A browser says itself whether a page is the server's own (`Sec-Fetch-Site`), whatever stands
    between; where it does not, as for an address without https, the page's host must be the one
    that is asked. What a proxy says of that (`X-Forwarded-Host`) anybody may say, and counts for
    nothing: behind one, have it pass `Host` on.
    """
    sent = Headers(scope=scope)
    site, origin, referer = (sent.get(each) for each in ("sec-fetch-site", "origin", "referer"))
    # A link from elsewhere leads to the page; it does nothing there.
    comes_to_look = scope["method"] in _LOOKS and scope["path"] == "/"
    if site is not None:
        navigates = sent.get("sec-fetch-mode") == "navigate"
        return site in ("same-origin", "none") or (comes_to_look and navigates)
    if origin is not None:
        return _is_of(origin, sent)
    return referer is None or comes_to_look or _is_of(referer, sent)


def _is_of(place: str, sent: Headers) -> bool:
    try:
        return urlsplit(place).netloc == sent.get("host")
    except ValueError:
        return False
