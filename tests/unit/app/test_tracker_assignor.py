"""What a worker takes for its assignment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from yarl import URL

from marq_worker.former_member import TrackerAssignor

BEFORE, NOW = URL("http://pod-1:6066"), URL("http://pod-2:6067")


def assignor(url: URL) -> Any:
    tables = SimpleNamespace(data={}, changelog_topics=set())
    sensors = SimpleNamespace(on_assignment_start=lambda _: None, on_assignment_completed=lambda *_: None)
    app = SimpleNamespace(tables=tables, conf=SimpleNamespace(canonical_url=url), tracer=None, sensors=sensors)
    return TrackerAssignor(app)


def test_a_static_member_takes_the_assignment_of_its_former_life_at_another_address() -> None:
    cluster = SimpleNamespace(partitions_for_topic=lambda _: {0, 1})
    told = ConsumerProtocolMemberMetadata.decode(assignor(BEFORE).metadata({"markers"}).encode())
    [assignment] = assignor(BEFORE).assign(cluster, {"m": told}).values()

    restarted = assignor(NOW)
    restarted.on_assignment(ConsumerProtocolMemberAssignment.decode(assignment.encode()))

    assert sorted(tp.partition for tp in restarted.assigned_actives()) == [0, 1]
