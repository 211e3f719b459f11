"""What our commands have in common: they run without a worker, and end with an exit code and never with a traceback."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import click
import faust
from faust.cli import AppCommand

from marq.core.errors import MarqError


class MarqCommand(AppCommand):
    """A command whose ``run`` returns an exit code, None for 0; a MarqError becomes one sentence and code 1."""

    abstract: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # What aiokafka logs of a broker that is away would stand between the lines of the answer.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        try:
            code = asyncio.run(self.run(*self.args, *args, **self.kwargs, **kwargs))
        except MarqError as error:
            sys.exit(f"marq: {error}")
        sys.exit(code or 0)


def command(app: faust.App, *options: Callable[..., Any]) -> Callable[[Callable[..., Any]], type[AppCommand]]:
    """Make a coroutine function ``run(self, …)`` the command of its name; ``options`` are click's decorators."""
    found: Callable[[Callable[..., Any]], type[AppCommand]] = app.command(*options, base=MarqCommand)
    return found


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is done that can't be taken back; ``yes`` is the answer that was given with --yes.

    Raises:
        MarqError: the answer is no, or there is nobody to ask.
    """
    if yes:
        return
    # Not among the answer, which may be JSON.
    click.echo(f"{question} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
    if answer.strip().lower() not in {"y", "yes"}:
        raise MarqError("nothing was changed; --yes answers the question where nobody can be asked")
