"""Which hosts only this machine reaches, and which port is free."""

import ipaddress

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
