"""Takes the dead member out of the group that a kill -9 of this worker left there.

The broker waits for a member that says nothing until its session has run out, and meanwhile nobody owns a partition.
The next worker with the same folder knows better: it holds the folder's lock, so whoever had it before is dead. It says
so for the dead one.

Only once it joins itself, for two reasons: a group that is empty in between makes the broker wait for further members
(`group.initial.rebalance.delay.ms`), and those who live have one rebalance instead of two.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.group import LeaveGroupRequest

from marq.connection import client_options, close_admin
from marq.reconnects import paced
from marq.settings import ClientSettings

log = logging.getLogger("marq.worker")

#: In the worker's folder: the id by which the group knows it.
_FILE = "member"
_POLL_SECONDS = 0.05


def remember(folder: Path, member: str) -> None:
    """Write down who the owner of a folder is in the group."""
    try:
        (folder / _FILE).write_text(member)
    except OSError as error:
        log.warning(
            "after a kill -9 a restart will have to wait for the session timeout: %s: %s", folder / _FILE, error
        )


async def expel(client: ClientSettings, folder: Path, limit_s: float) -> None:
    """Make the folder's former member leave the group of trackers, as soon as somebody is joining it.

    ``limit_s``: by then its session has run out anyway.
    """
    try:
        former = (folder / _FILE).read_text()
    except OSError:
        return
    admin = paced(AIOKafkaAdminClient(**client_options(client)))
    try:
        async with asyncio.timeout(limit_s):
            await admin.start()
            await _expel(admin, client.names.app_id, former)
    except (KafkaError, TimeoutError) as error:
        # Nothing is lost by it but time.
        log.info("the former member %s was left to its session timeout: %r", former, error)
    finally:
        await close_admin(admin)


async def _expel(admin: AIOKafkaAdminClient, group: str, former: str) -> None:
    while True:
        [response] = await admin.describe_consumer_groups([group])
        # (error, group, state, protocol type, protocol, members, …), each member beginning with its id
        [(code, _, state, _, _, members, *_)] = response.groups
        if code:
            raise for_code(code)
        if former not in [member for member, *_ in members]:
            return
        if state != "Stable":
            break
        await asyncio.sleep(_POLL_SECONDS)
    coordinator = await admin.find_coordinator(group)
    answer = await admin._send_request(LeaveGroupRequest(group, former), coordinator)
    if answer.error_code:
        raise for_code(answer.error_code)
    log.info("the former member %s was killed: taken out of the group", former)
