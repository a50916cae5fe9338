"""How the server is reached, and what it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlite.errors import SettingError
from kvlite.web.origins import is_loopback
from kvlite.web.server_api import TAKEN

# Settings that a request may change under `kvlite`; and what it may say there of its prompt.
OWN = TAKEN
OF_PROMPT = ("documents", "stable_prefix")


@dataclass(frozen=True)
class ServerConfig:
    """How the server is reached, and what it keeps.

    Attributes:
        host, port: the address.
        keys: a request must have one of them, if there are any.
        origins: whose pages may use it, as of `origin_of`, beside those that are not of the web.
        hosts: what requests to a loopback address may call it, beside the names of loopback.
        keep: bytes of host memory for long conversations that may go on.
        keep_disk: bytes of disk for those that memory has no room for.
        requests: how many may be open at once.
        one_model: whether requests may name no other model of this machine.
        stable_prefix: whether models may be told earlier dates and times, unless a request says.
        unload_after: seconds without requests after which the model is unloaded; 0 for never.
        folder: the data folder; None for the usual one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    keep: int = 4 << 30
    keep_disk: int = 16 << 30
    requests: int = 64
    one_model: bool = False
    unload_after: float = 3600.0
    stable_prefix: bool = False
    folder: Path | None = None

    @property
    def is_private(self) -> bool:
        """Whether only this machine comes in."""
        return is_loopback(self.host)

    @property
    def address(self) -> str:
        """Where OpenAI's clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def require_key(self) -> None:
        """Raises SettingError if others could come in without a key, or a key is none."""
        if any(not key.strip() or key != key.strip() or not key.isascii() for key in self.keys):
            raise SettingError(
                "an --api-key is empty, or has a space or a character that no HTTP header may "
                "have: give letters, digits and punctuation"
            )
        if not self.keys and not self.is_private:
            raise SettingError(
                f"--host {self.host} lets others in: give --api-key (or KVLITE_API_KEY), or leave "
                "--host out to be reached from this machine alone"
            )

    def require_hosts(self) -> None:
        """Raises SettingError if names are allowed where any name is."""
        if self.hosts and not self.is_private:
            raise SettingError(
                f"--allow-host is for a server that this machine alone reaches, and --host "
                f"{self.host} is called by any name: leave --allow-host out"
            )


def names_of(model: str) -> list[str]:
    """What requests may call a model: the last part of a path, what the setting says, and where it
    is."""
    path = Path(model).expanduser()
    if not path.exists():
        return [model]
    return [*dict.fromkeys([path.resolve().name, model, str(path.absolute())])]
