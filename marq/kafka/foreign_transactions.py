"""Delivers no record of another program's transaction before it is committed, and none if it is aborted.

By default, consumers read with ``read_uncommitted``, so that a tracker's open transaction delays no consumer. Its
redeliveries are messages even if they are aborted (docs/guarantees.md, cause 6). An aborted record of another program
is not a message. The broker lists aborted transactions only in answers to ``read_committed`` fetches, and these wait
behind every open transaction.

So the consumer checks the batches of each fetch before it delivers a record. If a batch belongs to another program's
transaction, the consumer drops the fetch, and reads with ``read_committed`` from then on. In the messages topic, a
transactional batch is a tracker's if it begins with a redelivery. No tracker writes to any other topic that is read
here.

This file and :mod:`marq.kafka.group_consumer` use aiokafka's private names (0.14).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, Fetcher, FetchResult
from aiokafka.errors import CorruptRecordException

from marq.wire.record_headers import is_redelivery, without_copied

log = logging.getLogger("marq")


class _Batches:
    """The record batches of a fetch that were looked through; takes the place of aiokafka's ``MemoryRecords``."""

    def __init__(self, records: Any) -> None:
        self.batches: deque[Any] = deque()
        self._error: CorruptRecordException | None = None
        try:
            while records.has_next():
                self.batches.append(records.next_batch())
        except CorruptRecordException as error:
            # Raised when it is its turn, as by aiokafka: here it would end the fetch task.
            self._error = error

    def has_next(self) -> bool:
        return bool(self.batches) or self._error is not None

    def next_batch(self) -> Any:
        if self.batches:
            return self.batches.popleft()
        assert self._error is not None
        raise self._error


class CautiousFetcher(Fetcher):  # type: ignore[misc]
    """aiokafka's fetcher, which :class:`CautiousConsumer` turns into this class."""

    messages_topic: str
    #: The producer ids of trackers.
    _trackers: set[int]

    async def _proc_fetch_request(self, assignment: Any, node_id: Any, request: Any) -> bool:
        arrived = bool(await super()._proc_fetch_request(assignment, node_id, request))
        # aiokafka has just stored the records. No task has read them, because nothing was awaited since.
        if request._isolation_level == READ_UNCOMMITTED:
            for topic, partitions in request.topics:
                for number, *_ in partitions:
                    self._look_through(TopicPartition(topic, number))
        return arrived

    def _look_through(self, partition: TopicPartition) -> None:
        result = self._records.get(partition)
        if not isinstance(result, FetchResult) or not result.has_more():
            return
        unread = result._partition_records
        if isinstance(unread._records, _Batches):
            return
        unread._records = batches = _Batches(unread._records)
        # The answer to a request from before the change does not say which records are aborted.
        if self._isolation_level == READ_COMMITTED or not self._may_deliver(partition, batches.batches):
            # aiokafka fetches it again.
            del self._records[partition]

    def _may_deliver(self, partition: TopicPartition, batches: deque[Any]) -> bool:
        for batch in batches:
            if not batch.is_transactional or batch.is_control_batch or batch.producer_id in self._trackers:
                continue
            if not batch.validate_crc():
                # Reading ends there with an error.
                return True
            if partition.topic == self.messages_topic and _begins_with_redelivery(batch):
                # A batch can be read only once, so the fetch is repeated, once for each tracker.
                self._trackers.add(batch.producer_id)
                return False
            self._isolation_level = READ_COMMITTED
            log.info(
                "another program writes transactions, so only committed records are read from now on: topic=%s"
                " partition=%d offset=%d", *partition, batch.base_offset,
            )  # fmt: skip
            return False
        return True


def _begins_with_redelivery(batch: Any) -> bool:
    first = next(iter(batch), None)
    return first is not None and is_redelivery(without_copied(first.headers, own_topic=False))


class CautiousConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """A consumer that delivers no uncommitted records of other programs.

    ``messages_topic`` is the only topic that is read here and to which trackers write.
    """

    messages_topic = ""
    _made_fetcher: Any = None

    def __init__(self, *, messages_topic: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.messages_topic = messages_topic

    @property
    def _fetcher(self) -> Any:
        return self._made_fetcher

    @_fetcher.setter
    def _fetcher(self, fetcher: Any) -> None:
        if isinstance(fetcher, Fetcher):
            # Its fetch task has not run yet: aiokafka sets this before it waits for anything.
            fetcher.__class__ = CautiousFetcher
            fetcher.messages_topic = self.messages_topic
            fetcher._trackers = set()
        self._made_fetcher = fetcher

    @property
    def reads_committed(self) -> bool:
        """Whether records behind an open transaction wait for its end."""
        return self._fetcher is not None and bool(self._fetcher._isolation_level == READ_COMMITTED)
