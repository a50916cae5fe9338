"""Which hosts only this machine reaches, and whose page a request comes from."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

_LOOKS = ("GET", "HEAD")
# What a request to this machine may call it.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


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
