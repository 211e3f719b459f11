"""The incarnations of the queues' own topics that a group's member reads.

Other programs own these topics, and may delete one and create it again. Then its offsets begin at 0 again, but all that
Marq knows about an offset belongs to the former topic. So sources carry the topic's id
(:func:`marq.wire.names.incarnation`), and a reader checks the ids after each fetch: if a topic still has the id that it
had before, the records are from that incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError

from marq.kafka.paced_clients import client_of
from marq.kafka.protocol import known_ids
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.wire.markers import Source
from marq.wire.names import incarnation, incarnation_id

log = logging.getLogger("marq")

#: Seconds between two checks of topics that return no records: the new topic may end where the former one did.
CHECK_S = 5.0
#: Time limit for a check.
CHECK_LIMIT_S = 5.0
#: Pause after a check that failed.
PAUSE_S = 0.5

#: Returns the topics of partitions with their ids; raises KafkaError.
TopicIds = Callable[[Collection[Source]], Awaitable[Collection[tuple[str, str]]]]


async def refreshed(consumer: Any, topics: Collection[str]) -> dict[str, str]:
    """Update what a consumer knows of topics; return the names of their incarnations, without unknown ones.

    Raises KafkaError.
    """
    client = client_of(consumer)
    # aiokafka asks every five minutes: until then, it does not know of added partitions.
    await client.force_metadata_update()
    send = partial(client.send, client.get_random_node(), group=ConnectionGroup.COORDINATION)
    return {topic: incarnation(topic, topic_id) for topic, topic_id in (await known_ids(send, topics)).items()}


class Recreated(Exception):
    """A topic was deleted and created again: the places to read from must be looked up again."""


class Incarnations:
    """The sources of a member, by the partitions that Kafka assigned to it.

    ``topic_ids`` asks the leaders of partitions. ``go_back`` reads from these offsets of partitions again.
    """

    def __init__(self, topic_ids: TopicIds, go_back: Callable[[Mapping[Source, int]], None]) -> None:
        self._topic_ids = topic_ids
        self._go_back = go_back
        self._sources: dict[Source, Source] = {}
        #: The records that are being checked, by partition.
        self._fetched: dict[Source, Records] = {}
        self._checked_s = 0.0

    def begin(self, partition: Source, topic_id: str) -> Source:
        """Start to read a partition of a topic with this id, which may be empty; return its source."""
        source = self._sources[partition] = partition.of(topic_id)
        return source

    def clear(self) -> None:
        """Stop reading all partitions."""
        self._sources.clear()
        self._fetched.clear()

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        """Read from these offsets of sources again; sources that are not read are ignored."""
        current = {source.log: offset for source, offset in offsets.items() if self._sources.get(source.log) == source}
        for partition in current:
            # They would be delivered before the records that are read again.
            self._fetched.pop(partition, None)
        self._go_back(current)

    async def checked(self, serving: Serving, fetched: Mapping[Source, Records]) -> dict[Source, Records]:
        """Return the records of partitions by their sources, without those that will be read again.

        Raises Recreated. Without the check, records of a topic that was created again would have the identities of
        former ones.
        """
        self._fetched = dict(fetched)
        if partitions := self._to_check(serving, fetched):
            try:
                async with asyncio.timeout(CHECK_LIMIT_S):
                    ids = await self._topic_ids(partitions)
                self._check_known(fetched, ids)
            except (TimeoutError, KafkaError) as error:
                # Records of the messages topic need no check: they would be read again and again while a leader of
                # another topic does not answer, and no queue of the group would receive anything.
                unknown = {
                    source: self._fetched.pop(source) for source in [*self._fetched] if serving.is_own(source.topic)
                }
                # Without records nothing is held up, and an outage has log lines of its own.
                log.log(
                    logging.WARNING if unknown else logging.DEBUG, "topic ids are unknown, reading again: %r", error
                )
                self._go_back({partition: read.offsets[0] for partition, read in unknown.items()})
                await asyncio.sleep(PAUSE_S)
                # Again: a check that took as long as its pause would follow each fetch.
                self._checked_s, ids = time.monotonic(), ()
            if self._are_recreated(ids):
                raise Recreated
        checked, self._fetched = self._fetched, {}
        return {self._sources[partition]: read for partition, read in checked.items() if partition in self._sources}

    def _to_check(self, serving: Serving, fetched: Iterable[Source]) -> list[Source]:
        """Return the partitions of own topics that returned records, and sometimes all others."""
        wanted = [partition for partition in fetched if serving.is_own(partition.topic)]
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return wanted
        self._checked_s = now_s
        return [partition for partition in self._sources if serving.is_own(partition.topic)]

    def _check_known(self, fetched: Iterable[Source], ids: Collection[tuple[str, str]]) -> None:
        known = {topic for topic, _ in ids}
        for partition in fetched:
            if incarnation_id(self._sources.get(partition, partition).topic) and partition.topic not in known:
                raise KafkaError(f"topic {partition.topic} is being deleted")

    def _are_recreated(self, ids: Collection[tuple[str, str]]) -> bool:
        changed = {
            (partition.topic, incarnation_id(source.topic), incarnation_id(now.topic))
            for topic, topic_id in ids
            for partition, source in self._sources.items()
            if partition.topic == topic and (now := partition.of(topic_id)) != source
        }
        for topic, former, current in sorted(changed):
            log.warning(
                "topic %s was deleted and created again: reading it from its start (former id %s, id %s)",
                topic, former or "unknown", current,
            )  # fmt: skip
        return bool(changed)
