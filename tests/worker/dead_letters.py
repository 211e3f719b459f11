"""Dead letters that are written as the tracker writes them, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import marq
from marq.wire.dead_letter_notes import Disposition, decode, is_note
from marq.wire.markers import Source
from marq.wire.names import DEAD_LETTERED_AT_HEADER, ERROR_HEADER, ID_HEADER, REASON_HEADER
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, eventually, header


class Yard:
    """Dead letters, for tests."""

    def __init__(self, worker: Worker, namespace: Namespace, dead_letters: marq.DeadLetters) -> None:
        self.worker = worker
        self.dead_letters = dead_letters
        self.namespace = namespace
        self._topic = worker.names.dead_letters

    async def bury(self, queue: str, count: int, *, partition: int = 0, reason: str = "no good") -> set[bytes]:
        """Write dead letters; return their ids."""
        sent, ids = [], []
        for number in range(count):
            ids.append(f"gone/{partition}/{number}-{queue}".encode())
            headers = [
                (ID_HEADER, ids[-1]), (REASON_HEADER, reason.encode()), (ERROR_HEADER, b"LookupError: [/x]"),
                (DEAD_LETTERED_AT_HEADER, b"%d" % (1_700_000_000_000 + number)), ("tenant", b"acme"),
            ]  # fmt: skip
            sent.append(
                await self.namespace.producer.send(
                    self._topic, b"%d" % number, queue.encode(), partition=partition, headers=headers
                )
            )
        await asyncio.gather(*sent)
        return set(ids)

    async def delivered(self, *queues: str) -> Counter[bytes]:
        """How often each id was sent back to these queues."""
        keys = {queue.encode() for queue in queues}
        records = await self.namespace.records(self.worker.names.messages)
        return Counter(header(record)[ID_HEADER] for record in records if record.key in keys)

    async def notes(self) -> Counter[str]:
        """Count the outcomes of dead letters; each is reported once, except to callers that came too late."""
        found: Counter[str] = Counter()
        told: set[tuple[int, int]] = set()
        for record in await self.namespace.records(self._topic):
            note = decode(Source(self._topic, record.partition), record.value) if is_note(record) else None
            if note is not None and note.became is not Disposition.BEFORE:
                # Written once more where it was unknown whether a transaction had been committed.
                places = {(record.partition, offset) for offset in note.offsets} - told
                told |= places
                found[note.became] += len(places)
        return found

    async def each_once(self, queue: str, ids: set[bytes]) -> None:
        """Wait until all these were delivered; fail if one was twice, or another one was."""
        found = await eventually(lambda: self.delivered(queue), lambda counts: len(counts) >= len(ids))
        assert found == dict.fromkeys(ids, 1)


@asynccontextmanager
async def yard_of(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Yard]:
    servers = broker.bootstrap_servers
    async with (
        Namespace(servers, worker.names) as namespace,
        marq.DeadLetters(servers, prefix=worker.names.prefix) as dead_letters,
    ):
        yield Yard(worker, namespace, dead_letters)
