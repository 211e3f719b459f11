"""A consumer that writes its history: ``python -m faults.consumer NAME HISTORY QUEUE [--die-at POINT --die-after N]``.

What it does with a message is decided by the number that is the message's value: most are acknowledged, some given
back, some rejected, some fail (``--manner``). At a point of the five steps it can kill itself with -9.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import marq
from faults import newer
from faults.recording import Recorder
from marq.core.marker_codec import decode
from marq.core.markers import Ack, Acquire, Renew, Source, Spend
from marq.flow import Flow
from marq.reader import GroupReader
from marq.starts import MARKED, STARTS
from marq.transactions import MarkerTransactions
from marq.writer import KafkaMarkerWriter, MarkerRecord
from proof import history

#: Messages of one receive, and how long it waits for the first.
RECEIVE_MESSAGES = 100
RECEIVE_SECONDS = 1.0
#: Of so many messages one each is given back, rejected and fails, at its first attempt.
KINDS = 20
#: What is done with these; all others are acknowledged.
MANNERS = {
    "mixed": {1: "later", 2: "release", 3: "reject"},
    #: Also exceptions: by the queue's backoff, by their own, and the end by their own.
    "failing": {1: "later", 2: "release", 3: "reject", 4: RuntimeError, 5: TimeoutError, 6: ValueError},
    "rejecting": {3: "reject", 6: ValueError},
    #: A quarter fails at every attempt, and another one at every second offset, whichever the attempt is.
    "hopeless": {**dict.fromkeys(range(5), "hopeless"), **dict.fromkeys(range(5, 10), "moody")},
    "patient": {},
}


class Point(StrEnum):
    """Where a consumer dies."""

    BEFORE_ACQUIRE = "before-acquire"
    AFTER_ACQUIRE = "after-acquire"
    AFTER_COMMIT = "after-commit"
    BEFORE_SPEND = "before-spend"
    AFTER_SPEND = "after-spend"
    IN_HANDLER = "in-handler"
    BEFORE_ACK = "before-ack"


class Death:
    """Comes at the n-th time that a point is passed."""

    def __init__(self, recorder: Recorder, point: str | None, after: int) -> None:
        self._recorder = recorder
        self._point = point
        self._passes = itertools.count(1)
        self._after = after

    def at(self, point: Point) -> None:
        if point == self._point and next(self._passes) >= self._after:
            self._recorder.die()


class Watched:
    """Records what the library writes, and lets death come between."""

    def __init__(self, recorder: Recorder, death: Death, *, careless: bool) -> None:
        self._recorder = recorder
        self._death = death
        self._careless = careless
        #: What the last ACQUIREs took: cycles never overlap, so it is what a commit is about.
        self._acquired: list[dict[str, Any]] = []

    def install(self) -> None:
        """Put this around the library's own functions, of this whole process."""
        write, commit, revoked = KafkaMarkerWriter.write, GroupReader.commit, Flow.revoked

        async def watched_write(writer: KafkaMarkerWriter, records: Sequence[MarkerRecord], limit_s: float) -> None:
            await self._write(records, lambda: write(writer, records, limit_s))

        async def watched_commit(reader: GroupReader, offsets: Any) -> None:
            await self._commit(lambda: commit(reader, offsets))

        async def watched_revoked(flow: Flow) -> None:
            self._recorder.add("info", "revoke", target=self._recorder.process)
            await revoked(flow)

        transact, start = MarkerTransactions._transact, MarkerTransactions.write

        async def watched_transact(writer: Any, producer: Any, records: Any, group_commit: Any) -> None:
            commit_transaction = producer.commit_transaction

            async def commit_unless_dead() -> None:
                self._death.at(Point.AFTER_ACQUIRE)
                await commit_transaction()

            producer.commit_transaction = commit_unless_dead
            try:
                await transact(writer, producer, records, group_commit)
            finally:
                producer.commit_transaction = commit_transaction

        async def watched_start(writer: Any, records: Any, group_commit: Any, limit_s: float) -> None:
            await self._start(records, lambda: start(writer, records, group_commit, limit_s))

        MarkerTransactions._transact = watched_transact  # type: ignore[method-assign]
        MarkerTransactions.write = watched_start  # type: ignore[method-assign]
        KafkaMarkerWriter.write = watched_write  # type: ignore[method-assign]
        GroupReader.commit = watched_commit  # type: ignore[method-assign]
        Flow.revoked = watched_revoked  # type: ignore[method-assign]

    async def _write(self, records: Sequence[MarkerRecord], write: Callable[[], Awaitable[None]]) -> None:
        batches = [decode(value) for _, value in records]
        if any(isinstance(batch, Ack) for batch in batches):
            self._death.at(Point.BEFORE_ACK)
        acquires = [_names(batch) for batch in batches if isinstance(batch, Acquire)]
        if acquires and self._careless:
            return
        if acquires:
            self._acquired = acquires
            self._death.at(Point.BEFORE_ACQUIRE)
        # Outcomes are told by whoever decides them.
        renews = [_names(batch) for batch in batches if isinstance(batch, Renew)]
        spends = [_names(batch) for batch in batches if isinstance(batch, Spend)]
        if spends:
            self._death.at(Point.BEFORE_SPEND)
        with self._told("acquire", acquires), self._told("renew", renews), self._told("spend", spends):
            await write()
        if acquires:
            self._death.at(Point.AFTER_ACQUIRE)
        if spends:
            self._death.at(Point.AFTER_SPEND)

    async def _start(self, records: Sequence[MarkerRecord], start: Callable[[], Awaitable[None]]) -> None:
        self._death.at(Point.BEFORE_ACQUIRE)
        with self._told("acquire", [_names(decode(value)) for _, value in records]):  # type: ignore[arg-type]
            await start()
        self._death.at(Point.AFTER_COMMIT)

    async def _commit(self, commit: Callable[[], Awaitable[None]]) -> None:
        with self._told("commit", self._acquired):
            await commit()
        if self._acquired:
            self._death.at(Point.AFTER_COMMIT)
        self._acquired = []

    @contextmanager
    def _told(self, op: str, named: list[dict[str, Any]]) -> Iterator[None]:
        began, outcome = time.monotonic(), "unknown"
        for names in named:
            self._recorder.add("invoke", op, **names)
        try:
            yield
            outcome = "ok"
        finally:
            took_ms = int((time.monotonic() - began) * 1000)
            for names in named:
                self._recorder.add(outcome, op, **names, took_ms=took_ms)


