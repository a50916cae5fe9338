"""`kvlite bench install-peers`: the environment of other programs."""

from kvlite.cli.screen import console


def install_peers() -> None:
    """Make an environment for kvpress and transformers' quantized caches, which want another
    transformers: for `--peer` of `kvlite bench niah` and `ruler`. It takes some 1.5 GB.

    Examples:

      kvlite bench install-peers
    """
    from kvlite.bench.peers import install

    screen = console()
    with screen.status("Looking for packages") as status:
        found = install(status.update)
    screen.print(f"Installed {', '.join(f'{name} {held}' for name, held in found.items())}")
