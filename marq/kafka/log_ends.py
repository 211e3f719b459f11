"""The end offsets of logs whose leaders answer soon.

aiokafka's ``end_offsets`` waits until every partition has a leader, so a single partition would block all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest, OffsetResetStrategy

from marq.wire.markers import Source

log = logging.getLogger("marq")

#: Time limit for the answer of one leader.
LIMIT_S = 5.0
_READ_UNCOMMITTED = 0


async def log_ends(admin: AIOKafkaAdminClient, sources: Collection[Source]) -> dict[Source, int]:
    """Return the ends of partitions, open transactions included, with one request to each leader.

    Partitions whose leaders do not answer are left out. Raises KafkaError.
    """
    request = MetadataRequest(sorted({source.topic for source in sources}), allow_auto_topic_creation=False)
    topics = (await admin._send_request(request)).to_object()["topics"]
    asked: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for topic in topics:
        for partition in topic["partitions"]:
            source, leader = Source(topic["topic"], partition["partition"]), partition["leader"]
            if leader >= 0 and source in sources:
                wanted = asked.setdefault(leader, {}).setdefault(source.topic, [])
                wanted.append((source.partition, OffsetResetStrategy.LATEST))
    answers = await asyncio.gather(*[_ends(admin, *leader_and_topics) for leader_and_topics in asked.items()])
    return {source: end for ends in answers for source, end in ends.items()}


async def _ends(
    admin: AIOKafkaAdminClient, leader: int, topics: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[Source, int]:
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await admin._send_request(OffsetRequest(-1, _READ_UNCOMMITTED, list(topics.items())), leader)
    except (KafkaError, TimeoutError) as error:
        log.warning("could not check where partitions end: broker=%s topics=%s error=%r", leader, [*topics], error)
        return {}
    return {
        Source(topic, number): end
        for topic, partitions in answer.topics
        for number, code, _, end in partitions
        if code == 0
    }
