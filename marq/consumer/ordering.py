"""Which message of a key is next, and when: a pure engine for queues with ordering, limits, fairness or priorities.

Before a receiver acquires messages of such a queue in a source, it **resumes** the source: it asks the tracker which
messages are open (RESUME), and then commits, which the group rejects if the source has another reader by now. The
answer therefore covers everything that any former reader has delivered. From then on, :class:`KeyQueues` has the open
messages of the queue in this source. Only the first message of a key is delivered. The next one follows when the end of
the first is durable; otherwise a crash could redeliver the first after it. A message without a key is first at once.
:mod:`marq.consumer.turns` decides which messages have their turns, also with limits, fairness and priorities.

A message that is released, or whose lease has ended, keeps its place. Its tracker knows whether the attempt counts and
how long it waits, so the receiver asks it: at once, and when the delay is over, because the message may have been
cancelled or moved. The position of the queue is its lowest open message, so that the next reader reads all open
messages again.

Methods take what has happened and the time (monotonic seconds). :meth:`Ordering.next_steps` returns what the receiver
has to do, and :attr:`Ordering.next_due_s` when to call it at the latest.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeVar

from marq.consumer.priorities import Priorities
from marq.consumer.turns import Lines, Turns
from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction, is_exhausted
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.rows import IN_ORDER, LeaseRow, State
from marq.kafka.queue_records import Serving
from marq.kafka.records import OneHeader, Records, Row
from marq.leases.held import Ended, LeasedBatch, Released
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.limits import key_header
from marq.settings.queue import BLOCK, ORDERING_KEY
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import BLOCKED_WAIT_MS, LAST, Cause, Payload, Resume, Resumed, Source, offset_runs
from marq.wire.names import ORDERING_KEY_HEADER
from marq.wire.ordered_holders import ordered_holder
from marq.wire.record_headers import ordering_key, origin

log = logging.getLogger("marq")

#: How long to wait before the next question about a message that another consumer holds.
FIRST_ASK_S, MAX_ASK_S = 0.05, 1.0
#: How long to wait before the next question about a released message: only a purge, or an ack by token, ends its delay.
WAITING_ASK_S = 10.0
#: Pause after a failed attempt to acquire messages.
RETRY_S = 0.1
#: How long after its turn a message of a queue with a rate may begin: some are acquired only then.
MAX_TURN_S = 1.0
#: How long positions wait for a commit if nothing new is read.
COMMIT_S = 1.0
#: Maximum number of messages in a question, so that it fits into any record.
MAX_ASKED = 16_384
#: Maximum number of messages that wait behind others, and of bytes of their values; at this limit, reading pauses.
MAX_WAITING, MAX_WAITING_BYTES = 100_000, 256 << 20
#: Maximum number of messages that are read at once while all messages read so far wait behind others.
MAX_STEP = 1_000
_MAX_DOUBLINGS = 10
#: The error of a message whose lease has ended.
LEASE_ENDED = "its lease ran out: the process of its handler died, or the handler did not return"

T = TypeVar("T")
Key = tuple[str, Source]
#: Messages to acquire again, by the queues that they are in.
Again = Mapping["KeyQueues", Sequence["PendingRetry"]]


class DeliveryRun(NamedTuple):
    """Messages of one batch that are delivered together: their offsets and values."""

    batch: LeasedBatch
    offsets: Sequence[int]
    values: Sequence[bytes | None]


class TrackerQuestion(NamedTuple):
    """Which of these messages are open in a source? Without ``keys``: which messages from the first offset on?

    ``own_topic``: senders choose the keys.
    """

    queue: str
    source: Source
    offsets: Sequence[int]
    keys: KeyQueues | None = None
    own_topic: bool = False

    def markers(self, new_holder: Callable[[], int]) -> Iterator[Resume]:
        """Yield the question for its tracker, in parts that fit into a record; their holders identify the answers."""
        ascending = sorted(self.offsets)
        for run in offset_runs(ascending, MAX_ASKED):
            yield Resume(self.queue, new_holder() or 1, self.source, ascending[run], onwards=self.keys is None)


class Steps(NamedTuple):
    """What a receiver does now: deliver, resume, ask, acquire again, commit positions."""

    deliver: Sequence[DeliveryRun]
    resume: Sequence[TrackerQuestion]
    ask: Sequence[TrackerQuestion]
    acquire: Again
    commit: bool


class Open(NamedTuple):
    """An open message in an answer; its lease or delay ends at ``until_s``.

    ``attempt`` is the number of its next delivery, or how many are used up if it was ``leased``. If it ``blocks``, an
    operator has to move or cancel it.
    """

    leased: bool
    attempt: int
    until_s: float
    error: str
    blocks: bool


class Acquired(NamedTuple):
    """The messages of one ACQUIRE; ``again``: they have their places already."""

    keys: KeyQueues
    batch: LeasedBatch
    records: Records
    again: bool


class RereadRecords(NamedTuple):
    """The records of one queue in one source that are already open; ``first``: the offset of the first one, or None.

    Until the cycle has ended, the position of the queue must not pass ``first``, nor what the cycle acquires.
    """

    keys: KeyQueues
    known: Records
    first: int | None = None


@dataclass(slots=True, eq=False)
class PendingRetry:
    """An open message that is not leased here; its ``row`` serves to acquire it again.

    Nothing happens to it before ``due_s``, or while it is ``busy``: asked about, being acquired, or about to end.
    """

    row: Row
    due_s: float = 0.0
    busy: bool = False
    #: Ask before acquiring it: only the tracker knows whether it is open, and which attempt is next.
    asks: bool = True
    #: Whether user code may have had it.
    seen: bool = True
    #: True if user code had it here: its start may reach the log only after the tracker's answer.
    begun: bool = False
    #: The error of its last attempt, if it becomes a dead letter as soon as it is acquired.
    last: str | None = None
    #: True if a purge may have ended it since the tracker was last asked; that question is unanswered.
    outdated: bool = False
    #: How long to wait before the next question while another consumer holds it; doubled each time.
    ask_s: float = FIRST_ASK_S
    #: The first ``row``, from which each answer starts.
    original: Row = field(init=False)

    def __post_init__(self) -> None:
        self.original = self.row

    @property
    def offset(self) -> int:
        return self.row.offset


def open_messages(parts: Iterable[Resumed], now_s: float) -> dict[int, Open | None]:
    """Return the messages in an answer that came at ``now_s``, by offset; None for those that do not keep a place."""
    found: dict[int, Open | None] = {}
    for part in parts:
        rows = zip(part.offsets, part.states, part.attempts, part.waits_ms, part.errors, strict=True)
        for offset, state, attempt, wait_ms, error in rows:
            opened = Open(
                state == State.LEASED_IN_ORDER, attempt, now_s + wait_ms / 1000, error, wait_ms == BLOCKED_WAIT_MS
            )
            found[offset] = opened if state in IN_ORDER else None
    return found


class Ordering:
    """The queues with ordering, limits or fairness of one receiver."""

    def __init__(self, settings: ReceiverSettings) -> None:
        self.settings = settings
        #: The queues that are served by key.
        self.queues: frozenset[str] = frozenset()
        self._keys: dict[Key, KeyQueues] = {}
        #: The turns in these queues, and in those that were served by key: some of their messages may be here.
        self.turns: dict[str, Turns[KeyQueues]] = {}
        self.priorities: Priorities[KeyQueues] = Priorities()
        #: True if turns in one of these queues depend on how many messages handlers and calls want.
        self.sparing = False
        #: True if messages are read although no handler wants them. All queues must be of this kind, because they are
        #: read together.
        self.reads_ahead = False
        #: When the present partitions were assigned.
        self.assigned_s = 0.0
        #: Sources that are being resumed, and how many of their queues still wait for an answer.
        self._resuming: Counter[Source] = Counter()
        #: True once the receiver stops delivering.
        self.stopped = False
        #: When to commit positions that have changed since they were last committed; infinite if none has.
        self._commit_s = inf
        # The next steps.
        self._deliver: list[DeliveryRun] = []
        self._resume: list[TrackerQuestion] = []
        self._due: list[tuple[KeyQueues, PendingRetry]] = []
        self._later: list[tuple[float, int, KeyQueues, PendingRetry]] = []
        self._numbers = count()
        #: How many cycles in a row have read only messages that wait behind others.
        self._blocked_cycles = 0
        #: Whether the limit of waiting messages was logged, and half of it has been in use ever since.
        self._logged = False

    # --- what the receiver does ---------------------------------------------------------------------------------------

    def next_steps(self, now_s: float) -> Steps | None:
        """Return what to do now, None if there is nothing."""
        while self._later and self._later[0][0] <= now_s:
            _, _, keys, retry = heapq.heappop(self._later)
            keys.advance(retry, now_s)
        self._take_turns(now_s)
        commit = now_s >= self._commit_s
        if not (self._deliver or self._resume or self._due or commit):
            return None
        if commit:
            self._commit_s = now_s + COMMIT_S
        deliver, resume, self._deliver, self._resume = self._deliver, self._resume, [], []
        due, self._due = self._due, []
        asked, again = list[tuple[KeyQueues, PendingRetry]](), list[tuple[KeyQueues, PendingRetry]]()
        for keys, retry in due:
            (asked if retry.asks else again).append((keys, retry))
        questions = [
            TrackerQuestion(keys.queue, keys.source, [retry.offset for retry in retries], keys)
            for keys, retries in _grouped(asked).items()
        ]
        return Steps(deliver, resume, questions, _grouped(again), commit)

    @property
    def next_due_s(self) -> float:
        """When to call :meth:`next_steps` at the latest, if nothing else happens."""
        next_s = min(self._later[0][0] if self._later else inf, self._commit_s, self.priorities.next_s)
        return min([next_s, *[turns.next_s for _, turns in self._taking()]])

    def _taking(self) -> Iterable[tuple[str, Turns[KeyQueues]]]:
        """Return the queues in which keys wait for their turns."""
        return [(queue, turns) for queue, turns in self.turns.items() if turns.waits and not turns.paused]

    def _take_turns(self, now_s: float) -> None:
        taken = self.priorities.take(now_s)
        for queue, turns in self._taking():
            if queue not in self.priorities:
                taken += turns.take(now_s)
        for keys, offsets in _grouped(taken).items():
            keys.take_turns(offsets, now_s)

    def undelivered(self, queues: Mapping[str, Turns[KeyQueues]]) -> int:
        """Return how many messages of these queues have their turns and will be delivered soon."""
        now = sum([len(run.offsets) for run in self._deliver if run.batch.queue in queues])
        return now + sum([len(keys.coming) for turns in queues.values() for keys in turns.lines])

    def deliver(self, run: DeliveryRun) -> None:
        """Deliver messages with the next steps."""
        self._deliver.append(run)

    def again(self, keys: KeyQueues, retry: PendingRetry) -> None:
        """Ask about a message, or acquire it again, with the next steps."""
        self._due.append((keys, retry))

    def later(self, keys: KeyQueues, retry: PendingRetry) -> None:
        """Advance a message at its ``due_s``."""
        heapq.heappush(self._later, (retry.due_s, next(self._numbers), keys, retry))

    # --- queues and sources -------------------------------------------------------------------------------------------

    def serve(self, shares: Mapping[str, float]) -> None:
        """Note the settings of these queues, and which share of their partitions this receiver has."""
        settings = {queue: self.settings.queue(queue) for queue in shares}
        self.queues = frozenset(queue for queue, its in settings.items() if its.by_key)
        former, self.turns = self.turns, {}
        for queue, its in settings.items():
            if queue in self.queues or queue in former:
                turns = self.turns[queue] = former.get(queue) or Turns(its)
                turns.apply(its, shares[queue])
        self.sparing = any(turns.sparing for turns in self.turns.values())
        reading = [turns for turns in self.turns.values() if turns.reads_ahead]
        self.reads_ahead = 0 < len(reading) == len(settings)
        priorities = {queue: its.priority for queue, its in settings.items() if its.priority is not None}
        self.priorities.serve(self.turns, priorities)

    def assigned(self, partitions: Collection[Source], now_s: float) -> None:
        """Note which partitions are assigned now."""
        self.assigned_s = now_s
        for turns in self.turns.values():
            turns.keep(partitions)

    def purged(self, queue: str, now_s: float) -> None:
        """Drop the undelivered messages of a queue that a purge has ended."""
        skipped = self.settings.skipped(queue)
        for keys in self._keys.values():
            if keys.queue == queue and skipped is not None:
                keys.purged(skipped, now_s)
        self.uncommitted(now_s)

    def unresumed(self, serving: Serving, records: Mapping[Source, Records]) -> list[Source]:
        """Return the sources of these records that are not resumed, and begin to resume them."""
        found = []
        for source in records if self.queues else ():
            queues = [queue for queue in serving.queues_in(source.topic) if queue in self.queues]
            missing = [queue for queue in queues if (queue, source) not in self._keys]
            if missing and source not in self._resuming:
                begin, own_topic = records[source].offsets[0], serving.is_own(source.topic)
                self._resuming[source] = len(missing)
                self._resume += [TrackerQuestion(queue, source, [begin], own_topic=own_topic) for queue in missing]
            if missing:
                found.append(source)
        return found

    def resumed(self, question: TrackerQuestion, parts: Sequence[Resumed] | None, random: int, now_s: float) -> bool:
        """Begin with a queue in a source; ``parts`` is the answer, None if the source could not be verified.

        Return whether no other queue of the source is being resumed: reading goes on, or it is asked again.
        """
        queue, source, _, _, own_topic = question
        turns = self.turns.get(queue)
        if parts is not None and turns is not None:
            found = open_messages(parts, now_s)
            opened = {offset: message for offset, message in found.items() if message is not None}
            holder = ordered_holder(parts[0].asked_at, random)
            self._keys[queue, source] = KeyQueues(
                self, turns, queue, source, own_topic, holder, parts[0].acquired, opened, now_s
            )  # fmt: skip
        self._resuming[source] -= 1
        if self._resuming[source] > 0:
            return False
        del self._resuming[source]
        return True

    def give_up(self) -> None:
        """Give up all sources, and release the messages that wait here."""
        for keys in self._keys.values():
            keys.give_up()
        self._keys = {}
        for turns in self.turns.values():
            turns.give_up()
        self._deliver, self._resume, self._due, self._later = [], [], [], []
        self._resuming.clear()

    def release_waiting(self) -> None:
        """Release the messages that wait here."""
        for keys in self._keys.values():
            keys.release_waiting()

    @property
    def awaits(self) -> bool:
        """Whether messages will be delivered as time passes."""
        return bool(self._later)

    # --- reading ------------------------------------------------------------------------------------------------------

    def keys(self, queue: str, source: Source) -> KeyQueues | None:
        """Return the messages of a queue by key, None if it has no ordering."""
        return self._keys[queue, source] if queue in self.queues else None

    def _of(self, batch: LeasedBatch) -> KeyQueues | None:
        """Return where the messages of a batch wait, None if that source was given up or the queue has no ordering."""
        keys = self._keys.get((batch.queue, batch.source)) if batch.in_order else None
        return keys if keys is not None and keys.holder == batch.holder else None

    def has(self, batch: LeasedBatch) -> bool:
        """Return whether this receiver still reads the source of an ordered batch."""
        return self._of(batch) is not None

    @property
    def waiting(self) -> int:
        """The number of messages that have not been delivered."""
        return sum([keys.waiting for keys in self._keys.values()])

    @property
    def has_room(self) -> bool:
        """Whether more messages may wait behind others."""
        if not self._keys:
            return True
        size = sum([keys.size for keys in self._keys.values()])
        used = max(self.waiting / MAX_WAITING, size / MAX_WAITING_BYTES)
        if used >= 1 and not self._logged:
            self._report()
        self._logged = used >= 1 or (self._logged and used >= 0.5)
        return used < 1

    def _report(self) -> None:
        waiting: Counter[str] = Counter()
        for keys in self._keys.values():
            waiting[keys.queue] += keys.waiting
        [(queue, number)] = waiting.most_common(1)
        log.warning(
            "queue %s: too many messages wait for earlier ones with their keys, or for the end of a pause: reading from"
            " all queues of this consumer stops until some are finished: messages=%d",
            queue,
            number,
        )

    def step(self, room: int) -> int:
        """Return how many messages to read when ``room`` of them are wanted.

        Messages that wait behind others satisfy no call. While a receiver reads only such ones, it reads in larger and
        larger steps: otherwise, it would need a cycle for every few of them.
        """
        return max(room, min(room << min(self._blocked_cycles, _MAX_DOUBLINGS), MAX_STEP))

    def low_watermarks(
        self, reread: Iterable[RereadRecords], ends: Mapping[Source, int], *, partial: bool = False
    ) -> dict[Key, int]:
        """Return the positions to commit in a cycle with these records; if ``partial``, only of some sources."""
        lows = {key: int(min(keys.low, ends[key[1]])) for key, keys in self._keys.items() if key[1] in ends}
        for keys, _, first in reread:
            key = keys.queue, keys.source
            if first is not None and key in lows:
                lows[key] = min(lows[key], first)
        if not partial or all(source in ends for _, source in self._keys):
            self._commit_s = inf
        return lows

    def uncommitted(self, now_s: float) -> None:
        """Schedule a commit of positions: some have changed, or their commit has failed."""
        if not self.moved and self._keys:
            self._commit_s = now_s + COMMIT_S

    @property
    def moved(self) -> bool:
        """Whether positions have changed since they were last committed."""
        return self._commit_s < inf

    def acquired(self, acquired: Iterable[Acquired], reread: Sequence[RereadRecords], now_s: float) -> None:
        """Add the messages of a cycle: those acquired, and those known before."""
        new: dict[KeyQueues, list[tuple[LeasedBatch, Records]]] = {records.keys: [] for records in reread}
        for keys, batch, records, again in acquired:
            if not again:
                new[keys].append((batch, records))
                continue
            for offset in records.offsets:
                keys.acquired_again(batch, offset, now_s)
        for keys, known, _ in reread:
            keys.add(new[keys], known, now_s)
        self._take_turns(now_s)
        if any(new.values()):
            self._blocked_cycles = 0 if self._deliver else self._blocked_cycles + 1

    def not_acquired(self, again: Again, now_s: float) -> None:
        """Try again later to acquire these messages."""
        for keys, retries in again.items():
            for retry in retries:
                keys.not_acquired(retry, now_s)

    def answered(self, keys: KeyQueues, parts: Sequence[Resumed], now_s: float) -> None:
        """Process an answer, or parts of it."""
        keys.answered(open_messages(parts, now_s), now_s)
        self.uncommitted(now_s)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settled(self, ended: Iterable[Ended], now_s: float) -> None:
        """Continue after outcomes have become durable."""
        for outcomes in ended:
            if (keys := self._of(outcomes.batch)) is not None:
                keys.settled(*outcomes, now_s)
                self.uncommitted(now_s)
            else:
                ended_here = [release.offset for release in outcomes.released]
                ended_here += [*outcomes.acked, *[offset for offset, _ in outcomes.rejected]]
                self._end_former(outcomes.batch, ended_here)

    def lost(self, batch: LeasedBatch, offsets: Sequence[int], now_s: float) -> None:
        """Note that leases have ended by this client's clock."""
        if (keys := self._of(batch)) is not None:
            keys.lost(batch, offsets, now_s)
            self.uncommitted(now_s)
        else:
            self._end_former(batch, offsets)

    def _end_former(self, batch: LeasedBatch, offsets: Iterable[int]) -> None:
        """Note that messages of a former assignment no longer run here."""
        if batch.queue in self.turns:
            self.turns[batch.queue].end_former(batch.source.log, offsets)

    def moved_to(self, former: LeasedBatch, batch: LeasedBatch, offsets: Sequence[int]) -> None:
        """Note that messages are in another batch now."""
        if (keys := self._of(former)) is not None:
            keys.moved(former, batch, offsets)


