"""Warns if no tracker runs: messages are delivered, but unacknowledged ones are never redelivered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiokafka.errors import KafkaError

from marq.kafka.connection import plain_admin
from marq.settings.client import ClientSettings

log = logging.getLogger("marq")

#: Seconds after the start at which to look; the warning comes after the last look.
LOOKS_S = (1.0, 4.0, 8.0)
_LOOK_LIMIT_S = 1.5


async def watch_for_tracker(runs: Callable[[], Awaitable[bool | None]], settings: ClientSettings) -> None:
    """Return when a tracker was seen, or after one warning."""
    passed_s = 0.0
    for look_s in LOOKS_S:
        await asyncio.sleep(look_s - passed_s)
        passed_s = look_s
        if await runs() is not False:
            return
    log.warning(
        "no tracker runs: leases will not expire, and released and rejected messages will not move."
        " Start one with `marq worker` (consumer group %s has no members at %s)",
        settings.names.app_id,
        settings.bootstrap_servers,
    )


async def tracker_runs(settings: ClientSettings) -> bool | None:
    """Return whether the consumer group of the trackers has members, None if unknown."""
    try:
        async with asyncio.timeout(_LOOK_LIMIT_S), plain_admin(settings) as admin:
            responses = await admin.describe_consumer_groups([settings.names.app_id])
    except (KafkaError, TimeoutError) as error:
        log.debug("cannot look up the trackers' group: %r", error)
        return None
    # (error, group, state, protocol type, protocol, members, …); a group without members so far is "Dead".
    return any(group[5] for response in responses for group in response.groups)