def _names(batch: Acquire | Renew | Spend) -> dict[str, Any]:
    return _named(batch.holder, batch.source, list(batch.offsets))


def _named(holder: int, source: Source, offsets: list[int]) -> dict[str, Any]:
    return {"holder": history.holder_name(holder), "source": history.log_name(source), "offsets": offsets}


class Handler:
    """Works on one message after the other as its number says, and tells of it."""

    def __init__(self, recorder: Recorder, death: Death, work_seconds: float, manner: str) -> None:
        self._recorder = recorder
        self._death = death
        self._work_seconds = work_seconds
        self._manner = MANNERS[manner]

    async def handle(self, message: marq.Message) -> None:
        record, lease = message._record, message._lease
        self._recorder.add(
            "ok", "deliver", group="g", queue=message.queue, attempt=message.attempt,
            record=history.name_of(lease.source, message.offset), holder=history.holder_name(lease.holder),
            content=history.content(message.queue, record.key, message._raw, record.headers),
        )  # fmt: skip
        self._death.at(Point.IN_HANDLER)
        await asyncio.sleep(self._work_seconds)
        kind = self._kind_of(message)
        if kind == "later":
            await self._settle("release", message, lambda: message.release(delay=0.5))
        elif kind == "release":
            await self._settle("release", message, message.release)
        elif kind == "reject":
            await self._settle("reject", message, lambda: message.reject("by its number"))
        elif kind is None:
            await self._settle("ack", message, message.ack)
        else:
            rejects = kind is ValueError or message._lease.spending is not None
            await self._settle("reject" if rejects else "release", message, lambda: self._fail(message, kind))

    def _kind_of(self, message: marq.Message) -> Any:
        """Return what to do with a message; None: acknowledge it."""
        kind = self._manner.get(int(message.body or b"0") % KINDS)
        if kind == "hopeless" or (kind == "moody" and message.offset % 2):
            return RuntimeError
        return kind if kind != "moody" and message.attempt == 1 else None

    @staticmethod
    async def _fail(message: marq.Message, kind: Any) -> None:
        """As a handler that raises."""
        with suppress(kind):
            async with message:
                raise kind("by its number")
        await message._settled("release", wait=True)

    async def _settle(self, op: str, message: marq.Message, settle: Callable[[], Awaitable[None]]) -> None:
        names = _named(message._lease.holder, message._lease.source, [message.offset])
        self._recorder.add("invoke", op, **names)
        try:
            await settle()
        except marq.LeaseLost:
            # An ack was written all the same, another outcome perhaps.
            lost = {"lost": [message.offset]} if op == "ack" else {}
            self._recorder.add("ok" if op == "ack" else "unknown", op, **names, **lost)
        except marq.MarqError as error:
            self._recorder.add("unknown", op, **names, error=str(error))
        else:
            self._recorder.add("ok", op, **names)


async def consume(queue: str, options: dict[str, Any], handler: Handler, recorder: Recorder) -> None:
    """Handle messages until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with marq.Consumer(queue, **options) as consumer:
        recorder.add("info", "ready")
        while not stopping.is_set():
            try:
                messages = await consumer.receive(RECEIVE_MESSAGES, wait=RECEIVE_SECONDS)
            except marq.BrokerUnavailable:
                continue
            await asyncio.gather(*map(handler.handle, messages))
        recorder.add("info", "stop", target=recorder.process)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults.consumer", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("history", type=Path)
    parser.add_argument("queue")
    parser.add_argument("--die-at", choices=list(Point))
    parser.add_argument("--die-after", type=int, default=1, metavar="N")
    parser.add_argument("--work", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument("--lease", type=float, metavar="SECONDS")
    parser.add_argument("--instance-id", help="as of marq.Consumer")
    parser.add_argument("--start", choices=STARTS, default=MARKED, help="as of marq.Consumer")
    parser.add_argument("--manner", choices=MANNERS, default="mixed", help="what becomes of messages")
    parser.add_argument("--careless", action="store_true", help="write no ACQUIREs: a loss, for the test of the check")
    parser.add_argument("--newer", action="store_true", help="be of the next version")
    given = parser.parse_args()
    if given.newer:
        newer.install()
    recorder = Recorder(given.name, given.history)
    death = Death(recorder, given.die_at, given.die_after)
    Watched(recorder, death, careless=given.careless).install()
    handler = Handler(recorder, death, given.work, given.manner)
    options = {"lease": given.lease, "start": given.start, "instance_id": given.instance_id}
    asyncio.run(consume(given.queue, options, handler, recorder))


if __name__ == "__main__":
    main()
