"""The system's package manager, used only by root: set-up asks nobody for a password."""

import os
import shutil
from collections.abc import Sequence

from broker import command

# Name of the tool -> how it installs; the first one found is the system's.
_MANAGERS = {
    "apt-get": ["apt-get", "install", "--yes", "--no-install-recommends"],
    "dnf": ["dnf", "install", "--assumeyes"],
    "apk": ["apk", "add"],
}


def manager() -> str | None:
    """apt-get, dnf or apk, whichever there is."""
    return next((name for name in _MANAGERS if shutil.which(name)), None)


def can_install() -> bool:
    return manager() is not None and os.geteuid() == 0


def install(names: Sequence[str]) -> None:
    """Install packages. Raises command.Failed."""
    tool = manager()
    assert tool is not None, "ask can_install() first"
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        command.run(f"installing {' '.join(names)} with {tool}", [*_MANAGERS[tool], *names], environment=quiet)
    except command.Failed:
        if tool != "apt-get":
            raise
        # A fresh container has no package lists, and an old machine has lists of packages that are gone.
        command.run("apt-get update", ["apt-get", "update"], environment=quiet)
        command.run(f"installing {' '.join(names)} with {tool}", [*_MANAGERS[tool], *names], environment=quiet)
