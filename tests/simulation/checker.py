"""What must hold of a history: checked where it happens, and at the end.

Each check has a name, which a failing seed prints and a mutant is killed by:

==========================  ==========================================================================================
``fired-closed``            a copy was sent of a message that, by the log the tracker had read, was not open
``fired-early``             … that was not due by the clock of the tracker's own TICK
``fired-wrong``             … to the wrong destination, with the wrong attempt or cause
``before-own-tick``         … before a TICK of the tracker's own, written after it had fenced its predecessor, was read
``fired-twice``             two committed copies of one record
``fidelity``                a copy differs from what its sender sent
``attempts``                the attempt of a copy does not follow from its parent's, or passes the limit
``dead-letter``             a dead letter that was neither rejected nor at its last attempt
``handed-out-twice``        two consumers (or one, twice) were handed one record
``from-nowhere``            something was handed out or acknowledged that nobody sent
``unexplained-copy``        a copy whose cause (expiry, release, reject, aborted transaction) did not happen
``duplicates-without-fault``  a seed without faults in which something was delivered more often than it was given back
``book-differs``            the lease book is not the plain fold of the log up to its ``applied``
``table-differs``           the rows of the changelog are not the plain fold of the log up to the applied row
``quarantine``              an unreadable record that is not in quarantine, or another one that is
``no-row``                  a tracker that is to send a copy finds no payload
``lost``                    a message that is neither acknowledged nor dead
``stuck``                   the faults have ended and the world does not drain
``rows-left``               a row of a message in a changelog after the world has drained
``raised``                  the core raised something
==========================  ==========================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from marq.core.copies import Copy, record_id
from marq.core.leases import Destination, Fire
from marq.core.markers import Cause, Payload, Source
from marq.core.queue import QueueSettings
from tests.simulation.log import Outcome, Record, Transaction
from tests.simulation.oracle import Key, PlainFold

Headers = tuple[tuple[str, bytes | None], ...]


class Violation(AssertionError):
    """A property that does not hold."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


class Message:
    """One record of a messages topic."""

    __slots__ = (
        "attempt",
        "handed_out",
        "headers",
        "key",
        "parent",
        "queue",
        "root",
        "sent_ms",
        "transaction",
        "value",
    )

    def __init__(
        self,
        queue: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        attempt: int,
        sent_ms: int,
        root: Key,
        parent: Key | None,
        transaction: Transaction | None,
    ) -> None:
        self.queue = queue
        self.key = key
        self.value = value
        self.headers = headers
        self.attempt = attempt
        self.sent_ms = sent_ms
        self.root = root
        self.parent = parent
        self.transaction = transaction
        self.handed_out = 0


