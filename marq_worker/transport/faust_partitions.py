"""What a stream reader needs of the consumer of a Faust application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from faust.types import TP

from marq.kafka.committed_offsets import places
from marq.kafka.queue_positions import committer
from marq.wire.markers import Source
from marq_worker.transport.stream_reader import FaustConsumerPort

if TYPE_CHECKING:
    from marq_worker.app.faust_app import MarqApp


def faust_partitions(app: MarqApp) -> FaustConsumerPort:
    """Return the operations of an application's consumer on its partitions."""
    consumer = app.consumer

    def partitions(sources: Iterable[Source]) -> set[TP]:
        return {TP(*source) for source in sources}

    async def log_start(source: Source) -> int:
        return int((await consumer.earliest_offsets(TP(*source)))[TP(*source)])

    async def log_end(source: Source) -> int:
        return int((await consumer.highwaters(TP(*source)))[TP(*source)])

    return FaustConsumerPort(
        seek=lambda source, offset: consumer.seek_wait({TP(*source): offset}),
        settled=app.settled,
        pause=lambda sources: consumer.pause_partitions(partitions(sources)),
        resume=lambda sources: consumer.resume_partitions(partitions(sources)),
        commit=lambda offsets, generation, limit_s: consumer.thread.commit_exactly(
            {TP(*source): offset for source, offset in offsets.items()}, generation, limit_s
        ),
        places=lambda serving, sources: places(app.client, app.conf.id, serving, sources),
        log_start=log_start,
        log_end=log_end,
        returned_to=lambda source: consumer.thread.returned_to(TP(*source)),
        topic_ids=lambda sources: consumer.thread.topic_ids(partitions(sources)),
        committer=committer(app.settings.instance_id or app.client.client_id),
        group=app.conf.id,
        generation=lambda: consumer.thread.generation,
    )
