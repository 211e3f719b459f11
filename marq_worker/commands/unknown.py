"""Notes about unknown queues: a command with a mistyped name would otherwise succeed without an effect."""

from __future__ import annotations

from marq.dead_letters.dead_letters import DeadLetters
from marq.queues.known_queues import defined_or_consumed
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError, UnknownQueue
from marq.wire.names import closest_name
from marq_worker.commands.command import say


async def note_if_unknown(client: ClientSettings, name: str) -> None:
    """Say on stderr if a queue has no definition, no consumer, no messages and no dead letters."""
    async with DeadLetters.of(client) as letters:
        await note_about(letters, name)


async def note_about(letters: DeadLetters, name: str) -> None:
    """Do the same with a running client."""
    try:
        await letters.check_known(name)
    except UnknownQueue as error:
        say(error.finding)
    except MarqError:
        # The command has its result; only this search is incomplete.
        return


async def note_if_no_consumer(client: ClientSettings, name: str) -> None:
    """Say on stderr if a queue to which messages are sent has neither a definition nor a consumer."""
    try:
        names = await defined_or_consumed(client)
    except MarqError:
        # A sender may not be permitted to see definitions and consumers.
        return
    if name not in names:
        close = closest_name(name, names)
        hint = f"; did you mean {close!r}?" if close else ""
        say(f"queue {name!r} has no definition and no consumer, so its messages wait for one{hint}")
