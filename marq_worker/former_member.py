"""Group membership of trackers across restarts: removes a killed worker's member, and accepts a new address.

After a kill -9 the broker waits for the dead member's session to expire; until then its partitions have no owner. The
next worker that locks the folder knows that the former member is dead, and removes it from the group.

It does so once it joins itself: an empty group would make the broker wait for more members
(`group.initial.rebalance.delay.ms`), and the others have one rebalance instead of two.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.group import LeaveGroupRequest
from faust.assignor import PartitionAssignor
from faust.assignor.client_assignment import ClientMetadata

from marq.kafka.connection import plain_admin
from marq.settings.client import ClientSettings

log = logging.getLogger("marq.worker")

#: File in the worker's folder with its member id.
_FILE = "member"
_POLL_SECONDS = 0.05


def remember(folder: Path, member: str) -> None:
    try:
        (folder / _FILE).write_text(member)
    except OSError as error:
        log.warning("after a kill -9, a restart will wait for the session timeout: %s: %s", folder / _FILE, error)


async def expel(client: ClientSettings, folder: Path, limit_s: float) -> None:
    """Make the folder's former member leave the group of trackers, as soon as a member is joining.

    ``limit_s``: its session expires by then.
    """
    try:
        former = (folder / _FILE).read_text()
    except OSError:
        return
    try:
        async with asyncio.timeout(limit_s), plain_admin(client) as admin:
            await _expel(admin, client.names.app_id, former)
    except Exception as error:  # nothing is lost but time
        log.info("the former member %s was left to its session timeout: %r", former, error)


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
    log.info("the former member %s was killed: removed from the group", former)


class TrackerAssignor(PartitionAssignor):
    """Accepts an assignment with any address; others learn the current one from the group's members.

    A static member that restarts within its session keeps its partitions: the broker returns its former assignment
    without asking the leader. It contains the member's address, and Faust asserts that this is the current one. A new
    web port or pod address would stop the coordinator, and the worker would read nothing.
    """

    def on_assignment(self, assignment: Any) -> None:
        metadata = ClientMetadata.loads(self._decompress(assignment.user_data))
        metadata.url = str(self._url)
        assignment.user_data = self._compress(metadata.dumps())
        super().on_assignment(assignment)