class Checker:
    """The history of one world, as far as the checks need it."""

    def __init__(self, settings: dict[str, QueueSettings]) -> None:
        self.settings = settings
        self.messages: dict[Key, Message] = {}
        #: Why the lease of a record may run out although its consumer is well-behaved.
        self.excuses: dict[Key, str] = {}
        self.given_back: dict[Key, str] = {}
        self.rejected: dict[Key, str] = {}
        self.acked: set[Key] = set()
        self.ended: dict[Key, Fire] = {}
        self.dead: set[Key] = set()
        self.garbage: dict[tuple[int, int], bytes | None] = {}
        self.quarantined: Counter[tuple[int, int]] = Counter()
        #: Something happened after which every lease may run out at any moment.
        self.all_excused = ""
        self.faults = 0
        self.stats: Counter[str] = Counter()

    # --- what happens -------------------------------------------------------------------------------------------------

    def sent(self, source: Source, record: Record, queue: str) -> None:
        key = (source, record.offset)
        self.messages[key] = Message(
            queue, record.key, record.value, record.headers, 1, record.time_ms, key, None, None
        )
        self.stats["sent"] += 1

    def excuse(self, keys: Iterable[Key], why: str) -> None:
        for key in keys:
            self.excuses.setdefault(key, why)

    def excuse_all(self, why: str) -> None:
        self.all_excused = why

    def handed_out(self, source: Source, record: Record, committed_reads: bool) -> None:
        message = self.messages.get((source, record.offset))
        if message is None or (committed_reads and record.aborted):
            raise Violation("from-nowhere", f"{source} {record.offset} was handed out")
        message.handed_out += 1
        self.stats["handed_out"] += 1
        if message.handed_out > 1:
            raise Violation("handed-out-twice", f"{source} {record.offset}")

    def ack_written(self, source: Source, offsets: Iterable[int]) -> None:
        for offset in offsets:
            message = self.messages.get((source, offset))
            if message is None or not message.handed_out:
                raise Violation("from-nowhere", f"{source} {offset} was acknowledged")
            self.acked.add((source, offset))

    # --- decisions of a tracker ---------------------------------------------------------------------------------------

    def fires(self, fire: Fire, plain: PlainFold, tick: tuple[int, int] | None, fenced_at: int) -> None:
        """Judge one decision by the naive fold of what the tracker has read; ``tick`` is its own newest TICK."""
        key = (fire.source, fire.offset)
        where = f"{key} at {plain.applied}"
        if tick is None or tick[0] < fenced_at:
            raise Violation("before-own-tick", f"{where}: own TICK {tick}, fenced at {fenced_at}")
        standing = plain.open.get(key)
        if standing is None:
            raise Violation("fired-closed", f"{where}: it is not open")
        if standing.due_ms > tick[1]:
            raise Violation("fired-early", f"{where}: due {standing.due_ms}, the TICK says {tick[1]}")
        expected = plain.firing(standing)
        if (fire.destination, fire.attempt, fire.cause) != expected:
            raise Violation("fired-wrong", f"{where}: {fire}, expected {expected}")
        if key in self.ended:
            raise Violation("fired-twice", f"{where}: its fact is in the log already")

    def payload(self, fire: Fire, payload: Payload) -> None:
        """The payload that a tracker kept is the record as it was read."""
        message = self.messages.get((fire.source, fire.offset))
        if message is None:
            raise Violation("from-nowhere", f"{fire.source} {fire.offset} fired")
        kept = (payload.key, payload.value, _users(payload.headers), payload.attempt, payload.timestamp_ms)
        original = (message.key, message.value, _users(message.headers), message.attempt)
        if kept[:4] != original:
            raise Violation("fidelity", f"{fire.source} {fire.offset}: {kept}, sent was {original}")

    def copied(self, fire: Fire, copy: Copy, source: Source | None, record: Record, transaction: Transaction) -> None:
        """A copy was written, in a transaction that may still be aborted; no source: to the dead letters."""
        parent_key = (fire.source, fire.offset)
        parent = self.messages[parent_key]
        root = self.messages[parent.root]
        headers: dict[str, Any] = {name: value for name, value in record.headers if name.startswith("marq-")}
        if (record.key, record.value, _users(record.headers)) != (root.key, root.value, _users(root.headers)):
            raise Violation("fidelity", f"{parent_key}: the copy {record.key!r} {record.value!r} {record.headers}")
        expected_id = record_id(*parent.root).encode()
        if headers["marq-id"] != expected_id or headers["marq-first-sent"] != b"%d" % root.sent_ms:
            raise Violation("fidelity", f"{parent_key}: headers {headers}")
        if parent_key in self.given_back and fire.cause is Cause.RELEASED:
            error = self.given_back[parent_key].encode()
            if error and headers.get("marq-error") != error:
                raise Violation("fidelity", f"{parent_key}: error {headers.get('marq-error')!r}, was {error!r}")
        attempt = int(headers["marq-attempt"])
        self._check_attempt(fire, parent, attempt, source is None)
        if source is not None:
            self.messages[source, record.offset] = Message(
                parent.queue, record.key, record.value, record.headers, attempt, record.time_ms, parent.root,
                parent_key, transaction,
            )  # fmt: skip

    def _check_attempt(self, fire: Fire, parent: Message, attempt: int, dead: bool) -> None:
        key = (fire.source, fire.offset)
        limit = self.settings[parent.queue].max_attempts
        counted = not (fire.cause is Cause.RELEASED and self.given_back.get(key) == "")
        if dead:
            if attempt != parent.attempt:
                raise Violation("attempts", f"{key}: attempt {parent.attempt} died as {attempt}")
            if fire.cause is not Cause.REJECTED and attempt != limit:
                raise Violation("dead-letter", f"{key}: dead after {attempt} of {limit} attempts, cause {fire.cause}")
        elif attempt != parent.attempt + counted or attempt > limit:
            raise Violation("attempts", f"{key}: {parent.attempt} became {attempt} of {limit}, counted {counted}")

    def committed(self, fires: Iterable[Fire]) -> None:
        """A transaction with these copies and facts is committed."""
        for fire in fires:
            key = (fire.source, fire.offset)
            if key in self.ended:
                raise Violation("fired-twice", f"{key}: {self.ended[key]} and {fire}")
            self.ended[key] = fire
            if fire.cause is Cause.EXPIRED and not self.all_excused and key not in self.excuses:
                raise Violation("unexplained-copy", f"{key}: its lease ran out and nothing was wrong")
            if fire.cause is Cause.RELEASED and key not in self.given_back:
                raise Violation("unexplained-copy", f"{key}: nobody gave it back")
            if fire.cause is Cause.REJECTED and key not in self.rejected:
                raise Violation("unexplained-copy", f"{key}: nobody rejected it")
            if fire.destination is Destination.QUEUE:
                self.stats["redelivered"] += 1
            else:
                self.stats["dead"] += 1
                self.dead.add(self.messages[key].root)

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_quarantine(self, certain: bool) -> None:
        if set(self.quarantined) != set(self.garbage):
            raise Violation("quarantine", f"{self.quarantined} of {self.garbage}")
        if certain and any(count != 1 for count in self.quarantined.values()):
            raise Violation("quarantine", f"written more than once: {self.quarantined}")

    def check_nothing_lost(self, committed_reads: dict[str, bool]) -> None:
        done_roots = self.dead | {self.messages[key].root for key in self.acked}
        for key, message in self.messages.items():
            if message.root not in done_roots:
                raise Violation("lost", f"{message.root} of {message.queue} is neither acknowledged nor dead")
            transaction = message.transaction
            aborted = transaction is not None and transaction.outcome is not Outcome.COMMITTED
            if aborted and committed_reads[message.queue]:
                continue
            # Stronger than "its message is done": every record that a consumer may read comes to an end.
            if key not in self.acked and key not in self.ended:
                raise Violation("lost", f"record {key} of {message.queue} came to no end")

    def duplicates(self) -> int:
        """Return how many deliveries there were beyond the first of each message, and beyond those asked for.

        Each was explained when its copy was committed; one of an aborted transaction is explained by that.
        """
        delivered: Counter[Key] = Counter()
        asked: Counter[Key] = Counter()
        for key, message in self.messages.items():
            delivered[message.root] += message.handed_out
            if message.handed_out and message.transaction is not None:
                aborted = message.transaction.outcome is not Outcome.COMMITTED
                self.stats["handed_out_aborted" if aborted else "handed_out_again"] += 1
            ended = self.ended.get(key)
            if ended is not None and ended.cause is Cause.RELEASED and ended.destination is Destination.QUEUE:
                asked[message.root] += 1
        return sum(max(0, count - 1 - asked[root]) for root, count in delivered.items())

    def check_duplicates(self) -> int:
        duplicates = self.duplicates()
        if duplicates and not self.faults:
            raise Violation("duplicates-without-fault", f"{duplicates}")
        return duplicates


def _users(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    return tuple(header for header in headers if not header[0].startswith("marq-"))