def _grouped(pairs: Iterable[tuple[KeyQueues, T]]) -> dict[KeyQueues, list[T]]:
    groups: dict[KeyQueues, list[T]] = {}
    for keys, member in pairs:
        if keys.active:
            groups.setdefault(keys, []).append(member)
    return groups


class KeyQueues:
    """The open messages of one queue in one source, by ordering key, for one assignment."""

    def __init__(
        self,
        ordering: Ordering,
        turns: Turns[KeyQueues],
        queue: str,
        source: Source,
        own_topic: bool,
        holder: int,
        acquired: Iterable[tuple[int, int]],
        unread: Mapping[int, Open],
        now_s: float,
    ) -> None:
        self.queue, self.source, self.own_topic, self.holder = queue, source, own_topic, holder
        #: False once the source is given up: from then on, outcomes of messages in flight change nothing here.
        self.active = True
        self._ordering = ordering
        self._acquired = AcquiredRanges(acquired)
        #: Open messages of former holders whose records are not read yet.
        self._unread = dict(unread)
        #: Where the records end that cycles of this assignment have tried to acquire.
        self._tried = 0
        #: The values of all open messages, in the order of the log, and their total bytes.
        self._values: dict[int, bytes | None] = {}
        self.size = 0
        self._order: Lines[KeyQueues] = turns.line(self, ordering.assigned_s, self.source.log)
        leased = {offset: message.until_s for offset, message in unread.items() if message.leased}
        self._order.wait_for(leased, max(leased.values(), default=now_s))
        #: The batch of each message that is leased here.
        self._batches: dict[int, LeasedBatch] = {}
        self._delivered: set[int] = set()
        #: Messages that are not leased here, and leased ones that become dead letters.
        self._retries: dict[int, PendingRetry] = {}
        #: Those whose leases had ended when they were read, although handlers may have renewed them since. They count
        #: once all messages that other consumers still have are known.
        self._lapsed: list[PendingRetry] = []
        #: Those that have their turns and are delivered once they are leased here, and when they got their turns.
        self.coming: dict[int, float] = {}
        #: Messages whose earlier attempt was acked while the current one is being handled.
        self._done: set[int] = set()

    def timestamp_ms(self, offset: int) -> int | None:
        """Return the timestamp of an open message's record, None if the message is unknown."""
        if (retry := self._retries.get(offset)) is not None:
            return retry.original.timestamp
        batch = self._batches.get(offset)
        return None if batch is None else batch.record(offset).timestamp

    @property
    def waiting(self) -> int:
        """The number of messages that have not been delivered."""
        return len(self._values) - len(self._delivered)

    @property
    def low(self) -> float:
        """The lowest open offset, infinite without one: reading starts there after a crash."""
        # Messages are added in the order of the log.
        return next(iter(self._values), inf)

    # --- reading ------------------------------------------------------------------------------------------------------

    def select(self, own: Records) -> tuple[Records, Records]:
        """Return the records to acquire, and those of messages that are open already; leave out finished ones."""
        tried, self._tried = self._tried, max(self._tried, own.offsets[-1] + 1)
        if own.offsets[0] >= max(self._acquired.end, tried) and not self._unread:
            return own, own[:0]
        new, known = [], []
        for index, offset in enumerate(own.offsets):
            if offset < tried and offset not in self._values and self._is_skipped(offset, own.timestamps[index]):
                # A cycle that failed may have acquired it before its purge, so ask the tracker.
                self._unread.setdefault(offset, Open(True, 0, inf, "", False))
            if offset in self._unread:
                known.append(index)
            elif offset not in self._acquired:
                new.append(index)
        return own if len(new) == len(own) else own.at(new), own.at(known)

    def _is_skipped(self, offset: int, timestamp_ms: int) -> bool:
        skipped = self._ordering.settings.skipped(self.queue)
        return skipped is not None and not skipped.left(self.source, offset, timestamp_ms)

    def add(self, acquired: Sequence[tuple[LeasedBatch, Records]], known: Records, now_s: float) -> None:
        """Add the messages that a cycle acquired, and the ``known`` records of messages that are open already."""
        if not self.active:
            # The source was given up while the cycle committed: another consumer would wait for these leases.
            for batch, records in acquired:
                batch.put_back(records.offsets)
            return
        parts = [self._unadded(records) for _, records in acquired]
        for (batch, _), records in zip(acquired, parts, strict=True):
            self._batches.update(dict.fromkeys(records.offsets, batch))
        known = self._unadded(known)
        if len(known):
            parts = [Records.of(sorted(chain(known, *parts), key=attrgetter("offset")))]
        firsts = []
        for records in parts:
            self._values.update(zip(records.offsets, records.values, strict=True))
            self.size += sum([len(value or b"") for value in records.values])
            firsts += self._order.add(records.offsets, self._keys_of(records), known=len(known) > 0)
        # Only the first message of a key can have been delivered.
        for retry in [PendingRetry(row, seen=self._order.is_early(row.offset)) for row in known]:
            self._retries[retry.offset] = retry
            if (message := self._unread.pop(retry.offset, None)) is not None:
                self._ask_later(retry, message, now_s)
                if message.until_s > now_s:
                    self._note_turn(retry, leased=message.leased)
                    self.advance(retry, now_s)
                elif message.leased:
                    self._lapsed.append(retry)
        # Not `_tried`: later cycles may be in progress.
        self._order.known_to(max([records.offsets[-1] + 1 for records in parts if len(records)], default=0))
        if not self._order.awaited:
            # Consumers may be running messages behind these, so those were counted first.
            lapsed, self._lapsed = self._lapsed, []
            for retry in lapsed:
                if self._retries.get(retry.offset) is retry:
                    self._note_turn(retry, leased=True)
                    self.advance(retry, now_s)
        self._continue(firsts, now_s)

    def _keys_of(self, records: Records) -> Sequence[bytes | None]:
        return keys_of(records, self._ordering.settings.queue(self.queue).key, own_topic=self.own_topic)

    def _note_turn(self, retry: PendingRetry, *, leased: bool) -> None:
        """Note the turn of a message that another consumer has, or that waits for a delay."""
        self.coming.pop(retry.offset, None)
        if leased:
            self._order.occupy(retry.offset)
        else:
            self._order.park(retry.offset)

    def take_turns(self, offsets: Sequence[int], now_s: float) -> None:
        """Continue with messages whose turn it is."""
        for offset in offsets:
            if offset in self._retries:
                self.coming[offset] = now_s
        self._continue(offsets, now_s)

    def _unadded(self, records: Records) -> Records:
        """Leave out messages that are here already."""
        if self._values.keys().isdisjoint(records.offsets):
            return records
        return records.at([index for index, offset in enumerate(records.offsets) if offset not in self._values])

    # --- what happens next --------------------------------------------------------------------------------------------

    def _continue(self, firsts: Iterable[int], now_s: float) -> None:
        """Continue with messages that are the first of their keys."""
        if self._ordering.stopped:
            return
        ready: list[int] = []
        of: LeasedBatch | None = None
        for offset in firsts:
            batch = self._batches.get(offset)
            if offset in self._retries:
                self.advance(self._retries[offset], now_s)
            elif batch is None:
                # It has ended together with the one before it.
                continue
            elif batch is of and offset in batch.open:
                # Messages that were not delivered share the lease of their batch.
                ready.append(offset)
            elif batch.lasts(offset, now_s):
                self._deliver(of, ready)
                of, ready = batch, [offset]
            else:
                del self._batches[offset]
                row = self._row(batch, offset)
                # Leased here, it can't have changed, unless its ACQUIRE came after its purge.
                asks = offset not in batch.open or self._is_skipped(offset, row.timestamp)
                batch.open.discard(offset)
                self.coming[offset] = now_s
                self._retry(PendingRetry(row, asks=asks, seen=False), now_s)
        self._deliver(of, ready)

    def _deliver(self, batch: LeasedBatch | None, offsets: Sequence[int]) -> None:
        if batch is not None:
            self._delivered.update(offsets)
            batch.waiting.difference_update(offsets)
            self._ordering.deliver(DeliveryRun(batch, offsets, [self._values[offset] for offset in offsets]))

    def _row(self, batch: LeasedBatch, offset: int) -> Row:
        return batch.record(offset)._replace(value=self._values[offset])

    def _retry(self, retry: PendingRetry, now_s: float) -> None:
        self._retries[retry.offset] = retry
        self.advance(retry, now_s)

    def advance(self, retry: PendingRetry, now_s: float) -> None:
        """Ask about a message, or acquire it again, if it is the first of its key, and it is time."""
        offset = retry.offset
        if not self.active or self._retries.get(offset) is not retry or retry.busy:
            return
        parked = self._order.is_parked(offset)
        if not (parked or self._order.is_first(offset)):
            return
        if retry.due_s > now_s:
            self._ordering.later(self, retry)
            return
        if parked and not retry.asks:
            if not self._order.rejoin(offset):
                # It may wait for its turn for long, and end meanwhile.
                retry.asks = True
                return
            self.coming[offset] = now_s
        retry.busy = True
        self._ordering.again(self, retry)

    def acquired_again(self, batch: LeasedBatch, offset: int, now_s: float) -> None:
        """Note that a message was acquired again."""
        retry = self._retries.get(offset)
        if not self.active or retry is None or offset in self._batches:
            # No longer open here.
            batch.put_back([offset])
            return
        self._batches[offset] = batch
        turn_s = self.coming.pop(offset, inf)
        if retry.last is not None:
            batch.release(offset, LAST, error=retry.last)
        else:
            del self._retries[offset]
            if self._order.turns.rated and now_s - turn_s > MAX_TURN_S:
                # It waited for a tracker or a broker, and all that waited with it would begin at once.
                self._order.park(offset)
                self._order.rejoin(offset)
            else:
                self._continue([offset], now_s)

    def not_acquired(self, retry: PendingRetry, now_s: float) -> None:
        """Try again later to acquire a message."""
        retry.busy, retry.due_s = False, now_s + RETRY_S
        self.advance(retry, now_s)

    def answered(self, opened: Mapping[int, Open | None], now_s: float) -> None:
        """Process an answer about messages that are not leased here."""
        for offset, message in opened.items():
            retry = self._retries.get(offset)
            if not self.active or retry is None or not retry.asks:
                continue
            retry.busy = False
            if message is None:
                self._end([offset], now_s)
                continue
            self._answered(retry, message, now_s)
            if retry.outdated and retry.asks:
                retry.due_s = now_s
            retry.outdated = False
            self.advance(retry, now_s)

    def _ask_later(self, retry: PendingRetry, message: Open, now_s: float) -> None:
        """Ask when the lease or delay ends, or earlier, because the message may end, or be released or moved."""
        ask_s = WAITING_ASK_S
        if message.leased:
            ask_s, retry.ask_s = retry.ask_s, min(retry.ask_s * 2, MAX_ASK_S)
        elif message.blocks:
            # An operator who moves it waits for its delivery.
            ask_s = MAX_ASK_S
        retry.due_s = min(message.until_s, now_s + ask_s)

    def _answered(self, retry: PendingRetry, message: Open, now_s: float) -> None:
        waits = message.until_s > now_s
        retry.last = None
        if message.leased:
            if not waits:
                self._lease_ended(retry, message)
        elif message.blocks and not self.blocks:
            # The queue's setting has changed: dead letters no longer block their keys. No delivery follows, so no
            # attempt is added.
            self._attempt(retry, message.attempt - 1, message.error)
            retry.last, waits = message.error, False
        else:
            counted = message.attempt > self._attempt_of(retry.original)
            self._attempt(retry, message.attempt, message.error, counted=counted)
        if waits:
            self._ask_later(retry, message, now_s)
            self._note_turn(retry, leased=message.leased)
            return
        retry.asks, retry.due_s = False, 0.0
        if retry.offset not in self.coming:
            self._order.park(retry.offset)

    def _lease_ended(self, retry: PendingRetry, message: Open) -> None:
        """Prepare what follows a lease that has ended; ``message.attempt`` are used up."""
        used, before = message.attempt, "" if message.error == LEASE_ENDED else message.error
        if retry.begun:
            used = max(used, self._attempt_of(retry.original))
        if not retry.seen and used < self._attempt_of(retry.original):
            # No user code had it.
            return
        if is_exhausted(used, True, self._ordering.settings.queue(self.queue)):
            # The dead letter does not tell it otherwise, because its message is released.
            retry.last = f"{LEASE_ENDED}; before that: {before}" if before else LEASE_ENDED
            self._attempt(retry, used, retry.last)
        else:
            self._attempt(retry, used + 1, before or LEASE_ENDED, cause=Cause.EXPIRED)

    @property
    def blocks(self) -> bool:
        """Whether a message that would become a dead letter blocks its key."""
        return self._ordering.settings.queue(self.queue).on_dead_letter == BLOCK

    def _attempt_of(self, row: Row) -> int:
        return origin(self.source, row.offset, row.timestamp, row.headers).attempt

    def _attempt(
        self, retry: PendingRetry, attempt: int, error: str, *, counted: bool = True, cause: Cause = Cause.RELEASED
    ) -> None:
        retry.row = delivered_again(self.source, self.queue, retry.original, attempt, error, counted, cause)

    # --- purges -------------------------------------------------------------------------------------------------------

    def purged(self, skipped: SkippedRecords, now_s: float) -> None:
        """Remove the messages that wait here and that a purge has ended; nothing is written about them."""
        settling = set[int]().union(*[batch.unwritten for batch in set(self._batches.values())])
        ended = [
            offset
            for offset, batch in self._batches.items()
            if self._waits(offset, batch)
            and offset in batch.open
            and offset not in settling
            and skipped.has_ended(self.source, offset, batch.record(offset).timestamp)
        ]
        for offset in ended:
            # It must not be renewed any longer.
            self._batches[offset].open.discard(offset)
        self._end(ended, now_s)
        # Later messages of the keys of released ones must not wait until the next regular question.
        for retry in list(self._retries.values()):
            if retry.busy:
                retry.outdated = True
            else:
                retry.due_s = now_s
                self.advance(retry, now_s)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settled(
        self,
        batch: LeasedBatch,
        acked: Sequence[int],
        released: Sequence[Released],
        rejected: Iterable[tuple[int, str]],
        now_s: float,
    ) -> None:
        """Note outcomes that are durable."""
        # Their handlers lost the lease but acked anyway; the handlers of the next attempts are running.
        done = {offset for offset in acked if self._batches.get(offset) is not batch and offset in self._delivered}
        if done:
            self._done |= done
            acked = [offset for offset in acked if offset not in done]
        last = [release.offset for release in released if release.delay_ms == LAST]
        self._end([*acked, *[offset for offset, _ in rejected], *last], now_s)
        for release in released:
            if release.delay_ms != LAST:
                self._is_lost(batch, release.offset, now_s)

    def lost(self, batch: LeasedBatch, offsets: Iterable[int], now_s: float) -> None:
        """Note that leases have ended by this client's clock."""
        unwritten = batch.unwritten
        for offset in offsets:
            # The others are acquired again when their turn comes, or continue when their outcomes are durable.
            if offset in self._delivered:
                self._delivered.discard(offset)
                if offset not in unwritten:
                    self._is_lost(batch, offset, now_s)

    def _is_lost(self, batch: LeasedBatch, offset: int, now_s: float) -> None:
        """Continue with a message that is no longer leased here."""
        if self._batches.get(offset) is not batch:
            return
        if offset in self._done:
            self._end([offset], now_s)
            return
        del self._batches[offset]
        self._delivered.discard(offset)
        self._retry(PendingRetry(self._row(batch, offset), begun=offset in batch.started), now_s)

    def moved(self, former: LeasedBatch, batch: LeasedBatch, offsets: Iterable[int]) -> None:
        """Note that messages are in another batch now."""
        self._batches.update(
            dict.fromkeys([offset for offset in offsets if self._batches.get(offset) is former], batch)
        )

    def _end(self, offsets: Sequence[int], now_s: float) -> None:
        """Remove messages, and continue with the next ones of their keys."""
        values, batches, size = self._values, self._batches, 0
        for offset in offsets:
            size += len(values.pop(offset, None) or b"")
            batches.pop(offset, None)
        self.size -= size
        self._delivered.difference_update(offsets)
        if self._retries or self._done:
            self._done.difference_update(offsets)
            for offset in offsets:
                self._retries.pop(offset, None)
                self.coming.pop(offset, None)
        self.take_turns(self._order.remove(offsets), now_s)

    def give_up(self) -> None:
        """Release the messages that wait here, and take no further part: the source may have another reader."""
        self.active = False
        self.release_waiting()
        # The rest may stay in memory until the next garbage collection.
        self._values.clear()

    def release_waiting(self) -> None:
        """Release the messages that are leased here and were not delivered."""
        for offset, batch in self._batches.items():
            if self._waits(offset, batch):
                batch.put_back([offset])

    def _waits(self, offset: int, batch: LeasedBatch) -> bool:
        """Return whether a message that is leased here was not delivered, and will be."""
        return offset in batch.waiting and offset not in self._retries


