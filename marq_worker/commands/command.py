"""Common parts of our commands, which run without a worker and end with an exit code, never with a traceback."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import click
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.kafka.connection import admin_client
from marq.kafka.topics import ensure_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq_worker.config.settings import (
    AppSettings,
    as_written,
    load_client_settings,
    load_settings,
    misspelt_variables,
)
from marq_worker.readable import plain

#: Exit codes as in a shell: after Ctrl-C, and if the reader of the output is gone (``| head``).
INTERRUPTED, BROKEN_PIPE = 130, 141
#: Errors of a file that can't take more output.
_UNWRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Interrupted(Exception):
    """Ctrl-C was pressed; the text says what was done so far, or is empty."""


#: Options that many commands have.
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only show how many messages it would affect.")


class MarqCommand(click.Command):
    """A command that refuses options that are given twice: click silently ignores the first value."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        refuse_repeated(self, context, arguments)
        return super().parse_args(context, arguments)


def refuse_repeated(parsing: click.Command, context: click.Context, arguments: Sequence[str]) -> None:
    _, _, options = parsing.make_parser(context).parse_args(list(arguments))
    for option, times in Counter(options).items():
        if times > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag or option.count):
            name = option.opts[0]
            raise click.UsageError(f"{name} was given {times} times: give it once", context)


def ending(run: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, and explain an early end."""
    try:
        code = run() or 0
        # Flush here, where an error does not end in a traceback. None: stdout is closed (`>&-`).
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MarqError as error:
        say(as_written(str(error)))
        return 1
    except Interrupted as end:
        if str(end):
            say(f"interrupted: {end}")
        return INTERRUPTED
    except KeyboardInterrupt:
        say("interrupted: earlier requests may still be carried out")
        return INTERRUPTED
    except BrokenPipeError:
        _write_no_more()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        _write_no_more()
        say(f"the output could not be written: {error.strerror}; the requested action may have been carried out")
        return 1


def _write_no_more() -> None:
    # Python flushes once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print to stderr."""
    print(f"marq: {plain(text)}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a command works with: the settings of a worker and of its clients."""

    settings: AppSettings
    client: ClientSettings


def command(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a coroutine function ``run(setup, …)``; ``options`` are click's decorators.

    ``run`` returns an exit code, None for 0; a MarqError becomes one sentence and code 1.
    """

    def declare(run: Callable[..., Any]) -> click.Command:
        @functools.wraps(run)
        def call(**arguments: Any) -> NoReturn:
            # aiokafka's log lines about an unreachable broker would mix with the output.
            logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
            sys.exit(ending(lambda: asyncio.run(run(_setup(), **arguments))))

        for option in reversed(options):
            option(call)
        return click.command(run.__name__.replace("_", "-"), cls=MarqCommand)(call)

    return declare


def _setup() -> Setup:
    settings = load_settings()
    for name, setting in misspelt_variables().items():
        say(f"{name} is not a setting of Marq, so it has no effect; did you mean {setting}?")
    return Setup(settings, load_client_settings(settings))


@asynccontextmanager
async def open_queues(client: ClientSettings, *, changelog: bool = False) -> AsyncIterator[Queues]:
    """Follow the definitions of queues, after checking that the broker has Marq's topics."""
    await ensure_topics(client, changelog=changelog)
    async with Queues.of(client) as queues:
        yield queues


@asynccontextmanager
async def open_groups(client: ClientSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """Connect a client that describes groups; raises BrokerUnavailable if they can't be described."""
    async with admin_client(client) as admin:
        try:
            yield admin
        except KafkaError as error:
            where = client.bootstrap_servers
            raise BrokerUnavailable(f"{where}: the groups could not be described: {error}") from error
