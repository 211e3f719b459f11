"""What ``/readyz`` says of a group that has members and has assigned them no partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

import marq
from marq.wire.names import Names
from tests.check.checking import NewWorker, make_topics
from tests.worker.handling import Handlers
from tests.worker.harness import eventually

pytestmark = pytest.mark.verify

QUEUES = '[queues.handled]\nhandler = "handlers_of_the_test:coroutine"\n'


class LeaderWithoutMetadata(RoundRobinPartitionAssignor):  # type: ignore[misc]
    """Assigns what a leader assigns that knows no topic, as leaders of older versions of Marq do."""

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, ConsumerProtocolMemberAssignment]:
        return {member: ConsumerProtocolMemberAssignment(cls.version, [], b"") for member in members}


async def test_a_group_of_handlers_whose_leader_assigns_nothing(
    new_worker: NewWorker, servers: str, prefix: str, names: Names, handlers: Handlers
) -> None:
    await make_topics(servers, prefix)
    group = names.named_group("handlers")
    leader = AIOKafkaConsumer(
        names.messages,
        bootstrap_servers=servers,
        group_id=group,
        partition_assignment_strategy=[LeaderWithoutMetadata],
        enable_auto_commit=False,
    )
    await leader.start()
    worker = new_worker(prefix=prefix, queues=QUEUES)
    worker.environment.update(handlers.environment)
    try:
        await worker.start().ready()
        async with marq.Producer(servers, prefix=prefix) as producer:
            await producer.send("handled", b"x")

        async def joined() -> bool:
            return "Setting newly assigned partitions" in worker.log().partition("HandlersApp]: Starting")[2]

        await eventually(joined)
        status, text = await eventually(lambda: worker.page("/readyz"), lambda page: "a rebalance" not in page[1])
    finally:
        await leader.stop()

    assert (status, f"group {group}" in text) == (503, True), text

    # The next leader knows its topics.
    assert len(await handlers.has_noted("handled", 1)) == 1
    await eventually(lambda: worker.page("/readyz"), lambda page: page[0] == 200)
