"""Who may come in, and from where."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlite.errors import SettingError
from kvlite.web.origins import LOOPBACK, is_loopback

from .bodies import BodyFilter
from .logins import Logins
from .routes import Routes

_Header = tuple[bytes, bytes]

# Nothing is fetched from elsewhere, whatever an answer or a document has in it. The page itself
# brings scripts and styles within it.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def parse_auth(pairs: Sequence[str], variable: str = "") -> list[tuple[str, str]]:
    """Users and their passwords, as written: `name:password`; `variable` is what KVLITE_AUTH holds,
    one more of them. Spaces around a name are none of it. Raises SettingError if one has no name or
    no password, or a name comes twice, or a password has a space around it."""
    called = [(f"--auth number {number}", pair) for number, pair in enumerate(pairs, 1)]
    found: dict[str, str] = {}
    for name, pair in [*called, *([("KVLITE_AUTH", variable)] if variable else [])]:
        user, _, password = pair.partition(":")
        user = user.strip()
        if not (user and password.strip()):
            raise SettingError(f"{name} is not NAME:PASSWORD: give both")
        if password != password.strip():
            raise SettingError(f"{name} has a space before or after its password: leave it out")
        if user in found:
            raise SettingError(f"{name} names a user for the second time: give each one once")
        found[user] = password
    return list(found.items())


@dataclass(frozen=True)
class ServerConfig:
    """How the app is reached.

    Attributes:
        host: the address it is served on.
        port: tried first; the next free one of a hundred is taken.
        auth: users and their passwords; without any nobody has to log in.
        share: let gradio's servers lead others here.
        browser: open one.
        read_ahead: read documents while their question is typed.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    auth: Sequence[tuple[str, str]] = ()
    share: bool = False
    browser: bool = False
    read_ahead: bool = True

    @property
    def is_private(self) -> bool:
        """Whether only this machine comes in by it."""
        return is_loopback(self.host) and not self.share

    def require_password(self) -> None:
        """Raises SettingError if others could come in without one."""
        if self.auth or self.is_private:
            return
        how = "--share" if self.share else f"--host {self.host}"
        raise SettingError(
            f"{how} lets others in, who could read every conversation: give --auth NAME:PASSWORD, "
            "or leave it out to be reached from this machine alone"
        )

    def middleware(self) -> list[Middleware]:
        """What stands before every request.

        A page of elsewhere could give its own name this machine's address, and read what is here:
        so requests to a loopback address must call it by a loopback name. Nor may such a page send
        anything, even if it could not read the answer.
        """
        guards = [Middleware(SecurityHeaders)]
        if self.is_private:
            guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, self.host]))
        guards.append(Middleware(Routes, locked=bool(self.auth)))
        return [*guards, Middleware(Logins), Middleware(BodyFilter)]


class SecurityHeaders:
    """Adds to every answer what a browser must not do with it, and keeps what it remembers of a
    login from other pages."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with the headers."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [*_cookies(message.get("headers", ()), scope.get("scheme") == "https")]
                names = {name for name, _ in own}
                message["headers"] = [*own, *(each for each in _HEADERS if each[0] not in names)]
            await send(message)

        await self.app(scope, receive, sent)


def _cookies(headers: Iterable[_Header], is_secure: bool) -> Iterator[_Header]:
    """Headers, whose cookies go to this app's pages alone, and over https alone where there is
    that: gradio sets one for each case, and one of them for all pages there are."""
    for name, value in headers:
        if name.lower() == b"set-cookie":
            if is_secure and value.startswith(b"access-token-unsecure-"):
                continue
            value = re.sub(rb"(?i)(;\s*samesite=)none", rb"\1lax", value)
        yield name, value
