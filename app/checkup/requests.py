"""Requests of Kafka's protocol that aiokafka lacks: what we are allowed to do, and who is in a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DescribeGroupsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Bytes, Int16, Int32, Schema, String


class _MetadataResponse(Response):
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", Array(("node_id", Int32), ("host", String("utf-8")), ("port", Int32), ("rack", String("utf-8")))),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("name", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("cluster_authorized_operations", Int32),
    )


class _MetadataRequest(RequestStruct):
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class AllowedOnTopics(Request[_MetadataRequest]):
    """Asks what is allowed on topics, which brokers tell since Kafka 2.3; makes none."""

    API_KEY = 3

    def __init__(self, topics: list[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_MetadataRequest]) -> _MetadataRequest:
        return request_struct_class(self._topics, False, False, True)


class _DescribeGroupsRequest(RequestStruct):
    API_KEY = 15
    API_VERSION = 3
    # aiokafka 0.14 reads the answer as one of version 2, which has no rights in it: of several groups it can't be read.
    RESPONSE_TYPE = DescribeGroupsResponse_v3
    SCHEMA = Schema(("groups", Array(String("utf-8"))), ("include_authorized_operations", Boolean))


class _DescribedGroups(Request[_DescribeGroupsRequest]):
    """Describes groups and asks what is allowed with them, which brokers tell since Kafka 2.3."""

    API_KEY = 15

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups

    def build(self, request_struct_class: type[_DescribeGroupsRequest]) -> _DescribeGroupsRequest:
        return request_struct_class(list(self._groups), True)


async def described_groups(admin: AIOKafkaAdminClient, groups: Sequence[str], node: int) -> Any:
    """Return what a coordinator says of groups; without what is allowed with them where it is older than Kafka 2.3.

    Raises:
        KafkaError: it could not be asked.
    """
    return await _describe(admin, _DescribedGroups(groups), groups, node)


class _DescribeGroupsResponseV4(Response):
    API_KEY = 15
    API_VERSION = 4
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "groups",
            Array(
                ("error_code", Int16),
                ("group", String("utf-8")),
                ("state", String("utf-8")),
                ("protocol_type", String("utf-8")),
                ("protocol", String("utf-8")),
                (
                    "members",
                    Array(
                        ("member_id", String("utf-8")),
                        ("group_instance_id", String("utf-8")),
                        ("client_id", String("utf-8")),
                        ("client_host", String("utf-8")),
                        ("member_metadata", Bytes),
                        ("member_assignment", Bytes),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
    )


class _DescribeGroupsRequestV4(RequestStruct):
    API_KEY = 15
    API_VERSION = 4
    RESPONSE_TYPE = _DescribeGroupsResponseV4
    SCHEMA = _DescribeGroupsRequest.SCHEMA


class _DescribedMembers(Request[_DescribeGroupsRequest | _DescribeGroupsRequestV4]):
    """aiokafka 0.14 lacks version 4, the first that returns instance ids."""

    API_KEY = 15

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups

    def build(
        self, request_struct_class: type[_DescribeGroupsRequest | _DescribeGroupsRequestV4]
    ) -> _DescribeGroupsRequest | _DescribeGroupsRequestV4:
        return request_struct_class(list(self._groups), False)


async def described_with_instance_ids(admin: AIOKafkaAdminClient, groups: Sequence[str], node: int) -> Any:
    """Return a coordinator's descriptions of groups, in version 4 from Kafka 2.4 on.

    Raises:
        KafkaError: it could not be asked.
    """
    return await _describe(admin, _DescribedMembers(groups), groups, node)


async def _describe(admin: AIOKafkaAdminClient, request: Request[Any], groups: Sequence[str], node: int) -> Any:
    try:
        return await admin._send_request(request, node)
    except NotImplementedError:
        # aiokafka raises it for a broker that supports none of the request's versions: Kafka before 2.3.
        return await admin._send_request(DescribeGroupsRequest(list(groups)), node)
