"""Requests of Kafka's protocol that aiokafka 0.14 lacks, as one table of layouts.

* Offsets that no open transaction can still move (KIP-447). With them a member of a consumer group may commit in a
  transaction: the group refuses the commit of a member that it has expelled, and a member that reads the offsets waits
  for the transactions of the former owners of its partitions.
* Allowed operations on topics and groups (KIP-430), and the instance ids of a group's members (KIP-345).
* Ids of topics (KIP-516), which distinguish a topic from a deleted one of the same name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError
from aiokafka.protocol.admin import DescribeGroupsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)
from aiokafka.structs import OffsetAndMetadata

from marq.wire.names import incarnation, log_name

#: The error code of an offset that an open transaction may still move.
UNSTABLE_OFFSET_COMMIT = 88
#: The error code for a member whose instance id a later member has taken over.
FENCED_INSTANCE_ID = 82

Value = TypeVar("Value")
_Fields = tuple[tuple[str, Any], ...]


class Generation(NamedTuple):
    """A member of a consumer group, between two rebalances."""

    number: int
    member_id: str
    instance_id: str | None


# --- layouts ----------------------------------------------------------------------------------------------------------


def _response(key: int, version: int, fields: _Fields) -> type[Response]:
    return type("_Response", (Response,), {"API_KEY": key, "API_VERSION": version, "SCHEMA": Schema(*fields)})


def _layout(
    key: int, version: int, request: _Fields, response: _Fields | type[Response], *, flexible: bool = False
) -> type[RequestStruct]:
    answer = _response(key, version, response) if isinstance(response, tuple) else response
    fields = {"API_KEY": key, "API_VERSION": version, "FLEXIBLE_VERSION": flexible, "RESPONSE_TYPE": answer}
    return type("_Request", (RequestStruct,), {**fields, "SCHEMA": Schema(*request)})


_TEXT, _STRING = CompactString("utf-8"), String("utf-8")
_NO_TAGS: dict[int, bytes] = {}
_TAGS = ("tags", TaggedFields)
_THROTTLE, _ERROR, _PARTITION = ("throttle_time_ms", Int32), ("error_code", Int16), ("partition", Int32)
_OFFSET = (_PARTITION, ("offset", Int64), ("leader_epoch", Int32), ("metadata", _TEXT))


def _topics(*partition: Any) -> tuple[str, Any]:
    return "topics", CompactArray(("name", _TEXT), ("partitions", CompactArray(*partition)), _TAGS)


_TXN_OFFSET_COMMIT = _layout(
    28,
    3,
    (
        ("transactional_id", _TEXT),
        ("group_id", _TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        _topics(*_OFFSET, _TAGS),
        _TAGS,
    ),
    (_THROTTLE, _topics(_PARTITION, _ERROR, _TAGS), _TAGS),
    flexible=True,
)
_OFFSET_FETCH = _layout(
    9,
    7,
    (("group_id", _TEXT), _topics(Int32), ("require_stable", Boolean), _TAGS),
    (_THROTTLE, _topics(*_OFFSET, _ERROR, _TAGS), _ERROR, _TAGS),
    flexible=True,
)
_BROKER = (("node_id", Int32), ("host", _STRING), ("port", Int32), ("rack", _STRING))
_TOPIC_PARTITION = (
    _ERROR,
    _PARTITION,
    ("leader", Int32),
    ("leader_epoch", Int32),
    ("replicas", Array(Int32)),
    ("isr", Array(Int32)),
    ("offline_replicas", Array(Int32)),
)
_TOPIC = (
    _ERROR,
    ("name", _STRING),
    ("is_internal", Boolean),
    ("partitions", Array(*_TOPIC_PARTITION)),
    ("authorized_operations", Int32),
)
_METADATA = _layout(
    3,
    8,
    (
        ("topics", Array(_STRING)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    ),
    (
        _THROTTLE,
        ("brokers", Array(*_BROKER)),
        ("cluster_id", _STRING),
        ("controller_id", Int32),
        ("topics", Array(*_TOPIC)),
        ("cluster_authorized_operations", Int32),
    ),
)
#: aiokafka has no type for UUIDs.
_TOPIC_ID = (("id_high", Int64), ("id_low", Int64))
_TOPIC_IDS = _layout(
    3,
    10,
    (
        ("topics", CompactArray(*_TOPIC_ID, ("name", _TEXT), _TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _TAGS,
    ),
    (
        _THROTTLE,
        ("brokers", CompactArray(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), _TAGS)),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                _ERROR,
                ("name", _TEXT),
                *_TOPIC_ID,
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        _ERROR,
                        _PARTITION,
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        _TAGS,
                    ),
                ),
                ("authorized_operations", Int32),
                _TAGS,
            ),
        ),
        ("cluster_authorized_operations", Int32),
        _TAGS,
    ),
    flexible=True,
)
_MEMBER = (
    ("member_id", _STRING),
    ("group_instance_id", _STRING),
    ("client_id", _STRING),
    ("client_host", _STRING),
    ("member_metadata", Bytes),
    ("member_assignment", Bytes),
)
_GROUP = (
    _ERROR,
    ("group", _STRING),
    ("state", _STRING),
    ("protocol_type", _STRING),
    ("protocol", _STRING),
    ("members", Array(*_MEMBER)),
    ("authorized_operations", Int32),
)
_GROUPS = (("groups", Array(_STRING)), ("include_authorized_operations", Boolean))
_DESCRIBE_GROUPS = (
    # aiokafka 0.14 reads the answer as version 2, without allowed operations: with several groups it is unreadable.
    _layout(15, 3, _GROUPS, DescribeGroupsResponse_v3),
    _layout(15, 4, _GROUPS, (_THROTTLE, ("groups", Array(*_GROUP)))),
)


# --- requests ---------------------------------------------------------------------------------------------------------


class HandMade(Request[RequestStruct]):  # type: ignore[misc]
    """A request in the newest of these layouts that the broker supports; all of them have the same fields."""

    API_KEY = -1

    def __init__(self, layouts: Sequence[type[RequestStruct]], *values: Any) -> None:
        self.API_KEY = layouts[0].API_KEY
        self._CLASSES = tuple(layouts)
        self._values = values

    def build(self, request_struct_class: type[RequestStruct]) -> RequestStruct:
        return request_struct_class(*self._values)


def commit_of_member(
    transactional_id: str,
    producer: tuple[int, int],
    group: str,
    generation: Generation,
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
) -> HandMade:
    """Return the request to commit offsets in a transaction as a member of a group, which the group may refuse."""
    entries = [
        (tp, (tp.partition, position.offset, -1, position.metadata, _NO_TAGS)) for tp, position in offsets.items()
    ]
    head = (transactional_id, group, *producer, *generation)
    return HandMade([_TXN_OFFSET_COMMIT], *head, _by_topic(entries), _NO_TAGS)


def stable_offsets(group: str, partitions: Iterable[TopicPartition]) -> HandMade:
    """Return the request for a group's committed offsets; an offset that may still move is answered by an error."""
    return HandMade([_OFFSET_FETCH], group, _by_topic([(tp, tp.partition) for tp in partitions]), True, _NO_TAGS)


