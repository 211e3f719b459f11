"""Which handlers a worker runs when a queue's own topic is missing: those of all other queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from unittest.mock import Mock

import pytest

from marq.wire.errors import BrokerUnavailable
from marq_worker.handlers.handlers_role import HandlersRole
from tests.unit.app.definitions import in_file


class Cluster:
    """The broker's topics, or no broker."""

    def __init__(self) -> None:
        self.topics: set[str] | None = set()

    async def missing(self, own: Mapping[str, str]) -> Mapping[str, str]:
        if self.topics is None:
            raise BrokerUnavailable("no broker")
        return {queue: f"no {topic}" for queue, topic in own.items() if topic not in self.topics}


def role(cluster: Cluster, **queues: Mapping[str, Any]) -> tuple[HandlersRole, Mock]:
    definitions = in_file(**{queue: {"handler": "some_module:handle", **own} for queue, own in queues.items()})
    processes = Mock()
    made = HandlersRole((), processes, cast("Any", Mock(definitions=definitions)), cluster.missing)
    return made, processes


def running(processes: Mock) -> dict[str, list[str]]:
    [groups] = processes.want.call_args.args
    return {name: sorted(group.queues) for name, group in groups.items()}


async def test_a_queue_without_its_topic_is_left_out_until_the_topic_exists(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    made, processes = role(cluster, orders={"topic": "orders"}, emails={}, alone={"topic": "alone", "group": "g"})

    assert await made._look_for_topics()
    made._follow()
    assert running(processes) == {"handlers": ["emails"]}
    assert "queue not served, retrying: queue=orders error=no orders" in caplog.text

    assert not await made._look_for_topics()
    cluster.topics = {"orders", "alone"}
    assert await made._look_for_topics()
    made._follow()
    assert running(processes) == {"handlers": ["emails", "orders"], "g": ["alone"]}
    assert caplog.text.count("queue not served") == 2


async def test_without_a_broker_nothing_changes() -> None:
    cluster = Cluster()
    made, processes = role(cluster, orders={"topic": "orders"}, emails={})
    await made._look_for_topics()

    cluster.topics = None

    assert not await made._look_for_topics()
    made._follow()
    assert running(processes) == {"handlers": ["emails"]}
