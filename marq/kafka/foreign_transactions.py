"""Delivers no record of another program's transaction before it is committed, and none if it is aborted.

By default, consumers read with ``read_uncommitted``, so that a tracker's open transaction delays no consumer. Its
redeliveries are messages even if they are aborted (docs/guarantees.md, cause 6). An aborted record of another program
is not a message. The broker lists aborted transactions only in answers to ``read_committed`` fetches, and these wait
behind every open transaction.

So the consumer checks the batches of each fetch before it delivers a record. If a batch belongs to another program's
transaction, the consumer drops the fetch, and reads with ``read_committed`` from then on. In the messages topic, a
transactional batch is a tracker's if it begins with a redelivery. No tracker writes to any other topic that is read
here.

This file, :mod:`marq.kafka.lenient_names` and :mod:`marq.kafka.group_consumer` use aiokafka's private names (0.14).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from typing import Any

from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, FetchResult

from marq.kafka.lenient_names import LenientBatch, LenientConsumer, LenientFetcher
from marq.wire.record_headers import is_redelivery, without_copied

log = logging.getLogger("marq")

#: The beginning of a record batch: its length, version and attributes, and the id of its producer.
_HEAD = struct.Struct(">8xi4xb4xh20xq")
#: Bytes before those that the length of a batch counts.
_BEFORE = 12
#: Bits of the attributes.
_TRANSACTIONAL, _CONTROL = 0x10, 0x20


def _transactional(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the batches of transactions, with the ids of their producers, among those of a fetch."""
    begin = 0
    while begin + _HEAD.size <= len(data):
        length, version, attributes, producer_id = _HEAD.unpack_from(data, begin)
        end = begin + _BEFORE + length
        # A broker may cut off the last batch. Batches of earlier versions have other fields and no transactions.
        if end > len(data) or length <= 0:
            return
        if version >= 2 and attributes & (_TRANSACTIONAL | _CONTROL) == _TRANSACTIONAL:
            yield producer_id, data[begin:end]
        begin = end


class CautiousFetcher(LenientFetcher):
    """A fetcher that :class:`CautiousConsumer` makes of aiokafka's."""

    messages_topic: str
    #: The producer ids of trackers.
    _trackers: set[int]

    async def _proc_fetch_request(self, assignment: Any, node_id: Any, request: Any) -> bool:
        arrived = bool(await super()._proc_fetch_request(assignment, node_id, request))
        # aiokafka has just stored the records. No task has read them, because nothing was awaited since.
        if request._isolation_level == READ_UNCOMMITTED:
            for topic, partitions in request.topics:
                for number, *_ in partitions:
                    self._check(TopicPartition(topic, number))
        return arrived

    def _check(self, partition: TopicPartition) -> None:
        result = self._records.get(partition)
        if not isinstance(result, FetchResult) or not result.has_more():
            return
        # The answer to a request from before the change does not say which records are aborted.
        if self._isolation_level == READ_COMMITTED or self._is_foreign(partition, result._partition_records):
            # aiokafka fetches it again.
            del self._records[partition]

    def _is_foreign(self, partition: TopicPartition, unread: Any) -> bool:
        """Return whether a fetch contains a record of another program's transaction; if so, read committed records."""
        for producer_id, data in _transactional(unread._records.data):
            if producer_id in self._trackers:
                continue
            batch = LenientBatch(data)
            if not batch.validate_crc():
                # Reading ends there with an error.
                return False
            if partition.topic == self.messages_topic and _begins_with_redelivery(batch):
                self._trackers.add(producer_id)
                continue
            self._isolation_level = READ_COMMITTED
            log.info(
                "another program writes transactions, so only committed records are read from now on: topic=%s"
                " partition=%d offset=%d", *partition, batch.base_offset,
            )  # fmt: skip
            return True
        return False


def _begins_with_redelivery(batch: Any) -> bool:
    first = next(iter(batch), None)
    return first is not None and is_redelivery(without_copied(first.headers, own_topic=False))


class CautiousConsumer(LenientConsumer):
    """A consumer that delivers no uncommitted records of other programs.

    ``messages_topic`` is the only topic that is read here and to which trackers write.
    """

    messages_topic = ""

    def __init__(self, *, messages_topic: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.messages_topic = messages_topic

    def _adapt(self, fetcher: Any) -> None:
        fetcher.__class__ = CautiousFetcher
        fetcher.messages_topic = self.messages_topic
        fetcher._trackers = set()

    @property
    def reads_committed(self) -> bool:
        """Whether records behind an open transaction wait for its end."""
        return self._fetcher is not None and bool(self._fetcher._isolation_level == READ_COMMITTED)