def allowed_on_topics(topics: list[str]) -> HandMade:
    """Return the request for the allowed operations on topics, which Kafka 2.3 and newer answer; it creates none."""
    return HandMade([_METADATA], topics, False, False, True)


def ids_of_topics(topics: Iterable[str]) -> HandMade:
    """Return the request for the ids of topics, which Kafka 2.8 and newer answer; it does not create the topics."""
    return HandMade([_TOPIC_IDS], [(0, 0, topic, _NO_TAGS) for topic in topics], False, False, False, _NO_TAGS)


async def known_ids(send: Callable[[HandMade], Awaitable[Any]], topics: Iterable[str]) -> dict[str, str]:
    """Return the ids of those topics that exist, in hexadecimal; none from a broker without ids. Raises KafkaError."""
    try:
        answer = await send(ids_of_topics(topics))
    except NotImplementedError:
        # aiokafka raises it for a broker that does not know the request.
        return {}
    return {name: topic_id for _, name, high, low, *_ in answer.topics if (topic_id := _id_text(high, low))}


def is_missing(answer: Any, topic: str, partition: int) -> bool:
    """Return whether a partition does not exist, by the answer to :func:`ids_of_topics`.

    ``topic`` may be the name of an incarnation: the partitions of another one do not count.
    """
    for code, name, high, low, _, partitions, *_ in answer.topics:
        if name == log_name(topic) and not code:
            present = incarnation(name, _id_text(high, low))
            recreated = present != name and topic not in (name, present)
            return recreated or all(number != partition for _, number, *_ in partitions)
        if name == log_name(topic):
            return bool(code == UnknownTopicOrPartitionError.errno)
    return False


def _id_text(high: int, low: int) -> str:
    """Return the id of a topic in hexadecimal, empty if it has none."""
    return f"{high % 2**64:016x}{low % 2**64:016x}" if high or low else ""


async def describe_groups(
    admin: AIOKafkaAdminClient, groups: Sequence[str], node: int, *, permissions: bool = False
) -> Any:
    """Return a coordinator's descriptions of groups; raises KafkaError.

    Brokers return permissions from Kafka 2.3 on, and the instance ids of members from 2.4 on.
    """
    try:
        return await admin._send_request(HandMade(_DESCRIBE_GROUPS, list(groups), permissions), node)
    except NotImplementedError:
        # aiokafka raises it for a broker that supports none of the layouts: Kafka before 2.3.
        return await admin._send_request(DescribeGroupsRequest(list(groups)), node)


def _by_topic(
    entries: Iterable[tuple[TopicPartition, Value]],
) -> list[tuple[str, list[Value], dict[int, bytes]]]:
    topics: dict[str, list[Value]] = {}
    for partition, value in entries:
        topics.setdefault(partition.topic, []).append(value)
    return [(topic, values, _NO_TAGS) for topic, values in topics.items()]
