"""Confirmation of actions that can't be undone: without ``--yes`` and without an answer, nothing is changed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.commands.command import Interrupted


def confirm(question: str, client: ClientSettings, *, yes: bool, option: str = "--yes") -> None:
    """Ask before an action that can't be undone, and name the namespace; ``yes``: whether ``option`` has answered."""
    if yes:
        return
    with typing("nothing was changed"):
        # To stderr, because the output may be JSON.
        click.echo(f"{question} ({client.names.prefix} at {client.bootstrap_servers}) [y/N] ", nl=False, err=True)
        answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        click.echo(err=True)
    if answer.strip().lower() not in {"y", "yes"}:
        raise MarqError(f"nothing was changed; pass {option} to confirm without a prompt")


@contextmanager
def typing(until_then: str) -> Iterator[None]:
    """Let Ctrl-C interrupt reading standard input, which asyncio would delay until a line arrives.

    Raises Interrupted with what was done until then.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
        raise Interrupted(until_then) from None
    finally:
        signal.signal(signal.SIGINT, before)
