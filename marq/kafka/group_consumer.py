"""aiokafka's consumer, with four repairs to its membership in a group (aiokafka 0.14).

**A leader only assigns partitions that it knows.** The leader of a group reads the partitions of all topics from its
own metadata. If the broker goes down between the leader's join and its metadata request, aiokafka assigns no
partitions, and tries again after five minutes. Here the leader first waits for the broker's answer. The group loses
nothing by this, because no member could read in that time. A topic that the broker does not know is left out, so that
one deleted topic does not stop the others. The leader asks for it again every :data:`LOOK_AGAIN_S`.

**A static member that another client has replaced stops.** The broker forgets the former member of an instance id as
soon as a client joins with the same id. aiokafka then joins again without its member id, which replaces the other
client, and so on endlessly. Here, a static member joins again with its previous member id. If the session has ended and
the instance id is free, the broker answers that the member id is unknown. If another client has the instance id now, it
answers ``FENCED_INSTANCE_ID``. A new process has no member id, so a restart after kill -9 always wins.

**A changed subscription does not end the fetch task.** The fetch task waits for an assignment. If the consumer
subscribes again before the task wakes up, the new subscription has no assignment yet, and aiokafka's task fails. The
member then keeps its partitions and reads nothing. Here the task waits for the next assignment.

**A coordinator that is loading its groups is asked again.** It has lost the rebalance, so the member joins again.
aiokafka does so only if the coordinator gives this answer to a JoinGroup request. After a SyncGroup request it stops.

All uses of aiokafka's private names for this are in this file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from aiokafka import TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import GroupLoadInProgressError, KafkaError, UnknownMemberIdError
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest

from marq.kafka.foreign_transactions import CautiousConsumer, CautiousFetcher
from marq.kafka.protocol import FENCED_INSTANCE_ID, known_ids
from marq.wire.errors import ConfigError

log = logging.getLogger("marq")

#: Seconds between two requests for topics that the broker does not know.
LOOK_AGAIN_S = 5.0
#: Seconds between two metadata requests to a broker that does not answer.
_PAUSE_S = 0.5


class _Fenced(Exception):
    """Another client has joined with the same instance id. Not a KafkaError: aiokafka would try again."""


class Coordinator(GroupCoordinator):  # type: ignore[misc]
    """The part of a consumer that joins the group."""

    #: Called once, in the consumer's event loop, when another client has taken the instance id.
    on_fenced: Callable[[], None]
    member_id: str
    #: The member id before the last reset; empty once the broker has said that it does not know it.
    _former_id = ""
    _timer: asyncio.TimerHandle | None = None

    # --- the leader ---------------------------------------------------------------------------------------------------

    async def _perform_assignment(self, response: Any) -> Any:
        topics = {
            topic
            for *_, metadata in response.members
            for topic in ConsumerProtocol.METADATA.decode(metadata).subscription
        }
        await self._learn(topics)
        assignments = await super()._perform_assignment(response)
        if unknown := self._unknown(topics):
            log.warning(
                "group %s: the broker does not know these topics, so their partitions are not assigned: %s",
                self.group_id,
                unknown,
            )
            self._look_again_later()
        return assignments

    async def _learn(self, topics: Collection[str]) -> None:
        """Wait until the broker has answered which partitions the topics have."""
        self._client.set_topics(topics)
        await self._client._maybe_wait_metadata()
        while self._unknown(topics) and not await self._client.force_metadata_update():
            await asyncio.wait([self._closing], timeout=_PAUSE_S)
            if self._closing.done():
                # Returning would send the members an empty assignment.
                raise KafkaError("the consumer was closed before it could assign partitions")

    def _unknown(self, topics: Collection[str]) -> list[str]:
        return sorted(topic for topic in topics if self._cluster.partitions_for_topic(topic) is None)

    def _look_again_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        # If a topic has become known, the metadata changes, and aiokafka makes the group rejoin.
        if not self._closing.done() and self._unknown(self._group_subscription or ()):
            self._client.force_metadata_update()
            self._look_again_later()

    # --- the static member --------------------------------------------------------------------------------------------

    def reset_generation(self) -> None:
        self._former_id = self.member_id or self._former_id
        super().reset_generation()

    async def _do_rejoin_group(self, subscription: Any) -> bool:
        if self._group_instance_id is not None:
            self.member_id = self.member_id or self._former_id
        try:
            return bool(await super()._do_rejoin_group(subscription))
        except _Fenced:
            self.on_fenced()
            await asyncio.wait([self._closing])
            return False

    async def _send_req(self, request: Any) -> Any:
        response = await super()._send_req(request)
        code = getattr(response, "error_code", 0)
        if code == FENCED_INSTANCE_ID:
            raise _Fenced
        if code == UnknownMemberIdError.errno and isinstance(request, JoinGroupRequest):
            self.member_id = self._former_id = JoinGroupRequest.UNKNOWN_MEMBER_ID
        if code == GroupLoadInProgressError.errno and isinstance(request, SyncGroupRequest):
            # aiokafka joins again, as after a broken connection.
            raise GroupLoadInProgressError
        return response


class GroupSubscriptionState(SubscriptionState):  # type: ignore[misc]
    """The topics and partitions of a consumer."""

    async def wait_for_assignment(self) -> None:
        """Wait for the next assignment that is still valid when the caller continues."""
        while True:
            await super().wait_for_assignment()
            if self.subscription is not None and self.subscription.assignment is not None:
                return


class GroupFetcher(CautiousFetcher):
    """The part of a consumer that fetches; it reports messages that retention removed before they were read."""

    async def _proc_fetch_request(self, assignment: Any, node_id: Any, request: Any) -> bool:
        arrived = await super()._proc_fetch_request(assignment, node_id, request)
        for topic, partitions in request.topics:
            for number, offset, *_ in partitions:
                state = assignment.state_value(TopicPartition(topic, number))
                # Without an earlier fetch, the offset may be 0 only because the group has committed none.
                if state.awaiting_reset and state.highwater is not None:
                    log.error(
                        "topic %s, partition %s: the log no longer has the next offset, %s: retention has removed"
                        " records before they were read, or the topic was recreated",
                        topic, number, offset,
                    )  # fmt: skip
        return arrived


class GroupConsumer(CautiousConsumer):
    """A consumer with our :class:`Coordinator`, :class:`GroupSubscriptionState` and :class:`GroupFetcher`; aiokafka has
    no option for them.
    """

    #: Called when another client has joined the group with the same instance id; the consumer then receives nothing.
    on_fenced: Callable[[], None] = staticmethod(lambda: None)
    _made: Any = None

    @property
    def _coordinator(self) -> Any:
        return self._made

    @_coordinator.setter
    def _coordinator(self, coordinator: Any) -> None:
        if isinstance(coordinator, GroupCoordinator):
            # Its task has not run yet: aiokafka sets this before it waits for anything.
            coordinator.__class__ = Coordinator
            # Its fetch task has not run yet, either.
            self._subscription.__class__ = GroupSubscriptionState
            coordinator.on_fenced = self.on_fenced
        self._made = coordinator

    def _adapt(self, fetcher: Any) -> None:
        super()._adapt(fetcher)
        fetcher.__class__ = GroupFetcher

    def read_committed(self, committed: bool) -> None:
        """Set the isolation level of later fetches; then call :meth:`subscribe`, which drops the current ones."""
        self._fetcher._isolation_level = READ_COMMITTED if committed else READ_UNCOMMITTED

    async def topic_ids(self, partitions: Collection[TopicPartition]) -> set[tuple[str, str]]:
        """Return the topics of partitions with their ids, as the partitions' leaders know them now; raises KafkaError.

        A leader whose records were fetched knows at least the incarnation that they are from. There is no id of a topic
        that is deleted, or of any topic before Kafka 2.8.
        """
        leaders = {partition: self._client.cluster.leader_for_partition(partition) for partition in partitions}
        asked: dict[int, set[str]] = {}
        for partition, leader in leaders.items():
            if leader is not None and leader >= 0:
                asked.setdefault(leader, set()).add(partition.topic)
        # A connection of its own: on the other one, the broker answers after the fetch that waits for records.
        sends = [partial(self._client.send, leader, group=ConnectionGroup.COORDINATION) for leader in asked]
        answers = await asyncio.gather(*map(known_ids, sends, map(sorted, asked.values())))
        return {topic_and_id for ids in answers for topic_and_id in ids.items()}

    def positions(self) -> dict[TopicPartition, int]:
        """Return the next offset of each assigned partition; none during a rebalance."""
        subscription = self._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        offsets = {} if assignment is None else assignment.all_consumed_offsets()
        return {partition: offset.offset for partition, offset in offsets.items()}

    @property
    def failure(self) -> BaseException | None:
        """Why the consumer can no longer receive; None if it can, or was stopped.

        aiokafka raises these errors only in ``getmany`` and ``getone``. May be called in any thread.
        """
        if self._coordinator is None:
            return None
        failure: BaseException | None = self._coordinator._pending_exception
        for task in (self._coordinator._coordination_task, self._fetcher._fetch_task):
            if failure is None and task.done():
                error = None if task.cancelled() else task.exception()
                failure = error or KafkaError("a task of the consumer was cancelled")
        # Checked last, because a stop sets this flag before it ends the tasks.
        return None if self._closed else failure


def replaced(group: str, instance_id: str | None) -> ConfigError:
    """Return the error of a member whose instance id another client has taken."""
    return ConfigError(
        f"group {group}: this consumer has stopped, because another client joined the group with the same instance_id"
        f" {instance_id!r}. Give each consumer of a group its own instance_id"
    )
