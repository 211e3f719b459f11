"""What our commands have in common: they run without a worker, and end with an exit code and never with a traceback."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import click
import faust
from faust.cli import AppCommand

from app.plain import plain
from marq.core.errors import MarqError

#: The exit codes of a shell: after Ctrl-C, and when nobody reads the answer any more (``| head``).
INTERRUPTED, BROKEN_PIPE = 130, 141
#: How a file takes no more of an answer.
_UNWRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Interrupted(Exception):
    """Somebody pressed Ctrl-C; the text says what was done until then, "" where nothing was to be."""


class MarqCommand(AppCommand):
    """A command whose ``run`` returns an exit code, None for 0; a MarqError becomes one sentence and code 1."""

    abstract: ClassVar[bool] = True

    @classmethod
    def as_click_command(cls) -> click.Command:
        """Return Faust's parser of the command line, changed to refuse options that are given twice."""
        parsing: click.Command = super().as_click_command()
        parse = parsing.parse_args

        def parse_args(context: click.Context, arguments: list[str]) -> list[str]:
            refuse_repeated(parsing, context, arguments)
            return parse(context, arguments)

        parsing.parse_args = parse_args  # type: ignore[method-assign]
        return parsing

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # What aiokafka logs of a broker that is away would stand between the lines of the answer.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        sys.exit(ending(lambda: asyncio.run(self.run(*self.args, *args, **self.kwargs, **kwargs))))


def refuse_repeated(parsing: click.Command, context: click.Context, arguments: Sequence[str]) -> None:
    """Refuse an option with one value that is given twice: click would silently ignore the first value.

    Raises:
        click.UsageError: an option is given twice; the text names it.
    """
    _, _, given = parsing.make_parser(context).parse_args(list(arguments))
    for option, times in Counter(given).items():
        if times > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag or option.count):
            name = option.opts[0]
            raise click.UsageError(f"{name} is given {times} times, but takes one value: give it once", context)


def ending(run: Callable[[], int | None]) -> int:
    """Run a command; return the exit code, after what is to be said of an end before the end."""
    try:
        code = run() or 0
        # Here, where it can fail without a traceback, and not at the end of Python. None: it is closed (`>&-`).
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MarqError as error:
        say(str(error))
        return 1
    except Interrupted as end:
        if str(end):
            say(f"interrupted: {end}")
        return INTERRUPTED
    except KeyboardInterrupt:
        say("interrupted: what it had asked for by then may still be done")
        return INTERRUPTED
    except BrokenPipeError:
        _write_no_more()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        _write_no_more()
        say(f"the answer could not be written: {error.strerror}; what was asked for may be done all the same")
        return 1


def _write_no_more() -> None:
    # Python flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Tell people something, beside the answer."""
    print(f"marq: {plain(text)}", file=sys.stderr)


def command(app: faust.App, *options: Callable[..., Any]) -> Callable[[Callable[..., Any]], type[AppCommand]]:
    """Make a coroutine function ``run(self, …)`` the command of its name; ``options`` are click's decorators."""
    found: Callable[[Callable[..., Any]], type[AppCommand]] = app.command(*options, base=MarqCommand)
    return found


def confirm(question: str, *, yes: bool, option: str = "--yes") -> None:
    """Ask before an action that can't be undone; ``yes``: whether ``option`` has already answered.

    Raises:
        MarqError: the answer is no, or there is nobody to ask.
        Interrupted: instead of an answer.
    """
    if yes:
        return
    with typing("nothing was changed"):
        # Not among the answer, which may be JSON.
        click.echo(f"{question} [y/N] ", nl=False, err=True)
        answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        click.echo(err=True)
    if answer.strip().lower() not in {"y", "yes"}:
        raise MarqError(f"nothing was changed; to answer yes without a prompt, pass {option}")


@contextmanager
def typing(until_then: str) -> Iterator[None]:
    """Let Ctrl-C end a wait for the standard input, which asyncio would put off until something is typed.

    Raises:
        Interrupted: with what was done until then.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
        raise Interrupted(until_then) from None
    finally:
        signal.signal(signal.SIGINT, before)
