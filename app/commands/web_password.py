"""``faust -A app web-password``: what stands for a password in MARQ_WEB_OPERATORS and MARQ_WEB_VIEWERS."""

from __future__ import annotations

import getpass
import sys
from typing import Any

import faust

from app.commands.command import command, typing
from app.credentials import hashed


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(app)
    async def web_password(self: Any) -> None:
        """Read a password, from the terminal or a pipe, and print its hash: MARQ_WEB_OPERATORS=NAME:HASH."""
        with typing("no password was read"):
            given = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        print(hashed(given))
