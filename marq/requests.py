"""Requests of Kafka's protocol that aiokafka 0.14 lacks: offsets that no open transaction can still move.

Both are of KIP-447. With them a member of a consumer group may commit in a transaction: the group refuses the commit of
a member that it has thrown out, and whoever reads the offsets waits for the transactions of those who had the
partitions before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from aiokafka import TopicPartition
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields
from aiokafka.structs import OffsetAndMetadata

#: What a broker says of an offset that an open transaction may still move.
UNSTABLE_OFFSET_COMMIT = 88

_TEXT = CompactString("utf-8")
_TAGS: dict[int, bytes] = {}
_OFFSET = (("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", _TEXT))

Value = TypeVar("Value")


def _topics(partitions: CompactArray) -> CompactArray:
    return CompactArray(("name", _TEXT), ("partitions", partitions), ("tags", TaggedFields))


class Generation(NamedTuple):
    """A member of a consumer group, between two rebalances."""

    number: int
    member_id: str
    instance_id: str | None


class _TxnOffsetCommitResponse(Response):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", _topics(CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields)))),
        ("tags", TaggedFields),
    )


class _TxnOffsetCommitRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _TxnOffsetCommitResponse
    SCHEMA = Schema(
        ("transactional_id", _TEXT),
        ("group_id", _TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        ("topics", _topics(CompactArray(*_OFFSET, ("tags", TaggedFields)))),
        ("tags", TaggedFields),
    )


class CommitOfMember(Request[_TxnOffsetCommitRequest]):  # type: ignore[misc]
    """Commits offsets in a transaction, as a member of the group: refused when it is none any more."""

    API_KEY = 28

    def __init__(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        group: str,
        generation: Generation,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        self._head = (transactional_id, group, *producer, *generation)
        self._offsets = offsets

    def build(self, request_struct_class: type[_TxnOffsetCommitRequest]) -> _TxnOffsetCommitRequest:
        topics = [
            (topic, [(tp.partition, each.offset, -1, each.metadata, _TAGS) for tp, each in offsets], _TAGS)
            for topic, offsets in _by_topic(self._offsets.items())
        ]
        return request_struct_class(*self._head, topics, _TAGS)


class _OffsetFetchResponse(Response):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", _topics(CompactArray(*_OFFSET, ("error_code", Int16), ("tags", TaggedFields)))),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class _OffsetFetchRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _OffsetFetchResponse
    SCHEMA = Schema(
        ("group_id", _TEXT),
        ("topics", _topics(CompactArray(Int32))),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class StableOffsets(Request[_OffsetFetchRequest]):  # type: ignore[misc]
    """Asks for a group's committed offsets, and for an error where an open transaction may still move one."""

    API_KEY = 9

    def __init__(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._group = group
        self._partitions = list(partitions)

    def build(self, request_struct_class: type[_OffsetFetchRequest]) -> _OffsetFetchRequest:
        topics = [
            (topic, [tp.partition for tp, _ in found], _TAGS)
            for topic, found in _by_topic([(tp, None) for tp in self._partitions])
        ]
        return request_struct_class(self._group, topics, True, _TAGS)


def _by_topic(
    offsets: Iterable[tuple[TopicPartition, Value]],
) -> Iterable[tuple[str, list[tuple[TopicPartition, Value]]]]:
    found: dict[str, list[tuple[TopicPartition, Value]]] = {}
    for partition, value in offsets:
        found.setdefault(partition.topic, []).append((partition, value))
    return found.items()
