"""Warns when no tracker runs: messages are then delivered, but what is not acked never comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.connection import client_options, close_admin
from marq.reconnects import paced
from marq.settings import ClientSettings

log = logging.getLogger("marq")

#: When to look after the start, in seconds; the warning comes after the last look that finds nobody.
LOOKS_S = (1.0, 4.0, 8.0)
_LOOK_LIMIT_S = 1.5


async def watch_for_tracker(runs: Callable[[], Awaitable[bool | None]], settings: ClientSettings) -> None:
    """Return when a tracker was seen, or after one warning; ``runs`` tells whether there is one."""
    passed_s = 0.0
    for look_s in LOOKS_S:
        await asyncio.sleep(look_s - passed_s)
        passed_s = look_s
        if await runs() is not False:
            return
    log.warning(
        "no tracker runs: leases will not expire, and released or rejected messages stay where they are."
        " Start one with `faust -A app worker` (consumer group %s has no members at %s)",
        settings.names.app_id,
        settings.bootstrap_servers,
    )


async def tracker_runs(settings: ClientSettings) -> bool | None:
    """Whether the consumer group of the trackers has members; None when that can't be found out."""
    admin = paced(AIOKafkaAdminClient(**client_options(settings)))
    try:
        async with asyncio.timeout(_LOOK_LIMIT_S):
            await admin.start()
            responses = await admin.describe_consumer_groups([settings.names.app_id])
    except (KafkaError, TimeoutError) as error:
        log.debug("the trackers' group could not be looked up: %r", error)
        return None
    finally:
        await close_admin(admin)
    # (error, group, state, protocol type, protocol, members, …); a group that nobody has joined yet is "Dead".
    return any(group[5] for response in responses for group in response.groups)
