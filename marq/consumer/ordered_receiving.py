"""Queues with ordering: what a receiver does for them in addition to the steps of :mod:`marq.consumer.receiver`.

Before a receiver acquires messages of such a queue in a source, it **resumes** the source: it asks the tracker which
messages are open (RESUME), and then commits, which the group rejects if the source has another reader by now. The
answer therefore covers everything that any former reader has delivered. From then on,
:class:`marq.consumer.one_per_key.Lines` decide which message is next. The position of the queue is its lowest open
message, so that the next reader reads all open messages again.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any

from marq.client.background import failure_of, until_set
from marq.consumer.acquisition import Acquisition, acquisitions_again
from marq.consumer.held_batch import HeldBatch
from marq.consumer.line_places import Place, Reading
from marq.consumer.message import Message
from marq.consumer.one_per_key import Lines
from marq.consumer.receiver_settings import ReceiverSettings
from marq.consumer.resume_questions import TrackerQueries, open_messages, questions_about
from marq.consumer.waiting_limit import BlockedReads, WaitingLimit
from marq.kafka.group_reader import NotCommitted
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.settings.queue import QueueSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import BLOCKED_WAIT_MS, Resume, Resumed, Source
from marq.wire.ordered_holders import ordered_holder

log = logging.getLogger("marq")

#: How long to wait before the next question about a message that another consumer holds.
FIRST_ASK_S, MAX_ASK_S = 0.05, 1.0
#: How long to wait before the next question about a released message: only a purge, or an ack by token, ends its delay.
WAITING_ASK_S = 10.0
#: Pause after a failed attempt to acquire messages.
RETRY_S = 0.1
#: How long positions wait for a commit if nothing new is read.
COMMIT_S = 1.0

Key = tuple[str, Source]
#: Messages of one batch that are delivered together: their offsets and values.
Run = tuple[HeldBatch, Sequence[int], Sequence[bytes | None]]


class Ordering:
    """The lines of one receiver.

    ``deliver`` delivers messages. ``acquire`` runs a cycle for places and returns whether it succeeded. ``verify``
    commits, and raises NotCommitted if a source belongs to another member. ``changed`` wakes the receiver, ``resumed``
    lets it continue with the records of a source, and ``failed`` ends it with an error.
    """

    def __init__(
        self,
        settings: ReceiverSettings,
        questions: TrackerQueries | None,
        *,
        deliver: Callable[[Sequence[Run]], None],
        acquire: Callable[[Sequence[Acquisition]], Awaitable[bool]],
        verify: Callable[[Collection[Source]], Awaitable[None]],
        changed: Callable[[], None],
        resumed: Callable[[Source], None],
        failed: Callable[[BaseException], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        new_holder: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._questions = questions
        self._deliver = deliver
        self._acquire = acquire
        self._verify = verify
        self._changed = changed
        self._resumed = resumed
        self._failed = failed
        self.now_s = clock
        self._sleep = sleep
        self._new_holder = new_holder
        self._lines: dict[Key, Lines] = {}
        self._queues: frozenset[str] = frozenset()
        self._paused: frozenset[str] = frozenset()
        #: Sources that are being resumed.
        self._asked: set[Source] = set()
        self._asking: set[asyncio.Task[None]] = set()
        # What the lines have asked for: messages to deliver, and to acquire again.
        self._ready: list[Run] = []
        self._again: list[tuple[Lines, Place]] = []
        self._ask: list[tuple[Lines, Place]] = []
        self._later: list[tuple[float, int, Lines, Place]] = []
        self._numbers = count()
        self._asked_s = FIRST_ASK_S
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: Whether positions have changed since they were last committed.
        self.moved = False
        self._commit_s = 0.0
        #: Whether to stop delivering.
        self.stopped = False
        self.reads = BlockedReads()
        self._limit = WaitingLimit()

    def start(self) -> None:
        self._task = self._begun(self._run(), "marq-ordering")

    async def stop(self) -> None:
        """Stop delivering."""
        self.stopped = True
        tasks = [*self._asking, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begun(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ask_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._asking.add(self._begun(work, "marq-ask"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        # give_up() cancels the other tasks.
        if (error := failure_of(task, stopping=self.stopped or task is not self._task)) is not None:
            self._failed(error)

    def serve(self, queues: Iterable[str]) -> None:
        """Note which of these queues are ordered, and which of them are paused."""
        settings = {queue: self._settings.queue(queue) for queue in queues}
        self._queues = frozenset(queue for queue, each in settings.items() if each.ordered)
        self._paused = frozenset(queue for queue in self._queues if settings[queue].paused)
        self._wake.set()

    def purged(self, queue: str, ended: Callable[[Message], bool]) -> None:
        """Drop the undelivered messages of a queue that a purge has ``ended``, and ask about those to acquire."""
        for lines in self._lines.values():
            if lines.queue == queue:
                lines.purged(ended)
        self._ask += [each for each in self._again if each[0].queue == queue]
        self._again = [each for each in self._again if each[0].queue != queue]
        # Later messages of the keys of released ones must not wait until the next regular question.
        self._later = [(0.0, *each[1:]) if each[2].queue == queue else each for each in self._later]
        heapq.heapify(self._later)
        self._wake.set()
        self.settled()

    @property
    def queues(self) -> frozenset[str]:
        """The queues with ordering that are served."""
        return self._queues

    @property
    def has_room(self) -> bool:
        """Whether more messages may wait behind others."""
        return self._limit.has_room(self._lines.values())

    @property
    def waiting(self) -> int:
        """The number of messages that have not been delivered."""
        return sum([lines.waiting for lines in self._lines.values()])

    @property
    def busy(self) -> bool:
        """Whether sources are being resumed, or have open messages."""
        return bool(self._asked) or any(self._lines.values())

    @property
    def undelivered(self) -> list[Message]:
        """The messages that are leased here and were not delivered."""
        return [message for lines in self._lines.values() for message in lines.undelivered]

    @property
    def awaits(self) -> bool:
        """Whether messages will be delivered as time passes."""
        return bool(self._later)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def unresumed(self, serving: Serving, records: Mapping[Source, Records]) -> list[Source]:
        """Return the sources of these records that are not resumed, and begin to resume them."""
        if not self._queues:
            return []
        found: dict[Source, list[str]] = {}
        for source in records:
            queues = [queue for queue in serving.queues_in(source.topic) if queue in self._queues]
            if missing := [queue for queue in queues if (queue, source) not in self._lines]:
                found[source] = missing
        new = found.keys() - self._asked
        if new:
            self._asked.update(new)
            asked = [
                Resume(queue, self._new_holder() or 1, source, [records[source].offsets[0]], onwards=True)
                for source in new
                for queue in found[source]
            ]
            own_topics = frozenset(source for source in new if serving.is_own(source.topic))
            self._ask_in_task(self._resume(asked, own_topics))
        return list(found)

    def _answers(self, questions: Sequence[Resume]) -> AsyncGenerator[tuple[Resume, list[Resumed]]]:
        assert self._questions is not None, "a receiver of queues with ordering can ask"
        return self._questions.answers(questions)

    async def _resume(self, asked: Sequence[Resume], own_topics: frozenset[Source]) -> None:
        left = Counter(each.source for each in asked)
        async for question, parts in self._answers(asked):
            source, now_s = question.source, self.now_s()
            try:
                await self._verify({source})
                self._begin(question, parts, now_s, own_topic=source in own_topics)
            except NotCommitted as error:
                # It is asked again, unless the source belongs to another member by now.
                log.info("source not resumed: topic=%s partition=%d %s", *source, error)
                await self._sleep(RETRY_S)
            left[source] -= 1
            if not left[source]:
                self._asked.discard(source)
                self._resumed(source)

    def _begin(self, question: Resume, parts: Sequence[Resumed], now_s: float, *, own_topic: bool) -> None:
        """Create the lines of a queue in a source that is resumed."""
        opened = {offset: each for offset, each in open_messages(parts, now_s).items() if each is not None}
        queue, source, holder = question.queue, question.source, ordered_holder(parts[0].asked_at, self._new_holder())
        self._lines[queue, source] = Lines(self, queue, source, holder, parts[0].acquired, opened, own_topic=own_topic)

    def give_up(self) -> list[Message]:
        """Give up all sources; return the messages that are leased here and were not delivered."""
        given_up = self.undelivered
        for lines in self._lines.values():
            lines.active = False
        self._lines = {}
        self._again, self._ask, self._later, self._ready = [], [], [], []
        self._asked = set()
        for task in self._asking:
            task.cancel()
        return given_up

    # --- reading ------------------------------------------------------------------------------------------------------

    def lines(self, queue: str, source: Source) -> Lines | None:
        """Return the lines for new records of a queue, None if it has no ordering."""
        return self._lines[queue, source] if queue in self._queues else None

    def behind(
        self, readings: Iterable[Reading], ends: Mapping[Source, int], *, partial: bool = False
    ) -> dict[Key, int]:
        """Return the positions to commit in a cycle with these readings; if ``partial``, only of some sources."""
        behind = {key: lines.low(ends[key[1]]) for key, lines in self._lines.items() if key[1] in ends}
        for lines, _, first in readings:
            key = lines.queue, lines.source
            if first is not None and key in behind:
                behind[key] = min(behind[key], first)
        self.moved = self.moved and partial and any(source not in ends for _, source in self._lines)
        return behind

    def uncommitted(self) -> None:
        """Schedule a commit of positions: some have changed, or their commit has failed."""
        if not self.moved and self._lines:
            self.moved = True
            self._commit_s = self.now_s() + COMMIT_S
            self._wake.set()

    def add(self, acquired: Sequence[tuple[Acquisition, HeldBatch]], readings: Sequence[Reading]) -> None:
        """Add the messages of a cycle: those acquired, and those known before."""
        new: dict[Lines, list[tuple[HeldBatch, Records]]] = {reading.lines: [] for reading in readings}
        for acquisition, held in acquired:
            lines = held.lines
            assert lines is not None
            if not acquisition.again:
                new[lines].append((held, acquisition.messages))
                continue
            for offset in acquisition.messages.offsets:
                if not lines.reacquired(held, offset):
                    held.release(offset, 0, counted=False)
        for lines, known, _ in readings:
            lines.add(new[lines], known)
            if new[lines]:
                self.reads.note(blocked=not self._ready)
        self.flush()

    # --- what the lines ask for ---------------------------------------------------------------------------------------

    def ready(self, held: HeldBatch, offsets: Sequence[int], values: Sequence[bytes | None]) -> None:
        """Deliver messages of a batch with the next :meth:`flush`."""
        self._ready.append((held, offsets, values))

    def again(self, lines: Lines, place: Place) -> None:
        """Acquire a message; if it is foreign, ask about it first."""
        (self._ask if place.foreign else self._again).append((lines, place))
        self._wake.set()

    def later(self, lines: Lines, place: Place) -> None:
        """Call :meth:`Lines.due` at the place's ``due_s``; ask about a foreign message first."""
        due_s = place.due_s
        if place.foreign:
            # It may end earlier, or be released or moved.
            now_s = self.now_s()
            due_s = min(due_s, now_s + self._ask_in_s(place, now_s))
        heapq.heappush(self._later, (due_s, next(self._numbers), lines, place))
        self._wake.set()

    def _ask_in_s(self, place: Place, now_s: float) -> float:
        if place.leased:
            return self._asked_s
        # An operator who moves a blocking message waits for its delivery.
        return MAX_ASK_S if place.due_s - now_s >= BLOCKED_WAIT_MS / 2_000 else WAITING_ASK_S

    def skipped(self, queue: str) -> SkippedRecords | None:
        return self._settings.skipped(queue)

    def settings(self, queue: str) -> QueueSettings:
        return self._settings.queue(queue)

    def flush(self) -> None:
        """Deliver messages that have become ready."""
        ready, self._ready = self._ready, []
        if ready:
            self._deliver(ready)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settled(self) -> None:
        """Continue after outcomes have become durable."""
        self.uncommitted()
        self.flush()
        self._changed()

    # --- acquiring again ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._pass_due()
            if self._ask:
                self._ask_in_task(self._ask_about(self._ask))
                self._ask = []
            if any(lines.queue not in self._paused for lines, _ in self._again):
                await self._acquire_again()
            self.flush()
            if self.moved and self.now_s() >= self._commit_s:
                self._commit_s = self.now_s() + COMMIT_S
                await self._acquire([])
            next_s = min(self._later[0][0] if self._later else inf, self._commit_s if self.moved else inf)
            left_s = next_s - self.now_s()
            if left_s > 0 and not self._wake.is_set():
                await until_set(self._wake, left_s, self._sleep)

    def _pass_due(self) -> None:
        now_s, later = self.now_s(), self._later
        while later and later[0][0] <= now_s:
            _, _, lines, place = heapq.heappop(later)
            if place.foreign and lines.active and not place.busy:
                place.busy = True
                self._ask.append((lines, place))
            else:
                lines.due(place)

    async def _ask_about(self, foreign: Sequence[tuple[Lines, Place]]) -> None:
        """Ask about messages that another consumer holds."""
        groups: dict[Lines, dict[int, Place]] = {}
        for lines, place in foreign:
            if lines.active:
                groups.setdefault(lines, {})[place.offset] = place
        if not groups:
            return
        asked_of = {(lines.queue, lines.source): lines for lines in groups}
        questions = [
            each
            for lines, places in groups.items()
            for each in questions_about(lines.queue, lines.source, places, self._new_holder)
        ]
        self._asked_s = min(self._asked_s * 2, MAX_ASK_S)
        async for question, parts in self._answers(questions):
            of = asked_of[question.queue, question.source]
            for offset, opened in open_messages(parts, self.now_s()).items():
                asked = groups[of][offset]
                if of.active and of.answered(asked, opened):
                    self._again.append((of, asked))
                    self._wake.set()
        if not any(each.leased for _, _, _, each in self._later):
            self._asked_s = FIRST_ASK_S
        self.settled()

    async def _acquire_again(self) -> None:
        """Acquire again the messages that are the first of their lines."""
        taken = [(lines, place) for lines, place in self._again if lines.queue not in self._paused]
        self._again = [(lines, place) for lines, place in self._again if lines.queue in self._paused]
        groups: dict[Lines, list[Place]] = {}
        for lines, place in taken:
            if lines.active:
                groups.setdefault(lines, []).append(place)
        again = [each for of, places in groups.items() for each in acquisitions_again(of, places, self._settings)]
        if again and not await self._acquire(again):
            due_s = self.now_s() + RETRY_S
            for lines, places in groups.items():
                for place in places:
                    lines.not_acquired(place, due_s)