def delivered_again(source: Source, queue: str, row: Row, attempt: int, error: str, counted: bool, cause: Cause) -> Row:
    """Return the record of a message with the headers that its redelivery with this attempt would have."""
    if attempt == 1 and counted and not error:
        return row
    lease = LeaseRow(queue, 0, attempt, 0, 0, State.RELEASED, counted, error)
    action = DueAction(source, row.offset, lease, Destination.QUEUE, attempt, cause)
    # The record keeps its key: a header that repeats it could make the record too large to be acquired again.
    payload = Payload(row.timestamp, attempt, None, row.headers, row.value)
    return row._replace(headers=redelivery(action, payload, 0, own_topic=False).headers)


def keys_of(records: Records, key: str, *, own_topic: bool) -> list[bytes | None]:
    """Return the key of each record, None if it has none; ``key`` is the setting."""
    if key == ORDERING_KEY:
        return ordering_keys(records, own_topic=own_topic)
    name = key_header(key)
    return [dict(headers).get(name) or None for headers in records.headers or [()] * len(records)]


def ordering_keys(records: Records, *, own_topic: bool) -> list[bytes | None]:
    """Return the ordering key of each record, None if it has none."""
    if own_topic:
        return [key or None for key in records.keys]
    if records.headers is None:
        return [None] * len(records)
    if isinstance(records.headers, OneHeader) and records.headers.name == ORDERING_KEY_HEADER:
        return [value or None for value in records.headers.values]
    return [ordering_key(headers) for headers in records.headers]
