"""aiokafka's fetch task: it survives a subscription that changes during an assignment, and its end is an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import Fetcher, OffsetResetStrategy
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState, TopicPartitionState
from aiokafka.errors import KafkaError

from marq.kafka.fetched_columns import fetch_records
from marq.kafka.foreign_transactions import CautiousFetcher
from marq.kafka.group_consumer import GroupConsumer
from tests.unit.client.fakes import LIMIT_S, spin


@pytest.fixture
async def consumer() -> AsyncIterator[GroupConsumer]:
    """A consumer that was started with everything but a broker."""
    consumer = GroupConsumer(group_id="g")
    consumer._fetcher = Fetcher(consumer._client, consumer._subscription)
    consumer._coordinator = GroupCoordinator(consumer._client, SubscriptionState())
    yield consumer
    await consumer.stop()


def change_during_assignment(subscription: Any) -> None:
    subscription.assign_from_subscribed(set())
    subscription.subscribe({"a", "b"})


async def test_a_subscription_that_changes_during_an_assignment_does_not_end_the_fetch_task(
    consumer: GroupConsumer,
) -> None:
    subscription = consumer._subscription
    subscription.subscribe({"a"})
    await spin()

    change_during_assignment(subscription)
    await spin()
    assert not consumer._fetcher._fetch_task.done()

    subscription.assign_from_subscribed(set())
    await spin()
    assert subscription.subscription.assignment.active
    assert consumer._fetcher._wait_consume_future is not None


async def test_a_consumer_says_why_it_receives_nothing_more(consumer: GroupConsumer) -> None:
    assert consumer.failure is None
    error = KafkaError("SyncGroup was refused")

    consumer._coordinator._pending_exception = error
    assert consumer.failure is error
    consumer._coordinator._pending_exception = None
    consumer._fetcher._fetch_task.cancel()
    await spin()
    assert isinstance(consumer.failure, KafkaError)

    await consumer.stop()
    assert consumer.failure is None


async def test_a_consumer_that_has_not_started_has_not_failed() -> None:
    consumer = GroupConsumer(group_id="g")

    assert consumer.failure is None
    await consumer.stop()


@pytest.fixture
async def doomed() -> AsyncIterator[Any]:
    """A consumer of aiokafka's own, whose fetch task a change of its subscription ends."""
    subscription = SubscriptionState()
    client = SimpleNamespace(_loop=asyncio.get_running_loop(), _metadata_max_age_ms=1)
    fetcher = Fetcher(client, subscription)
    coordinator = SimpleNamespace(check_errors=lambda: None)
    subscription.subscribe({"a"})
    await spin()
    yield SimpleNamespace(_fetcher=fetcher, _subscription=subscription, _coordinator=coordinator)
    await asyncio.gather(fetcher.close(), return_exceptions=True)


async def test_a_fetch_raises_if_the_fetch_task_has_ended(doomed: Any) -> None:
    change_during_assignment(doomed._subscription)
    await spin()
    doomed._subscription.assign_from_subscribed(set())

    for _ in range(2):
        with pytest.raises(KafkaError, match="fetching ended unexpectedly: AssertionError"):
            await fetch_records(doomed, 0.0, 100)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_fetch_that_waits_raises_when_the_fetch_task_ends(doomed: Any, how: str) -> None:
    doomed._subscription.assign_from_subscribed(set())
    await spin()
    fetching = asyncio.create_task(fetch_records(doomed, 3600.0, 100))
    await spin()

    if how == "cancelled":
        doomed._fetcher._fetch_task.cancel()
    else:
        doomed._fetcher._wait_consume_future.cancel()
        doomed._fetcher._get_actions_per_node = None
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(KafkaError, match="fetching ended unexpectedly"):
            await fetching


async def test_positions_are_those_of_assigned_partitions_that_are_known(consumer: GroupConsumer) -> None:
    subscription, known, unknown = consumer._subscription, TopicPartition("a", 0), TopicPartition("a", 1)
    before = consumer.positions()
    subscription.subscribe({"a"})
    during = consumer.positions()
    subscription.assign_from_subscribed({known, unknown})
    subscription.subscription.assignment.state_value(known).seek(7)

    assert (before, during, consumer.positions()) == ({}, {}, {known: 7})


@pytest.mark.parametrize("fetched_before", [False, True])
async def test_records_that_retention_removed_before_they_were_read_are_reported(
    consumer: GroupConsumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fetched_before: bool
) -> None:
    """A group that has committed nothing begins at 0, and no message of it is lost if the log begins later."""
    partition, state = TopicPartition("a", 0), TopicPartitionState(None)
    state.seek(7)
    state.highwater = 9 if fetched_before else None

    async def refused(*_: object) -> bool:
        state.await_reset(OffsetResetStrategy.EARLIEST)
        return False

    monkeypatch.setattr(CautiousFetcher, "_proc_fetch_request", refused)
    assignment = SimpleNamespace(state_value={partition: state}.get)
    request = SimpleNamespace(topics=[("a", [(0, 7, 1 << 20)])])

    await consumer._fetcher._proc_fetch_request(assignment, 1, request)

    assert ("retention has removed records before they were read" in caplog.text) is fetched_before
