"""Members of real groups, and the queues that none of them reads."""

from __future__ import annotations

import os
import socket

from aiokafka.admin import AIOKafkaAdminClient

import marq
from marq.kafka.group_members import described_members, listed_groups
from marq.kafka.queue_positions import committed_by
from marq.settings.definitions import Definitions
from marq.wire.names import Names
from marq_worker.backlog.consumer_watch import unattended


async def test_consumers_of_one_process_are_told_apart_and_queues_without_any_are_found(
    servers: str, prefix: str, names: Names
) -> None:
    client, definitions = {"bootstrap_servers": servers, "prefix": prefix}, Definitions()
    group = names.group("emails")
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        async with marq.Producer(**client) as producer, marq.Consumer("emails", instance_id="one", **client) as one:
            await producer.send("emails", b"x")
            await one.ack(await one.receive(wait=30))

            async with marq.Consumer("emails", instance_id="two", client_id="billing", **client):
                [found] = await described_members(admin, {group: (await listed_groups(admin))[group]})
                lonely = await unattended(admin, names, definitions, ["emails", "never-read"])

        assert {(member.instance_id, member.client_id) for member in found.members} == {
            ("one", "marq"),
            ("two", "billing"),
        }
        assert {member.pid for member in found.members} == {os.getpid()}
        assert len({member.id for member in found.members}) == 2
        assert lonely == {"never-read"}
        offsets = await admin.list_consumer_group_offsets(group)
        by = {committed_by(commit.metadata) for commit in offsets.values() if commit.offset > 0}
        assert by == {f"one on {socket.gethostname()} (process {os.getpid()})"}
    finally:
        await admin.close()
