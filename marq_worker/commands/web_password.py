"""``marq web-password``: hashes a password for MARQ_WEB_OPERATORS and MARQ_WEB_VIEWERS."""

from __future__ import annotations

import getpass
import sys

from marq_worker.commands.command import Setup, command
from marq_worker.commands.confirmation import typing
from marq_worker.web.credentials import hashed


@command()
async def web_password(setup: Setup) -> None:
    """Read a password from the terminal or a pipe, and print its hash: MARQ_WEB_OPERATORS=NAME:HASH."""
    with typing("no password was read"):
        if sys.stdin is None:
            password = ""
        else:
            password = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    print(hashed(password))
